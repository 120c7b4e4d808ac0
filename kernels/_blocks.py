"""Blocks of query rows and tiles of keys, shared by the XLA implementations.

Index arrays are int64: call everything here inside the x64 scope.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int64, UInt64

from jaxattn.index64 import take_or_padding
from jaxattn.kernels import _products
from jaxattn.problem import AttentionProblem


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class QueryRows:
    """`Q` consecutive query rows of one sequence, for each of `B` blocks."""

    sequence: Int64[Array, "B"]
    # Keys before the first query row of the sequence.
    context: Int64[Array, "B"]
    live: Bool[Array, "B Q"]
    # Row of the token buffer, 0 where not live.
    token: Int64[Array, "B Q"]
    # Query index among the keys of the sequence, which causality compares.
    index: Int64[Array, "B Q"]
    # What the window and ALiBi measure from: the index, or context + depth in a tree.
    position: Int64[Array, "B Q"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class KeyTile:
    """`L` consecutive keys of one sequence, for each of `B` blocks; dead keys hold zeros."""

    key: Int64[Array, "B L"]
    live: Bool[Array, "B L"]
    k: Float32[Array, "B L K D"]
    v: Float32[Array, "B L K Dv"]


def query_rows(
    problem: AttentionProblem, sequence: Int64[Array, "B"], first_row: Int64[Array, "B"], count: int
) -> QueryRows:
    """Locate `count` query rows of each sequence, starting at its row `first_row`."""
    start = problem.cu_seqlens_q[sequence]
    q_len = problem.cu_seqlens_q[sequence + 1] - start
    context = problem.seqused_k[sequence] - q_len
    row = first_row[:, None] + jnp.arange(count, dtype=jnp.int64)  # [B, Q]
    live = row < jnp.minimum(q_len, problem.max_seqlen_q)[:, None]
    token = jnp.where(live, start[:, None] + row, 0)
    index = context[:, None] + row
    position = index
    if problem.depths is not None:
        position = context[:, None] + problem.depths[token].astype(jnp.int64)
    if problem.path_keys:
        index = position
    return QueryRows(sequence, context, live, token, index, position)


def scaled_queries(problem: AttentionProblem, rows: QueryRows) -> Float32[Array, "B K G Q D"]:
    """Gather the query rows in float32, times softmax scale and the descales of q and k; dead rows are 0."""
    width = problem.q.shape[2]
    scale = jnp.full(problem.k_cache.shape[2], problem.softmax_scale, jnp.float32)
    for descale in (problem.q_descale, problem.k_descale):
        if descale is not None:
            scale = scale * descale
    q = jnp.where(rows.live[..., None, None], problem.q[rows.token].astype(jnp.float32), jnp.float32(0))
    q = q.reshape(*rows.token.shape, scale.shape[0], problem.group_size, width) * scale[:, None, None]
    return q.transpose(0, 2, 3, 1, 4)


def key_range(problem: AttentionProblem, rows: QueryRows) -> tuple[Int64[Array, "B"], Int64[Array, "B"]]:
    """Bound the keys that a block's rows can see: first key and one past the last, equal when none."""
    capacity = problem.page_table.shape[1] * problem.page_size
    stop = jnp.minimum(problem.seqused_k[rows.sequence], capacity)
    if problem.causal:
        stop = jnp.minimum(stop, jnp.max(jnp.where(rows.live, rows.index, -1), axis=1) + 1)
    stop = jnp.where(rows.live.any(axis=1), jnp.maximum(stop, 0), 0)
    start = jnp.zeros_like(stop)
    if problem.sliding_window is not None:
        first_position = jnp.min(jnp.where(rows.live, rows.position, jnp.iinfo(jnp.int64).max), axis=1)
        start = jnp.clip(first_position - problem.sliding_window + 1, 0, stop)
    return start, stop


def gather_keys(
    problem: AttentionProblem,
    sequence: Int64[Array, "B"],
    first_page: Int64[Array, "B"],
    pages: int,
    start: Int64[Array, "B"],
    stop: Int64[Array, "B"],
) -> KeyTile:
    """Gather `pages` logical pages from `first_page` on; keys outside `[start, stop)` are dead."""
    num_pages, page_size, num_kv_heads, _ = problem.k_cache.shape
    logical = first_page[:, None] + jnp.arange(pages, dtype=jnp.int64)  # [B, pages]
    physical = take_or_padding(problem.page_table, sequence[:, None], logical)
    mapped = (physical >= 0) & (physical < num_pages)
    physical = jnp.where(mapped, physical, 0)

    offsets = jnp.arange(page_size, dtype=jnp.int64)
    key = (logical[..., None] * page_size + offsets).reshape(len(sequence), -1)  # [B, L]
    live = (key >= start[:, None]) & (key < stop[:, None]) & jnp.repeat(mapped, page_size, axis=1)

    # Otherwise XLA's CPU fusion works both out again for every element that it gathers.
    live, physical = jax.lax.optimization_barrier((live, physical))

    def gather(cache):
        # Keeps XLA from widening the whole cache ahead of the caller's loop where a CPU lacks its format.
        cache, pages = jax.lax.optimization_barrier((cache, physical))
        values = cache.at[pages].get(
            mode="promise_in_bounds", wrap_negative_indices=False
        )  # [B, pages, P, K, width]
        values = values.reshape(*key.shape, num_kv_heads, cache.shape[3]).astype(jnp.float32)
        return jnp.where(live[..., None, None], values, jnp.float32(0))

    return KeyTile(key, live, gather(problem.k_cache), gather(problem.v_cache))


