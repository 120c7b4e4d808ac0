"""Conversions between stored formats and the compute types, by bits where the compiler does not convert a type.

They give the same bits on every device, and those of `jaxattn.kernels.triton.formats`.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import triton as plt

from jaxattn.kernels._constants import CODES

_NAMES = {code: name for name, code in CODES.items()}
# 1.5 * 2**23: adding it to a float32 below 2**22 rounds that to the nearest even integer in the low bits.
_ROUNDING = 12582912.0
_ROUNDING_BITS = 0x4B400000


def decode(stored, code: int, dtype):
    """Convert loaded values to `dtype`; every 8-bit format converts exactly to float16.

    Args:
        stored: values in their stored format, or their bits in uint8.
        code: 0 where the compiler converts that itself, see `CODES`.
        dtype: a floating point type.
    """
    if code == 0:
        return stored.astype(dtype)
    format = jnp.dtype(_NAMES[code])
    info = jnp.finfo(format)
    bits = _bitcast(stored, jnp.uint8).astype(jnp.uint16)
    sign = (bits & 0x80) << 8
    moved = sign | ((bits & 0x7F) << (10 - info.nmant))
    # The biases differ, so a power of two brings the value of these bits in float16 to the one that is meant.
    bias = 1 - int(info.minexp)
    half = _bitcast(moved, jnp.float16) * jnp.float16(2.0 ** (15 - bias))
    if bias > 15:
        # The largest exponent means infinity in float16, so that of a normal number is lowered instead.
        normal = _bitcast(moved - jnp.uint16(0x400), jnp.float16)
        half = jnp.where((moved & 0x7C00) == 0, half, normal)
    if _has_negative_zero(format):
        if info.nmant == 3:
            half = jnp.where((bits & 0x7F) == 0x7F, jnp.float16(jnp.nan), half)
    else:
        half = jnp.where(bits == 0x80, jnp.float16(jnp.nan), half)
    return half.astype(dtype)


def decode_pair(pair, code: int, stored, dtype):
    """Convert the low and the high byte of int16 values, each one stored value, to `dtype`."""
    low, high = (byte.astype(jnp.uint8) for byte in (pair & 0xFF, pair >> 8))
    if code == 0:
        low, high = _bitcast(low, stored), _bitcast(high, stored)
    return decode(low, code, dtype), decode(high, code, dtype)


def unpack(pair, instructions: str):
    """Convert four values, in two int16 elements, at a time to two tiles of float16.

    Pallas takes one result from inline assembly, so the instructions are there once for each tile; the compiler of
    the GPU merges what both have in common and drops what neither uses.
    """
    half = jax.ShapeDtypeStruct(pair.shape, jnp.float16)
    tiles: list[Any] = []
    for names in (("$0", "unused", "$1"), ("unused", "$0", "$1")):
        of_one = instructions
        for number, name in enumerate(names):
            of_one = of_one.replace(f"${number}", name)
        tiles += plt.elementwise_inline_asm(
            f"{{ .reg .b32 unused; {of_one} }}",
            args=[pair],
            constraints="=r,r",
            pack=2,
            result_shape_dtypes=[half],
        )
    return tuple(tiles)


def encode(x, code: int, dtype):
    """Convert float32 to the stored format, rounding to nearest even and saturating.

    An infinity stays one where the format has one; NaN stays NaN, and is 0 in int8.

    Args:
        x: float32.
        code: number of the format among `CODES`; 0 for a plain cast.
        dtype: the format.
    """
    dtype = jnp.dtype(dtype)
    if code == 0:
        return x.astype(dtype)
    if dtype == jnp.int8:
        x = jnp.where(x == x, jnp.minimum(jnp.maximum(x, -128.0), 127.0), 0.0)
        return (_bitcast(x + _ROUNDING, jnp.int32) - _ROUNDING_BITS).astype(jnp.int8)
    info = jnp.finfo(dtype)
    largest = float(info.max)
    if info.bits == 16:
        clipped = jnp.where(x > largest, largest, jnp.where(x < -largest, -largest, x))
        return jnp.where(jnp.abs(x) == jnp.inf, x, clipped).astype(dtype)
    sign = (_bitcast(x, jnp.int32) >> 24) & 0x80
    code_bits = _magnitude_bits(jnp.minimum(jnp.abs(x), largest), info.nmant, 1 - int(info.minexp))
    signed = code_bits | sign
    if _has_negative_zero(dtype):
        if info.nmant == 2:
            signed = jnp.where(jnp.abs(x) == jnp.inf, sign | 0x7C, signed)
        nan = sign | (0x7F if info.nmant == 3 else 0x7E)
    else:
        signed = jnp.where(code_bits == 0, 0, signed)
        nan = jnp.full_like(signed, 0x80)
    return _bitcast(jnp.where(x == x, signed, nan).astype(jnp.uint8), dtype)


def _magnitude_bits(magnitude, mantissa: int, bias: int):
    """Bits of float32 values in range, rounded to nearest even in a format of this mantissa and bias."""
    shift = 23 - mantissa
    bits = _bitcast(magnitude, jnp.int32)
    rounded = bits + ((1 << (shift - 1)) - 1) + ((bits >> shift) & 1)
    normal = (rounded >> shift) - ((127 - bias) << mantissa)
    subnormal = _bitcast(magnitude * (2.0 ** (bias - 1 + mantissa)) + _ROUNDING, jnp.int32) - _ROUNDING_BITS
    return jnp.where(magnitude < 2.0 ** (1 - bias), subnormal, normal)


def _bitcast(x, dtype):
    return lax.bitcast_convert_type(x, dtype)


def _has_negative_zero(dtype) -> bool:
    """Whether the format is not one of the `fnuz`, whose negative zero is NaN."""
    return not jnp.dtype(dtype).name.endswith("fnuz")
