"""Tiled attention in plain XLA: an online softmax over tiles of pages, the default on CPU.

Query rows are cut into blocks of one sequence each. A group of blocks walks its keys together, one tile of
pages at a time, for as many tiles as its longest member needs, so memory does not grow with the context and
time follows the lengths in use, not the width of the page table.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32, Int64, Num

from jaxattn.errors import UnsupportedError
from jaxattn.index64 import cdiv
from jaxattn.kernels import _blocks, _output, _products
from jaxattn.problem import AttentionProblem

BLOCK_ROWS = 64
# Wide tiles first, narrow ones for the rest. Many rows to a block make narrow tiles wide enough.
TILE_KEYS = (1024, 256)
NARROW_FROM_ROWS = 8
# Bounds the elements of K, V and scores that one step of a group of blocks holds.
GROUP_ELEMENTS = 1 << 22


def supports(problem: AttentionProblem) -> str | None:
    """Return why the problem cannot be computed here, or None: this implementation takes everything."""
    return None


@jax.custom_jvp
def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention tile by tile. Shapes and edge rules are those of `jaxattn.kernels`.

    Raises:
        UnsupportedError: differentiated; the number of tiles is only known at run time.
    """
    if _output.is_empty(problem):
        return _output.neutral(problem)
    # One row a block and one block a group: a row's operations then have the same shapes in every batch.
    block_rows = 1 if problem.batch_invariant else min(problem.max_seqlen_q, BLOCK_ROWS)
    tiles = _tile_pages(problem, block_rows)
    first_block, sequence, first_row = _cut_rows(problem, block_rows)
    group = 1 if problem.batch_invariant else _group_size(problem, block_rows, tiles[0], len(sequence))

    groups = cdiv(len(sequence), group)
    padding = groups * group - len(sequence)
    sequence = jnp.pad(sequence, (0, padding)).reshape(groups, group)
    first_row = jnp.pad(first_row, (0, padding), constant_values=problem.max_seqlen_q).reshape(groups, group)

    def attend(block):
        rows = _blocks.query_rows(problem, *block, block_rows)
        return _attend_rows(problem, rows, tiles)

    if groups == 1:
        out, lse = attend((sequence[0], first_row[0]))
    else:
        out, lse = jax.lax.map(attend, (sequence, first_row))
        out, lse = (values.reshape(groups * group, *values.shape[2:]) for values in (out, lse))
    return _output.to_tokens(problem, first_block, out, lse)


@run.defjvp
def _refuse_derivative(primals, tangents):
    raise UnsupportedError(
        "implementation='xla' has no derivative; differentiate implementation='reference', which is dense"
    )


def _cut_rows(
    problem: AttentionProblem, block_rows: int
) -> tuple[Int64[Array, "S"], Int64[Array, "B"], Int64[Array, "B"]]:
    """Cut each sequence's rows into blocks: first block of a sequence, sequence and first row of a block."""
    sequences = problem.seqused_k.shape[0]
    if problem.max_seqlen_q <= block_rows:
        sequence = jnp.arange(sequences, dtype=jnp.int64)
        return sequence, sequence, jnp.zeros_like(sequence)
    tokens = problem.q.shape[0]
    q_len = jnp.minimum(jnp.diff(problem.cu_seqlens_q), problem.max_seqlen_q)
    count = cdiv(q_len, block_rows)
    end = jnp.cumsum(count)
    first_block = end - count
    block = jnp.arange(tokens // block_rows + min(sequences, tokens), dtype=jnp.int64)
    sequence = jnp.searchsorted(end, block, side="right", method="compare_all").astype(jnp.int64)
    sequence = jnp.minimum(sequence, sequences - 1)
    return first_block, sequence, (block - first_block[sequence]) * block_rows


def _group_size(problem: AttentionProblem, block_rows: int, tile_pages: int, blocks: int) -> int:
    """Return how many blocks one step takes together."""
    kv_heads, width = problem.k_cache.shape[2:]
    per_key = kv_heads * (width + problem.v_cache.shape[3]) + problem.q.shape[1] * block_rows
    per_block = tile_pages * problem.page_size * per_key
    return max(1, min(blocks, GROUP_ELEMENTS // per_block))


def _tile_pages(problem: AttentionProblem, block_rows: int) -> tuple[int, ...]:
    """Return the tile sizes to walk the keys with, in pages, widest first."""
    keys = TILE_KEYS if block_rows < NARROW_FROM_ROWS else TILE_KEYS[-1:]
    pages = [cdiv(size, problem.page_size) for size in keys]
    if not problem.batch_invariant:
        pages = [min(size, problem.page_table.shape[1]) for size in pages]
    return tuple(dict.fromkeys(pages))


def _attend_rows(
    problem: AttentionProblem, rows: _blocks.QueryRows, tiles: tuple[int, ...]
) -> tuple[Num[Array, "B Q H Dv"], Float32[Array, "B Q H"]]:
    """Attend from one group of blocks to its keys, with an online softmax."""
    q = _blocks.scaled_queries(problem, rows)
    start, stop = _blocks.key_range(problem, rows)
    heads_together = _products.heads_together_pay(q.shape[1], q.shape[2] * q.shape[3])
    page = start // problem.page_size
    pages = jnp.max(cdiv(stop, problem.page_size) - page)

    def step(tile, state, *, first_page, tile_pages):
        maximum, total, weighted = state
        places = first_page + tile * tile_pages, tile_pages, start, stop
        if problem.ancestors is not None and problem.path_keys:
            keys = _blocks.gather_path_keys(problem, problem.ancestors, rows, *places)
        else:
            keys = _blocks.gather_keys(problem, rows.sequence, *places)
        scores = _blocks.masked_scores(problem, rows, q, keys, heads_together)
        new_maximum = jnp.maximum(maximum, scores.max(axis=-1))
        shift = _output.finite_or_zero(new_maximum)
        weights = jnp.exp(scores - shift[..., None])
        rescale = jnp.exp(maximum - shift)
        values = _products.weighted_values(weights, keys.v, heads_together)
        return (
            new_maximum,
            total * rescale + weights.sum(axis=-1),
            weighted * rescale[..., None] + values,
        )

    shape = q.shape[:-1]
    state = (
        jnp.full(shape, -jnp.inf, jnp.float32),
        jnp.zeros(shape, jnp.float32),
        jnp.zeros((*shape, problem.v_cache.shape[3]), jnp.float32),
    )
    state = _vary_like(state, problem)
    for tile_pages in tiles:
        last = tile_pages == tiles[-1]
        count = cdiv(pages, tile_pages) if last else pages // tile_pages
        walk = functools.partial(step, first_page=page, tile_pages=tile_pages)
        state = jax.lax.fori_loop(0, count, walk, state)
        page, pages = page + count * tile_pages, pages - count * tile_pages
    return _output.finish(problem, *state)


def _vary_like(state, problem: AttentionProblem):
    """Mark a loop's initial state as varying over the `shard_map` axes that the problem varies over."""
    axes = frozenset().union(*map(_varying_axes, jax.tree.leaves(problem)))
    if not axes:
        return state
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, tuple(axes), to="varying"), state)


def _varying_axes(leaf: Array) -> frozenset:
    kind = jax.typeof(leaf)
    # jax 0.11 and before call it vma.
    return kind.vma if hasattr(kind, "vma") else kind.manual_axis_type.varying
