"""Query rows in the compute type."""

import jax.numpy as jnp
from jax import lax

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.block import Block
from jaxattn.kernels.pallas.formats import decode
from jaxattn.kernels.pallas.memory import load


def scaled_rows(q_ref, q_descale, k_descale, block: Block, C: AttentionConstants):
    """Load query rows `[BM, D]`, and the positive factor of each from its products with K to scores."""
    scale = jnp.float32(C.softmax_scale)
    if C.q_descale:
        scale = scale * load(q_descale, block.kv_head)
    if C.k_descale:
        scale = scale * load(k_descale, block.kv_head)
    column = jnp.arange(C.padded_dim, dtype=jnp.int64)
    at = (block.row * C.num_heads + block.head)[:, None] * C.head_dim + column[None, :]
    stored = load(q_ref, at, block.live[:, None] & (column < C.head_dim)[None, :])
    row_scale = jnp.ones(C.block_rows, jnp.float32)
    if C.scale_rows:
        wide = decode(stored, C.q_format, jnp.float32)
        exponent = _exponents(wide)
        row_scale = lax.bitcast_convert_type(exponent, jnp.float32)
        inverse = lax.bitcast_convert_type(0x7F000000 - exponent, jnp.float32)
        q = (wide * inverse[:, None]).astype(C.compute)
    else:
        q = decode(stored, C.q_format, C.compute)
    q = jnp.where(scale < 0.0, -q, q)
    # A factor of 0 would turn the -inf of a masked score into NaN.
    return q, jnp.maximum(jnp.abs(scale) * row_scale, 1e-35)


def _exponents(rows):
    """Bits of the power of two that brings each row to between 1 and 2."""
    bits = lax.bitcast_convert_type(jnp.max(jnp.abs(rows), 1), jnp.int32)
    return jnp.minimum(jnp.maximum(bits & 0x7F800000, 0x20000000), 0x7E800000)