def gather_path_keys(
    problem: AttentionProblem,
    ancestors: UInt64[Array, "T W"],
    rows: QueryRows,
    first_page: Int64[Array, "B"],
    pages: int,
    start: Int64[Array, "B"],
    stop: Int64[Array, "B"],
) -> KeyTile:
    """Gather keys as `gather_keys` does, for one row a block: behind the prefix come the keys of the row's path."""
    num_pages, page_size = problem.k_cache.shape[:2]
    key = first_page[:, None] * page_size + jnp.arange(pages * page_size, dtype=jnp.int64)  # [B, L]
    words = ancestors[rows.token[:, 0]]  # [B, W]
    node = jnp.arange(64 * words.shape[1], dtype=jnp.int64)
    bits = (words[:, node // 64] >> (node % 64).astype(jnp.uint64)) & jnp.uint64(1)  # [B, nodes]
    order = jnp.where(bits != 0, jnp.cumsum(bits.astype(jnp.int64), axis=1) - 1, -1)
    ahead = key - rows.context[:, None]
    here = order[:, None] == ahead[..., None]  # [B, L, nodes]
    index = jnp.where(ahead < 0, key, rows.context[:, None] + jnp.argmax(here, axis=2))
    live = (key >= start[:, None]) & (key < stop[:, None]) & ((ahead < 0) | here.any(axis=2))
    page = take_or_padding(problem.page_table, rows.sequence[:, None], jnp.where(live, index // page_size, 0))
    live &= (page >= 0) & (page < num_pages)
    page, slot = jnp.where(live, page, 0), jnp.where(live, index % page_size, 0)

    def gather(cache):
        cache, pages, slots = jax.lax.optimization_barrier((cache, page, slot))
        values = cache.at[pages, slots].get(mode="promise_in_bounds", wrap_negative_indices=False)
        return jnp.where(live[..., None, None], values.astype(jnp.float32), jnp.float32(0))

    return KeyTile(key, live, gather(problem.k_cache), gather(problem.v_cache))


def _key_positions(
    problem: AttentionProblem, rows: QueryRows, key: Int64[Array, "B L"]
) -> Int64[Array, "B L"]:
    if problem.depths is None or problem.path_keys:
        return key
    node = key - rows.context[:, None]
    token = problem.cu_seqlens_q[rows.sequence][:, None] + node
    depth = problem.depths[jnp.clip(token, 0, problem.q.shape[0] - 1)].astype(jnp.int64)
    return jnp.where(node < 0, key, rows.context[:, None] + depth)


def _is_ancestor(
    ancestors: UInt64[Array, "T W"], rows: QueryRows, key: Int64[Array, "B L"]
) -> Bool[Array, "B Q L"]:
    node = key - rows.context[:, None]  # [B, L]
    words = ancestors[rows.token]  # [B, Q, W]
    word = jnp.clip(node // 64, 0, words.shape[2] - 1)[:, None, :]
    bits = jnp.take_along_axis(words, jnp.broadcast_to(word, (*words.shape[:2], key.shape[1])), axis=2)
    shift = (node % 64).astype(jnp.uint64)[:, None, :]
    return (node < 0)[:, None, :] | (((bits >> shift) & jnp.uint64(1)) != 0)


def masked_scores(
    problem: AttentionProblem,
    rows: QueryRows,
    q: Float32[Array, "B K G Q D"],
    tile: KeyTile,
    heads_together: bool = False,
) -> Float32[Array, "B K G Q L"]:
    """Score each query row against each key of the tile; `-inf` where the row does not see the key."""
    scores = _products.scores(q, tile.k, heads_together)
    if problem.softcap is not None:
        cap = jnp.float32(problem.softcap)
        scores = cap * jnp.tanh(scores / cap)

    visible = rows.live[:, :, None] & tile.live[:, None, :]  # [B, Q, L]
    if problem.causal:
        visible &= tile.key[:, None, :] <= rows.index[:, :, None]
    if problem.ancestors is not None and not problem.path_keys:
        visible &= _is_ancestor(problem.ancestors, rows, tile.key)
    if problem.sliding_window is not None or problem.alibi_slopes is not None:
        distance = rows.position[:, :, None] - _key_positions(problem, rows, tile.key)[:, None, :]
        if problem.sliding_window is not None:
            visible &= distance < problem.sliding_window
        if problem.alibi_slopes is not None:
            slopes = problem.alibi_slopes.reshape(scores.shape[1:3])[:, :, None, None]  # [K, G, 1, 1]
            scores -= slopes * jnp.abs(distance).astype(jnp.float32)[:, None, None]
    return jnp.where(visible[:, None, None], scores, jnp.float32(-jnp.inf))
