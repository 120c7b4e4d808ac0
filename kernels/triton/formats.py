"""Conversions between stored 8-bit formats and the compute types, as functions of a Triton kernel.

A format is one of the numbers of `CODES`. `NATIVE` means that the compiler converts the type itself; any other is
decoded from and encoded to its bits, which works on every device and gives the same bits everywhere.
"""

import triton
import triton.language as tl

from jaxattn.kernels._constants import CODES

NATIVE = tl.constexpr(0)
FLOAT8_E4M3FN = tl.constexpr(CODES["float8_e4m3fn"])
FLOAT8_E4M3FNUZ = tl.constexpr(CODES["float8_e4m3fnuz"])
FLOAT8_E5M2 = tl.constexpr(CODES["float8_e5m2"])
FLOAT8_E5M2FNUZ = tl.constexpr(CODES["float8_e5m2fnuz"])
INT8 = tl.constexpr(CODES["int8"])
FLOAT16 = tl.constexpr(CODES["float16"])

# 1.5 * 2**23: adding it to a float32 below 2**22 rounds that to the nearest even integer in the low bits.
_ROUNDING = tl.constexpr(12582912.0)
_ROUNDING_BITS = tl.constexpr(0x4B400000)


@triton.jit
def stored_pointer(ptr, FORMAT: tl.constexpr):
    """Point at the bits of values of a format that the compiler does not convert."""
    if (FORMAT >= FLOAT8_E4M3FN) and (FORMAT <= FLOAT8_E5M2FNUZ):
        at = ptr.to(tl.pointer_type(tl.uint8), bitcast=True)
    else:
        at = ptr
    return at


@triton.jit
def decode(stored, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Convert loaded values to `dtype`; every 8-bit format converts exactly to float16."""
    if FORMAT == NATIVE:
        value = stored
    else:
        bits = stored.to(tl.uint16)
        if FORMAT == FLOAT8_E4M3FN:
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
            half = tl.where((bits & 0x7F) == 0x7F, float("nan"), half)
        elif FORMAT == FLOAT8_E4M3FNUZ:
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 128.0
            half = tl.where(bits == 0x80, float("nan"), half)
        elif FORMAT == FLOAT8_E5M2:
            half = (bits << 8).to(tl.float16, bitcast=True)
        else:
            tl.static_assert(FORMAT == FLOAT8_E5M2FNUZ)
            subnormal = (bits << 8).to(tl.float16, bitcast=True) * 0.5
            normal = ((bits << 8) - 0x400).to(tl.float16, bitcast=True)
            half = tl.where((bits & 0x7C) == 0, subnormal, normal)
            half = tl.where(bits == 0x80, float("nan"), half)
        value = half.to(tl.float16)
    return value.to(dtype)


@triton.jit
def decode_pair(pair, FORMAT: tl.constexpr, stored: tl.constexpr, dtype: tl.constexpr):
    """Convert the low and the high byte of int16 values, each one stored value, to `dtype`."""
    low = (pair & 0xFF).to(tl.uint8)
    high = (pair >> 8).to(tl.uint8)
    if FORMAT == NATIVE:
        low = low.to(stored, bitcast=True)
        high = high.to(stored, bitcast=True)
    return decode(low, FORMAT, dtype), decode(high, FORMAT, dtype)


@triton.jit
def _encode_bits(x, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, FNUZ: tl.constexpr):
    """Round float32 to nearest even in a small format without infinities; beyond LARGEST it saturates."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    bits = magnitude.to(tl.int32, bitcast=True)
    rounded = bits + ((1 << (SHIFT - 1)) - 1) + ((bits >> SHIFT) & 1)
    normal = (rounded >> SHIFT) - ((127 - BIAS) << MANTISSA)
    scaled = magnitude * (2.0 ** (BIAS - 1 + MANTISSA)) + _ROUNDING
    subnormal = scaled.to(tl.int32, bitcast=True) - _ROUNDING_BITS
    code = tl.where(magnitude < 2.0 ** (1 - BIAS), subnormal, normal)
    signed = code | sign
    if FNUZ:
        signed = tl.where(x == x, tl.where(code == 0, 0, signed), 0x80)
    return signed


@triton.jit
def encode(x, FORMAT: tl.constexpr, dtype: tl.constexpr):
    """Convert float32 to the stored format, rounding to nearest even and saturating.

    An infinity stays one where the format has one; NaN stays NaN, and is 0 in int8.
    """
    if FORMAT == NATIVE:
        stored = x.to(dtype)
    elif FORMAT == INT8:
        x = tl.where(x == x, tl.minimum(tl.maximum(x, -128.0), 127.0), 0.0)
        stored = ((x + _ROUNDING).to(tl.int32, bitcast=True) - _ROUNDING_BITS).to(tl.int8)
    elif FORMAT == FLOAT8_E4M3FN:
        code = _encode_bits(x, 3, 7, 448.0, False)
        stored = tl.where(x == x, code, code | 0x7F).to(tl.uint8)
    elif FORMAT == FLOAT8_E5M2:
        code = _encode_bits(x, 2, 15, 57344.0, False)
        code = tl.where(tl.abs(x) == float("inf"), (code & 0x80) | 0x7C, code)
        stored = tl.where(x == x, code, (code & 0x80) | 0x7E).to(tl.uint8)
    elif FORMAT == FLOAT8_E4M3FNUZ:
        stored = _encode_bits(x, 3, 8, 240.0, True).to(tl.uint8)
    elif FORMAT == FLOAT8_E5M2FNUZ:
        stored = _encode_bits(x, 2, 16, 57344.0, True).to(tl.uint8)
    else:
        LARGEST: tl.constexpr = 65504.0 if FORMAT == FLOAT16 else 3.3895313892515355e38
        clipped = tl.where(x > LARGEST, LARGEST, tl.where(x < -LARGEST, -LARGEST, x))
        stored = tl.where(tl.abs(x) == float("inf"), x, clipped).to(dtype)
    return stored
