"""Query rows in the compute type."""

import functools

import jax.numpy as jnp
from jax import lax

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.block import Block
from jaxattn.kernels.pallas.formats import decode
from jaxattn.kernels.pallas.memory import load


def scaled_rows(q_ref, q_descale, k_descale, block: Block, C: AttentionConstants):
    """Load query rows, and the positive factor of each from their products with K to scores.

    The rows come as the tiles that `walk.key_tiles` makes of K: one `[BM, D]`, or two of half the columns.
    """
    scale = jnp.float32(C.softmax_scale)
    if C.q_descale:
        scale = scale * load(q_descale, block.kv_head)
    if C.k_descale:
        scale = scale * load(k_descale, block.kv_head)
    column = jnp.arange(C.product_dim, dtype=jnp.int64)
    columns = [column]
    if C.k_unpack:
        column = column + (column & ~1)
        columns = [column, column + 2]
    at = (block.row * C.num_heads + block.head)[:, None] * C.head_dim
    stored = [
        load(q_ref, at + column[None, :], block.live[:, None] & (column < C.head_dim)[None, :])
        for column in columns
    ]
    row_scale = jnp.ones(C.block_rows, jnp.float32)
    if C.scale_rows:
        wide = [decode(part, C.q_format, jnp.float32) for part in stored]
        exponent = _exponents(wide)
        row_scale = lax.bitcast_convert_type(exponent, jnp.float32)
        inverse = lax.bitcast_convert_type(0x7F000000 - exponent, jnp.float32)
        parts = [(part * inverse[:, None]).astype(C.compute) for part in wide]
    else:
        parts = [decode(part, C.q_format, C.compute) for part in stored]
    q = tuple(jnp.where(scale < 0.0, -part, part) for part in parts)
    # A factor of 0 would turn the -inf of a masked score into NaN.
    return q, jnp.maximum(jnp.abs(scale) * row_scale, 1e-35)


def _exponents(tiles):
    """Bits of the power of two that brings each row, whose columns are parted among tiles, to between 1 and 2."""
    peak = functools.reduce(jnp.maximum, (jnp.max(jnp.abs(tile), 1) for tile in tiles))
    bits = lax.bitcast_convert_type(peak, jnp.int32)
    return jnp.minimum(jnp.maximum(bits & 0x7F800000, 0x20000000), 0x7E800000)
