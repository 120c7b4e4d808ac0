"""SpeculativeDecoder: the whole draft, verify, accept, extend cycle as one compiled loop on the device."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata
from jaxattn.speculative.acceptance import accept_greedy, accept_sampled
from jaxattn.speculative.protocols import Drafter, TargetModel, Weights
from jaxattn.speculative.sampling import draw, keys_at, probabilities, usable_logits
from jaxattn.speculative.state import DecoderState
from jaxattn.tree import ancestor_bits


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpeculativeDecoder:
    """Decodes a batch of sequences, several tokens per pass of the target.

    It is static: one compilation serves all states of the same shapes, whatever they hold. Every method takes
    a state and returns the next; the state that goes in is donated and must not be used again.

    Attributes:
        target: the model whose text is written.
        drafter: proposes what the target verifies.
        sampled: draw tokens by each row's sampling parameters; False takes the likeliest of every row.
        prefill_chunk: prompt tokens, of all rows together, in one pass of the target.
    """

    target: TargetModel
    drafter: Drafter
    sampled: bool = False
    prefill_chunk: int = 256

    @property
    def lookahead(self) -> int:
        """Tokens behind the known ones that the pages of a row must have room for in a cycle."""
        return lookahead(self.drafter)

    @index64
    def prefill(self, weights: Weights, state: DecoderState) -> DecoderState:
        """Write the prompts of all filling rows to the cache, chunk by chunk, and pick their first new token."""
        return _prefill(self, weights, state)

    @index64
    def run(self, weights: Weights, state: DecoderState, cycles: int) -> DecoderState:
        """Run `cycles` cycles, fewer where no row can go on, without a read by the host."""
        return _run(self, weights, state, jax.device_put(np.int64(cycles)))

    @index64
    def lower(self, weights: Weights, state: DecoderState) -> jax.stages.Lowered:
        """What `run` compiles for states of this form; compile it in a thread while the prompts are read."""
        return _run.lower(self, weights, state, jax.device_put(np.int64(1)))

    def stream(
        self, weights: Weights, state: DecoderState, *, every: int
    ) -> Iterator[tuple[DecoderState, list[list[int]]]]:
        """Run to the end of all rows, reading from the device once in `every` cycles.

        Yields:
            The state, and the tokens that each row got since the last time. Between two steps the caller may
            `admit`, `grant` and `release`, and send the changed state back: `generator.send(state)`.
        """
        seen = np.zeros(state.num_seqs, np.int64)
        while True:
            if np.asarray(state.filling).any():
                seen = np.where(state.filling, state.lengths, seen)
                state = self.prefill(weights, state)
            else:
                state = self.run(weights, state, every)
            history, lengths = np.asarray(state.history), np.asarray(state.lengths)
            seen = np.minimum(seen, lengths)
            new = [history[s, seen[s] : lengths[s]].tolist() for s in range(state.num_seqs)]
            seen = lengths
            state = (yield state, new) or state
            if not np.asarray(state.live | state.filling).any():
                return


def lookahead(drafter: Drafter) -> int:
    """Tokens behind the known ones that a cycle with `drafter` may write keys for."""
    return max(drafter.num_draft_tokens, drafter.lookahead)


def runnable(decoder: SpeculativeDecoder, state: DecoderState):
    """Live rows whose pages have room for a cycle."""
    return state.live & (state.lengths + decoder.lookahead <= state.capacity)


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state",))
def _run(decoder, weights, state, cycles):
    def going(carry):
        done, state = carry
        return (done < cycles) & jnp.any(runnable(decoder, state))

    def body(carry):
        done, state = carry
        return done + 1, _cycle(decoder, weights, state)

    return jax.lax.while_loop(going, body, (jnp.int64(0), state))[1]


def _cycle(decoder, weights, state):
    active = runnable(decoder, state)
    n = decoder.drafter.num_draft_tokens
    tree, draft_probs, draft = decoder.drafter.draft(weights.draft, state, active)
    state = dataclasses.replace(state, draft=draft)

    ancestors = None if decoder.drafter.topk == 1 else ancestor_bits(tree.parents)
    mode = "decode" if n == 1 else "target_verify"
    metadata = state.metadata(mode, state.cached, n, active, ancestors)
    tokens = jnp.maximum(tree.tokens, 0).reshape(-1)
    hidden, cache = decoder.target.forward(weights.target, tokens, state.cache, metadata)
    logits = decoder.target.logits(weights.target, hidden).reshape(state.num_seqs, n, -1)
    if decoder.sampled:
        acceptance = accept_sampled(logits, tree, state.sampling, state.lengths, draft_probs, active)
    else:
        acceptance = accept_greedy(logits, tree, active)
    cache = decoder.target.commit(cache, metadata, acceptance)
    draft = decoder.drafter.update(weights.draft, state, active, acceptance, hidden)

    accept_len = acceptance.accept_len.astype(jnp.int64)
    state = dataclasses.replace(
        state,
        cache=cache,
        draft=draft,
        cached=state.cached + accept_len,
        passes=state.passes + active,
    )
    return _stop_unsound(state.append(acceptance.tokens, accept_len), acceptance.sound)


@functools.partial(jax.jit, static_argnames=("decoder",), donate_argnames=("state",))
def _prefill(decoder, weights, state):
    return jax.lax.while_loop(
        lambda state: jnp.any(state.filling), lambda state: _prefill_chunk(decoder, weights, state), state
    )


def _prefill_chunk(decoder, weights, state):
    rows = decoder.prefill_chunk
    waiting = jnp.where(state.filling, state.lengths - state.cached, 0)
    taken = jnp.clip(rows - (jnp.cumsum(waiting) - waiting), 0, waiting)
    metadata = AttentionMetadata(
        page_table=state.page_table,
        swa_page_table=state.swa_page_table,
        cu_seqlens_q=jnp.concatenate([jnp.zeros(1, jnp.int64), jnp.cumsum(taken)]),
        seqused_k=jnp.where(taken > 0, state.cached + taken, 0),
        max_seqlen_q=rows,
        page_size=state.page_size,
        mode="extend",
    )
    sequence, position = metadata.sequence_ids(rows), metadata.positions(rows)
    tokens = state.history[jnp.maximum(sequence, 0), position]
    hidden, cache = decoder.target.forward(weights.target, tokens, state.cache, metadata)
    cached = state.cached + taken
    finished = state.filling & (cached == state.lengths)

    logits = decoder.target.logits(weights.target, hidden[jnp.maximum(metadata.cu_seqlens_q[1:] - 1, 0)])
    if decoder.sampled:
        probs, sound = probabilities(logits[:, None], state.sampling)
        token, sound = draw(keys_at(state.sampling, state.lengths), probs[:, 0]), sound[:, 0]
    else:
        logits, sound = usable_logits(logits)
        token = jnp.argmax(logits, axis=-1).astype(jnp.int32)
    state = dataclasses.replace(
        state, cache=cache, cached=cached, filling=state.filling & ~finished, live=state.live | finished
    )
    state = state.append(token[:, None], finished.astype(jnp.int64))
    draft = decoder.drafter.prefill(weights.draft, state, metadata, hidden, finished)
    return _stop_unsound(dataclasses.replace(state, draft=draft), sound | ~finished)


def _stop_unsound(state, sound):
    return dataclasses.replace(state, sound=state.sound & sound, live=state.live & sound)
