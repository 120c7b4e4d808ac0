"""The walk of a block of query rows over tiles of keys: the online softmax."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.block import Block
from jaxattn.kernels.pallas.formats import decode, decode_pair, unpack
from jaxattn.kernels.pallas.keys import are_known, hidden_zero, page_ids, path_of, per_key, pool_rows
from jaxattn.kernels.pallas.memory import load, load_pairs
from jaxattn.kernels.pallas.scores import LOG2E, key_positions, masked, modified


class Softmax(NamedTuple):
    """A softmax state.

    acc [R, DV] is the weighted sum of values; peak [R] is what the weights are relative to, in units of log2, -inf
    where no key was seen; total [R] is the sum of weights.
    """

    acc: Any
    peak: Any
    total: Any


def product(a, b, contract: tuple[int, int]):
    """Multiply two tiles with float32 sums, in full precision where they are float32."""
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    return lax.dot_general(
        a, b, dimensions, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
    )


def walk(
    q,
    scale,
    block: Block,
    page_table,
    k_cache,
    v_cache,
    ancestors,
    depths,
    first,
    last,
    C: AttentionConstants,
) -> Softmax:
    """Fold the tiles [first, last) of keys into a softmax state.

    The largest score of a row is kept as it is and subtracted before the factor to units of log2 is applied, which
    keeps differences of huge scores exact.
    """
    parts = 2 if C.paired_values else 1
    unit = jnp.full((C.block_rows,), LOG2E, jnp.float32) if C.modified else scale * LOG2E
    table_row = block.sequence * C.table_width + hidden_zero()
    path = path_of(ancestors, block.q_start + block.first_token, C) if C.path_keys else None

    def step(tile, state):
        acc, peak, total, page = state
        key = tile * C.tile + jnp.arange(C.tile, dtype=jnp.int32)  # [TILE]
        row = pool_rows(page, tile, C)
        pages_known = are_known(page, C)
        known = per_key(pages_known, C)
        # The ids of the next tile, so that its K and V can be fetched ahead without waiting for them.
        page = page_ids(page_table, table_row, tile + 1, block, path, C)

        k = key_tiles(k_cache, row, block.kv_head, C)
        first_part, *others = (product(rows, keys, (1, 1)) for rows, keys in zip(q, k, strict=True))
        score = sum(others, first_part)  # [BM, TILE]
        position = key_positions(key, block, depths, C)
        if C.modified:
            score = modified(score * scale[:, None], block, position, C)

        def with_masks(score):
            return masked(score, block, key, position, known, ancestors, C)

        if C.bare_tiles:
            bare = is_bare(tile, pages_known, block, C)
            score = lax.cond(bare, lambda score: score, with_masks, score)
        else:
            score = with_masks(score)

        new_peak = jnp.maximum(peak, jnp.max(score, 1))
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        decay = lax.exp2((peak - base) * unit)
        weight = lax.exp2((score - base[:, None]) * unit[:, None] + C.weight_shift)  # [BM, TILE]
        total = total * decay + jnp.sum(weight, 1)

        # A weight of 0 does not silence a NaN, so the rows of dead keys are zeroed as well.
        live = (key < block.stop) & known
        if C.window > 0:
            live = live & (key >= block.start)
        weight = weight.astype(C.compute)
        v = value_tiles(v_cache, row, block.kv_head, live, C)
        acc = tuple(
            part * decay[:, None] + product(weight, values, (1, 0))
            for part, values in zip(acc, v, strict=True)
        )
        return acc, new_peak, total, page

    acc, peak, total, _ = lax.fori_loop(
        first,
        last,
        step,
        (
            (jnp.zeros((C.block_rows, C.padded_value_dim // parts), jnp.float32),) * parts,
            jnp.full((C.block_rows,), -jnp.inf, jnp.float32),
            jnp.zeros((C.block_rows,), jnp.float32),
            page_ids(page_table, table_row, first, block, path, C),
        ),
    )
    acc = jnp.stack(acc, -1).reshape(C.block_rows, C.padded_value_dim) if C.paired_values else acc[0]
    return in_log2(Softmax(acc, peak, total), unit, C.weight_shift)


def is_bare(tile, pages_known, block: Block, C: AttentionConstants):
    """Whether every row of a block sees every key of a tile."""
    first_key = tile * C.tile
    bare = (first_key >= block.bare_start) & (first_key + C.tile <= block.bare_stop)
    every = [jnp.min(known.astype(jnp.int32)) > 0 for known in jax.tree.leaves(pages_known)]
    return functools.reduce(jnp.logical_and, every, bare)


def in_log2(state: Softmax, unit, shift: float) -> Softmax:
    """Multiply the peaks by `unit` and subtract the shift, exactly: what rounding takes from a peak goes to the sums.

    A peak of 1e5 is off by half a percent of a weight otherwise.
    """
    product = state.peak * unit
    high, unit_high = _high_bits(state.peak), _high_bits(unit)
    low, unit_low = state.peak - high, unit - unit_high
    lost = ((high * unit_high - product) + high * unit_low + low * unit_high) + low * unit_low
    peak = product - shift
    lost = lost + ((product - peak) - shift)
    factor = jnp.where(peak == -jnp.inf, 1.0, lax.exp2(lost))
    return Softmax(state.acc * factor[:, None], peak, state.total * factor)


def _high_bits(x):
    """The leading 12 bits of the mantissa, whose products are exact."""
    bits = lax.bitcast_convert_type(x, jnp.int32) & ~0xFFF
    return lax.bitcast_convert_type(bits, jnp.float32)


def key_tiles(cache, row, kv_head, C: AttentionConstants):
    """Load and convert the keys of rows of the pool `[TILE]`: one tile `[TILE, D]`, or two of half the columns.

    Unpacked, columns 0 and 1 of each four are those of the first tile and columns 2 and 3 those of the second.
    """
    if C.k_unpack:
        at, mask = tile_places(row, kv_head, C.head_dim // 2, C.product_dim, C)
        return unpack(load_pairs(cache, at, mask), C.k_unpack)
    at, mask = tile_places(row, kv_head, C.head_dim, C.padded_dim, C)
    return (decode(load(cache, at, mask), C.k_format, C.compute),)


def value_tiles(cache, row, kv_head, live, C: AttentionConstants):
    """Load and convert values, 0 in dead rows: one tile `[TILE, DV]`, or its even and its odd columns."""
    if not C.paired_values:
        at, mask = tile_places(row, kv_head, C.value_dim, C.padded_value_dim, C, live)
        return (decode(load(cache, at, mask), C.v_format, C.compute),)
    at, mask = tile_places(row, kv_head, C.value_dim // 2, C.padded_value_dim // 2, C, live)
    pair = load_pairs(cache, at, mask)
    if C.v_unpack:
        return unpack(pair, C.v_unpack)
    return decode_pair(pair, C.v_format, C.v_dtype, C.compute)


def tile_places(row, kv_head, width: int, padded: int, C: AttentionConstants, live=None):
    """Where the elements of a tile are, in a cache with `width` of them a row, and which to load; None for all."""
    at = row * (C.num_kv_heads * width) + kv_head * width  # [TILE]
    column = jnp.arange(padded, dtype=jnp.int64)
    shape = (C.tile, padded)
    mask = None
    if padded > width:
        mask = jnp.broadcast_to((column < width)[None, :], shape)
    if live is not None:
        rows = jnp.broadcast_to(live[:, None], shape)
        mask = rows if mask is None else mask & rows
    return at[:, None] + column[None, :], mask
