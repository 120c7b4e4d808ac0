"""Arithmetic on the query rows of a batch: which sequence, position and slot each row has.

Call these functions inside an `index64` scope.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int64, UInt64

from jaxattn.index64 import take_or_padding
from jaxattn.tree import depths


def check_lengths(num_seqs: int, seqused_k: jax.Array, cu_seqlens_q: jax.Array | None) -> None:
    """Raise ValueError unless `seqused_k` is `[S]` and `cu_seqlens_q`, if given, is `[S+1]`."""
    if seqused_k.shape != (num_seqs,):
        raise ValueError(f"seqused_k: expected shape [S] = [{num_seqs}], got {list(seqused_k.shape)}")
    if cu_seqlens_q is not None and cu_seqlens_q.shape != (num_seqs + 1,):
        raise ValueError(
            f"cu_seqlens_q: expected shape [S+1] = [{num_seqs + 1}], got {list(cu_seqlens_q.shape)}; "
            "it holds the start of each sequence's rows and the end of the last"
        )


def constant_cu_seqlens(live: Bool[Array, "S"], q_len: int) -> Int64[Array, "S+1"]:
    """Give every sequence `q_len` rows at `s * q_len`, and none to the padding sequences behind the last live one.

    A padding sequence between live ones keeps its rows: without them every later row would move.
    """
    num_seqs = live.shape[0]
    ends = jnp.where(live, jnp.arange(1, num_seqs + 1, dtype=jnp.int64), 0)
    return jnp.minimum(jnp.arange(num_seqs + 1, dtype=jnp.int64), jnp.max(ends, initial=0)) * q_len


def lengths_of_rows(cu_seqlens_q: Int64[Array, "S_plus_1"]) -> Int64[Array, "S"]:
    """Count the query rows of each sequence."""
    return cu_seqlens_q[1:] - cu_seqlens_q[:-1]


@jax.jit
def neutralise(seqused_k: Int64[Array, "S"], cu_seqlens_q: Int64[Array, "S+1"]) -> Int64[Array, "S"]:
    """Set the length of a sequence without query rows to 0."""
    return jnp.where(lengths_of_rows(cu_seqlens_q) > 0, seqused_k, 0)


@jax.jit
def advance(
    seqused_k: Int64[Array, "S"], cu_seqlens_q: Int64[Array, "S+1"], n: Int64[Array, "*"]
) -> Int64[Array, "S"]:
    """Add `n` keys to the sequences that have query rows and keys."""
    live = (lengths_of_rows(cu_seqlens_q) > 0) & (seqused_k > 0)
    return jnp.where(live, seqused_k + n, seqused_k)


def _locate(seqused_k, cu_seqlens_q, num_tokens):
    row = jnp.arange(num_tokens, dtype=jnp.int64)
    sequence = jnp.searchsorted(cu_seqlens_q[1:], row, side="right").astype(jnp.int64)
    keys = take_or_padding(seqused_k, sequence)
    live = (row >= cu_seqlens_q[0]) & (keys > 0)
    context = keys - take_or_padding(lengths_of_rows(cu_seqlens_q), sequence)
    offset = row - take_or_padding(cu_seqlens_q, sequence)
    return sequence, live, context, offset


@functools.partial(jax.jit, static_argnames=("num_tokens",))
def sequence_ids(
    seqused_k: Int64[Array, "S"], cu_seqlens_q: Int64[Array, "S+1"], num_tokens: int
) -> Int64[Array, "T"]:
    """Find the sequence of each row; -1 for rows of padding."""
    sequence, live, _, _ = _locate(seqused_k, cu_seqlens_q, num_tokens)
    return jnp.where(live, sequence, -1)


@functools.partial(jax.jit, static_argnames=("num_tokens",))
def positions(
    seqused_k: Int64[Array, "S"],
    cu_seqlens_q: Int64[Array, "S+1"],
    ancestors: UInt64[Array, "T W"] | None,
    num_tokens: int,
) -> Int64[Array, "T"]:
    """Find the position of each row: context + row, or context + depth with a tree; 0 for rows of padding."""
    _, live, context, offset = _locate(seqused_k, cu_seqlens_q, num_tokens)
    if ancestors is not None:
        offset = depths(ancestors).astype(jnp.int64)
    return jnp.where(live, context + offset, 0)


@functools.partial(jax.jit, static_argnames=("num_tokens", "page_size"))
def slots(
    page_table: Int64[Array, "S M"],
    seqused_k: Int64[Array, "S"],
    cu_seqlens_q: Int64[Array, "S+1"],
    *,
    num_tokens: int,
    page_size: int,
) -> Int64[Array, "T"]:
    """Find the slot of each row's own key; -1 for rows of padding and for a key without a page."""
    sequence, live, context, offset = _locate(seqused_k, cu_seqlens_q, num_tokens)
    key_index = jnp.where(live, context + offset, -1)
    page = take_or_padding(page_table, sequence, key_index // page_size)
    return jnp.where(page >= 0, page * page_size + key_index % page_size, -1)
