"""A linear layer whose weight is MXFP4, for few rows, through `pallas_call`: a tile is expanded and used at once.

A program owns some rows of the weight. Low nibbles meet the even columns of the input and high ones the odd, which
are handed over apart, so that nothing is interleaved.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jaxtyping import Array, Float, Float32, UInt8

from jaxattn.errors import UnsupportedError
from jaxattn.kernels.pallas.backend import call, refuse_backend, result_shape

DTYPES = ("bfloat16", "float16", "float32")
BYTES_PER_GROUP = 16
# A power of two each: the most of the weight that is held at a time, in rows and bytes of a row.
BLOCK_ROWS, BLOCK_BYTES = 32, 128
LEAST_TOKENS, MOST_TOKENS = 16, 32
# Pallas computes the places of blocks with 32 bits.
MOST_BYTES = 2**31


def supports(x: Float[Array, "tokens columns"], packed: UInt8[Array, "padded_rows half"]) -> str | None:
    """The reason why `run` cannot multiply these, or None."""
    if reason := refuse_backend():
        return reason
    if x.dtype.name not in DTYPES:
        return f"x: expected one of {', '.join(DTYPES)}, got {x.dtype}"
    if x.shape[0] > MOST_TOKENS:
        return f"x: expected at most {MOST_TOKENS} rows, more are served better by dequantised tiles, got {x.shape[0]}"
    if packed.ndim != 2 or packed.shape[0] % BLOCK_ROWS or packed.shape[1] % BLOCK_BYTES:
        return (
            f"packed: expected multiples of {BLOCK_ROWS} rows and {BLOCK_BYTES} bytes, got {list(packed.shape)}; "
            f"pad the weight with Mxfp4Weight.pad({BLOCK_ROWS}, {2 * BLOCK_BYTES})"
        )
    if packed.size >= MOST_BYTES:
        return f"packed: expected less than {MOST_BYTES} bytes, got {packed.size}"
    return None


def run(
    x: Float[Array, "tokens columns"],
    packed: UInt8[Array, "padded_rows half"],
    scale: UInt8[Array, "padded_rows groups"],
    rows: int,
) -> Float32[Array, "tokens rows"]:
    """`x @ weight.T` of the first `rows` rows of the weight, in float32 sums.

    Raises:
        UnsupportedError: `supports` gives a reason.
    """
    if reason := supports(x, packed):
        raise UnsupportedError(f"implementation 'pallas': {reason}")
    (tokens, columns), half = x.shape, packed.shape[1]
    padded = LEAST_TOKENS if tokens <= LEAST_TOKENS else MOST_TOKENS
    x = jnp.pad(x, ((0, padded - tokens), (0, 2 * half - columns)))
    apart = x.reshape(padded, half, 2).transpose(2, 0, 1)

    def multiply(apart, packed, scale):
        from jax.experimental.pallas import triton as pallas_triton

        return pl.pallas_call(
            functools.partial(_kernel, steps=half // BLOCK_BYTES),
            out_shape=[result_shape((padded, packed.shape[0]), jnp.float32)],
            grid=(packed.shape[0] // BLOCK_ROWS,),
            in_specs=[
                pl.BlockSpec((2, padded, half), lambda i: (0, 0, 0)),
                pl.BlockSpec((BLOCK_ROWS, half), lambda i: (i, 0)),
                pl.BlockSpec((BLOCK_ROWS, half // BYTES_PER_GROUP), lambda i: (i, 0)),
            ],
            out_specs=[pl.BlockSpec((padded, BLOCK_ROWS), lambda i: (0, i))],
            compiler_params=pallas_triton.CompilerParams(num_warps=4, num_stages=3),
            interpret=jax.default_backend() == "cpu",
            name="mxfp4_matmul",
        )(apart, packed, scale)

    (out,) = call(multiply, (apart, packed, scale), index64=False)
    return out[:tokens, :rows]


def _kernel(x_ref, packed_ref, scale_ref, out_ref, *, steps: int):
    padded = x_ref.shape[1]

    def step(i, acc):
        at = pl.ds(i * BLOCK_BYTES, BLOCK_BYTES)
        stored = packed_ref[:, at].astype(jnp.int32)  # [R, B]
        groups = scale_ref[:, pl.ds(i * (BLOCK_BYTES // BYTES_PER_GROUP), BLOCK_BYTES // BYTES_PER_GROUP)]
        scale = _power_of_two(groups)[:, :, None]
        scale = jnp.broadcast_to(scale, (*groups.shape, BYTES_PER_GROUP)).reshape(stored.shape)
        for side, codes in enumerate((stored & 15, stored >> 4)):
            x = x_ref[side, :, at]  # [T, B]
            weight = (_element(codes) * scale).astype(x.dtype)  # [R, B]
            acc += lax.dot(
                x, weight.T, precision=lax.Precision.HIGHEST, preferred_element_type=jnp.float32
            )  # [T, R]
        return acc

    out_ref[...] = lax.fori_loop(0, steps, step, jnp.zeros((padded, BLOCK_ROWS), jnp.float32))


def _element(codes):
    """The values of 4-bit codes in float32."""
    magnitude, half = codes & 7, 0x3F000000
    bits = jnp.where(magnitude > 1, (magnitude << 22) + half, jnp.where(magnitude == 1, half, 0))
    return lax.bitcast_convert_type(bits | ((codes & 8) << 28), jnp.float32)


def _power_of_two(stored):
    """2**(byte - 127) in float32, and NaN for 255."""
    wide = stored.astype(jnp.int32)
    bits = jnp.where(wide == 0, 0x00400000, wide << 23)
    return lax.bitcast_convert_type(jnp.where(wide == 255, 0x7FC00000, bits), jnp.float32)
