"""The compiled steps of generation: prefill a chunk of prompts, then decode or verify drafts, sequence by sequence.

Every shape is static and nothing is read on the host; the state is donated, so that the cache is updated in place.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int32, Int64

from jaxattn.metadata import AttentionMetadata, decode_metadata, extend_metadata, target_verify_metadata
from jaxattn.models.program import Program
from jaxattn.speculative import SamplingParams, draw, keys_at, probabilities, propose
from jaxattn.speculative.sampling import usable_logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeState:
    """A batch of S sequences between two steps.

    Attributes:
        tokens: prompts and what was generated, `C` columns.
        lengths: tokens known of each sequence. Once it is prefilled the last one is not in the cache yet.
        slots: slot of each token of each sequence in the cache, -1 where it has none.
        cache: keys and values.
    """

    tokens: Int32[Array, "S C"]
    lengths: Int32[Array, "S"]
    slots: Int64[Array, "S C"]
    cache: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Emitted:
    """Tokens that a step added: the first `counts` of each row. `sound` is false where logits were not finite."""

    tokens: Int32[Array, "S n"]
    counts: Int32[Array, "S"]
    sound: Bool[Array, "S"]


@functools.partial(jax.jit, static_argnames=("program", "page_size", "options"), donate_argnames="state")
def prefill_chunk(
    program: Program,
    weights: Any,
    state: DecodeState,
    rows: Int32[Array, "T"],
    cu_seqlens_q: Int[Array, "S+1"],
    seqused_k: Int[Array, "S"],
    sampling: SamplingParams | None,
    *,
    page_size: int,
    options: tuple[tuple[str, Any], ...] = (),
) -> tuple[DecodeState, Emitted]:
    """Read one chunk of the prompts into the cache; a sequence whose prompt ends in it emits its first token.

    Args:
        program: the model (static).
        weights: its weights.
        state: donated.
        rows: token ids of the chunk, sequence after sequence.
        cu_seqlens_q: start of each sequence's rows; a sequence without rows takes no part.
        seqused_k: tokens of each sequence that are in the cache after the chunk.
        sampling: see `choose`.
        page_size: tokens in a page of the cache (static).
        options: further arguments of `unified_attention`, as pairs (static).
    """
    metadata = extend_metadata(
        seqused_k=seqused_k,
        cu_seqlens_q=cu_seqlens_q,
        max_seqlen_q=rows.shape[0],
        **_table(state, page_size),
    )
    hidden, cache = program.forward(program.config, weights, rows, state.cache, metadata, **dict(options))
    last_rows = hidden[jnp.maximum(cu_seqlens_q[1:] - 1, 0)]
    chosen, sound = choose(program.logits(weights, last_rows)[:, None], sampling, state.lengths)
    ended = (jnp.diff(cu_seqlens_q) > 0) & (seqused_k == state.lengths)
    return _append(dataclasses.replace(state, cache=cache), chosen, ended.astype(jnp.int32), sound[:, 0])


@functools.partial(
    jax.jit, static_argnames=("program", "page_size", "num_draft_tokens", "options"), donate_argnames="state"
)
def decode_step(
    program: Program,
    weights: Any,
    state: DecodeState,
    live: Bool[Array, "S"],
    sampling: SamplingParams | None,
    *,
    page_size: int,
    num_draft_tokens: int = 1,
    options: tuple[tuple[str, Any], ...] = (),
) -> tuple[DecodeState, Emitted]:
    """Emit the next token of each live sequence, or with drafts up to `num_draft_tokens` of them.

    The drafts are what followed earlier occurrences of the text's own ending. A draft is accepted iff it is the
    token that would have been chosen without it, so that drafting changes the speed and not the text.

    Args:
        program: the model (static).
        weights: its weights.
        state: donated.
        live: the other sequences take no part.
        sampling: see `choose`.
        page_size: tokens in a page of the cache (static).
        num_draft_tokens: n, query rows per sequence (static): its last token, then n - 1 drafts.
        options: further arguments of `unified_attention`, as pairs (static).
    """
    n = num_draft_tokens
    drafts, metadata = _drafts(state, live, n, page_size)
    rows = jnp.maximum(drafts, 0).reshape(-1)
    hidden, cache = program.forward(program.config, weights, rows, state.cache, metadata, **dict(options))
    logits = program.logits(weights, hidden)
    chosen, sound = choose(logits.reshape(*drafts.shape, -1), sampling, state.lengths)
    agreed = jnp.cumprod(chosen[:, :-1] == drafts[:, 1:], axis=1, dtype=jnp.int32)
    counts = jnp.where(live, 1 + agreed.sum(axis=1, dtype=jnp.int32), 0)
    decided = jnp.arange(n) < counts[:, None]
    if n > 1:
        cache = program.commit(cache, metadata, jnp.where(decided, jnp.arange(n, dtype=jnp.int32), -1))
    return _append(dataclasses.replace(state, cache=cache), chosen, counts, (sound | ~decided).all(axis=1))


def choose(
    logits, sampling: SamplingParams | None, lengths: Int32[Array, "S"]
) -> tuple[Int32[Array, "S n"], Bool[Array, "S n"]]:
    """The next token after each of n rows per sequence, and whether its logits were sound.

    The randomness of a token depends on the sequence's key and the token's position only, so a token is the same
    whether it is chosen by a decode step or by a verify step.

    Args:
        logits: `[S, n, V]` in float32.
        sampling: parameters of each sequence, or None for the most likely token.
        lengths: `[S]`, the position of the token that the first row chooses.
    """
    if sampling is None:
        logits, sound = usable_logits(logits)
        return jnp.argmax(logits, axis=-1).astype(jnp.int32), sound
    probs, sound = probabilities(logits, sampling)
    columns = [draw(keys_at(sampling, lengths + i), probs[:, i]) for i in range(logits.shape[1])]
    return jnp.stack(columns, axis=1), sound


def _drafts(
    state: DecodeState, live: Bool[Array, "S"], n: int, page_size: int
) -> tuple[Int32[Array, "S n"], AttentionMetadata]:
    """The rows of the step, each sequence's last token first, and their metadata."""
    table = _table(state, page_size)
    if n == 1:
        last = jnp.take_along_axis(state.tokens, jnp.maximum(state.lengths - 1, 0)[:, None], axis=1)
        return last, decode_metadata(seqused_k=jnp.where(live, state.lengths, 0), **table)
    tree = propose(state.tokens, state.lengths, num_draft_tokens=n)
    prefix = jnp.where(live, state.lengths - 1, -1)
    return tree.tokens, target_verify_metadata(prefix_lens=prefix, num_draft_tokens=n, **table)


def _table(state: DecodeState, page_size: int) -> dict[str, Any]:
    sequences = jnp.arange(state.lengths.shape[0], dtype=jnp.int32)
    return {"page_size": page_size, "req_to_token": state.slots, "req_pool_indices": sequences}


def _append(
    state: DecodeState, chosen: Int32[Array, "S n"], counts: Int32[Array, "S"], sound: Bool[Array, "S"]
) -> tuple[DecodeState, Emitted]:
    """Add the first `counts` chosen tokens of each sequence to the state."""
    column = jnp.arange(chosen.shape[1], dtype=jnp.int32)
    width = state.tokens.shape[1]
    place = jnp.where(column < counts[:, None], state.lengths[:, None] + column, width)
    rows = jnp.arange(chosen.shape[0], dtype=jnp.int32)[:, None]
    tokens = state.tokens.at[rows, place].set(chosen, mode="drop")
    state = dataclasses.replace(state, tokens=tokens, lengths=state.lengths + counts)
    return state, Emitted(chosen, counts, sound | (counts == 0))
