"""MXFP4: 4-bit e2m1 elements, one e8m0 scale per 32 columns, as AMD Quark packs them.

Format: OCP Microscaling Formats (MX) v1.0. `packed[..., j]` holds column 2j in its low nibble and 2j+1 in the high
one; bit 3 of a nibble is the sign, the rest 0, .5, 1, 1.5, 2, 3, 4, 6; value = element * 2**(byte - 127), byte 255
is NaN. Everything here is integer arithmetic on bit patterns, so that subnormals come out right on backends that
flush them and no scale can reach the sign.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int32, UInt8, UInt32

GROUP_SIZE = 32
# Midpoints .25, .75, 1.25, 1.75, 2.5, 3.5, 5 between neighbours as (eighths, exponent); a tie goes to the even
# code, so every second midpoint belongs to the code above it.
_MIDPOINTS = ((8, -2), (12, -1), (10, 0), (14, 0), (10, 1), (14, 1), (10, 2))
_INFINITY = 0x7F800000
_NAN = 0x7FC00000


def unpack(packed: UInt8[Array, "... half"]) -> UInt8[Array, "... columns"]:
    """Split bytes into 4-bit codes, low nibble first.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import mxfp4
        >>> mxfp4.unpack(jnp.array([0x21, 0x43], jnp.uint8)).tolist()
        [1, 2, 3, 4]
    """
    nibbles = jnp.stack([packed & jnp.uint8(15), packed >> jnp.uint8(4)], axis=-1)
    return nibbles.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def pack(codes: UInt8[Array, "... columns"]) -> UInt8[Array, "... half"]:
    """Pack 4-bit codes into bytes, low nibble first; the inverse of `unpack`.

    Raises:
        ValueError: an odd number of columns.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import mxfp4
        >>> mxfp4.pack(jnp.array([1, 2, 3, 4], jnp.uint8)).tolist()
        [33, 67]
    """
    if codes.shape[-1] % 2:
        raise ValueError(f"codes: expected an even number of columns, got {codes.shape[-1]}; pad with code 0")
    return (codes[..., 0::2] & jnp.uint8(15)) | (codes[..., 1::2] << jnp.uint8(4))


@functools.partial(jax.jit, static_argnames="dtype")
def dequantize(
    packed: UInt8[Array, "... half"], scale: UInt8[Array, "... groups"], dtype=jnp.float32
) -> Float[Array, "... columns"]:
    """Dequantise: element * 2**(scale - 127), exact in float32 and bfloat16 down to the subnormals.

    Args:
        packed: codes of an even number of columns, two a byte.
        scale: e8m0 bytes, one per 32 columns; the last group may be shorter.
        dtype: of the result. A product beyond the range of float32 is an infinity, scale 255 gives NaN.

    Raises:
        ValueError: the number of scales is not that of the groups.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import mxfp4
        >>> mxfp4.dequantize(jnp.array([0x9F, 0x20], jnp.uint8), jnp.array([128], jnp.uint8)).tolist()
        [-12.0, -1.0, 0.0, 2.0]
    """
    columns = 2 * packed.shape[-1]
    if scale.shape != (*packed.shape[:-1], -(-columns // GROUP_SIZE)):
        raise ValueError(
            f"scale: expected shape {[*packed.shape[:-1], -(-columns // GROUP_SIZE)]}, a byte per {GROUP_SIZE} of "
            f"the {columns} columns, got {list(scale.shape)}"
        )
    # Grouped by reshaping, not by repeating the scales, which would be a gather.
    missing = -columns % GROUP_SIZE
    codes = jnp.pad(unpack(packed), [(0, 0)] * (packed.ndim - 1) + [(0, missing)])
    bits = _dequantized_bits(codes.reshape(*scale.shape, GROUP_SIZE), scale[..., None])
    bits = bits.reshape(codes.shape)[..., :columns]
    if jnp.dtype(dtype) == jnp.bfloat16:
        return lax.bitcast_convert_type((bits >> jnp.uint32(16)).astype(jnp.uint16), jnp.bfloat16)
    return lax.bitcast_convert_type(bits, jnp.float32).astype(dtype)


@jax.jit
def quantize(x: Float[Array, "... columns"]) -> tuple[UInt8[Array, "... half"], UInt8[Array, "... groups"]]:
    """Quantise along the last axis: Quark's "even" scales, elements to nearest even, saturated at 6 * scale.

    The scale of a group is 2**(floor(log2(m)) - 2) of its largest magnitude, where a mantissa of 1.75 and more
    counts as the next power of two, clamped to [2**-126, 2**127]. A group with a NaN gets scale 255.

    Args:
        x: any floating dtype, at least one column. Columns are padded with zeros to a whole number of groups.

    Returns:
        packed: `[..., padded columns / 2]`.
        scale: `[..., padded columns / 32]`.

    Raises:
        TypeError: `x` is not floating point.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import mxfp4
        >>> packed, scale = mxfp4.quantize(jnp.array([6.0, -3.4, 0.25, 0.26]))
        >>> mxfp4.dequantize(packed, scale)[:4].tolist(), int(scale[0])
        ([6.0, -3.0, 0.0, 0.5], 127)
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: expected a floating point dtype, got {x.dtype}")
    pad = -x.shape[-1] % GROUP_SIZE
    x = jnp.pad(x.astype(jnp.float32), [(0, 0)] * (x.ndim - 1) + [(0, pad)])
    bits = lax.bitcast_convert_type(x, jnp.uint32).reshape(*x.shape[:-1], -1, GROUP_SIZE)
    magnitude = bits & jnp.uint32(0x7FFFFFFF)
    largest = magnitude.max(axis=-1, keepdims=True)
    rounded = ((largest + jnp.uint32(0x200000)) >> jnp.uint32(23)).astype(jnp.int32)
    scale = jnp.where(rounded >= 255, 254, jnp.clip(rounded - 2, 1, 254))
    scale = jnp.where(largest > _INFINITY, 255, scale)
    code = jnp.zeros(magnitude.shape, jnp.uint8)
    for i, (significand, exponent) in enumerate(_MIDPOINTS):
        midpoint = _float_bits(jnp.uint32(significand), jnp.int32(exponent) + scale)
        above = magnitude >= midpoint if i % 2 else magnitude > midpoint
        code = code + above.astype(jnp.uint8)
    sign = ((bits >> jnp.uint32(28)) & jnp.uint32(8)).astype(jnp.uint8)
    code = jnp.where(code > 0, code | sign, code)
    return pack(code.reshape(x.shape)), scale[..., 0].astype(jnp.uint8)


def quantize_dequantize(x: Float[Array, "... columns"]) -> Float[Array, "... columns"]:
    """What is left of `x` after MXFP4: the emulation of 4-bit activations, in the dtype of `x`."""
    packed, scale = quantize(x)
    return dequantize(packed, scale, x.dtype)[..., : x.shape[-1]]


def _float_bits(
    significand: UInt32[Array, "..."], biased_exponent: Int32[Array, "..."]
) -> UInt32[Array, "..."]:
    """Bits of `significand / 8 * 2**(biased_exponent - 127)` in float32, for a significand of 8 to 15."""
    # Without the implicit bit, which the exponent 1 lower makes up for: a sum instead of a mask.
    fraction = significand << jnp.uint32(20)
    normal = ((biased_exponent - 1).astype(jnp.uint32) << jnp.uint32(23)) + fraction
    # Exact: the shift is 2 at most (scale 0, element .5), and the fraction ends in 20 zeros.
    subnormal = fraction >> (1 - biased_exponent).astype(jnp.uint32)
    bits = jnp.where(biased_exponent >= 1, normal, subnormal)
    return jnp.where(biased_exponent >= 255, jnp.uint32(_INFINITY), bits)


def _dequantized_bits(codes: UInt8[Array, "..."], scale: UInt8[Array, "..."]) -> UInt32[Array, "..."]:
    wide = codes.astype(jnp.uint32)
    magnitude = wide & jnp.uint32(7)
    # The odd codes from 3 up are 1.5, 3 and 6.
    odd = (magnitude & jnp.uint32(1)) & (magnitude >> jnp.uint32(1) | magnitude >> jnp.uint32(2))
    exponent = (magnitude >> jnp.uint32(1)).astype(jnp.int32) - 1 + scale.astype(jnp.int32)
    bits = jnp.where(
        magnitude == 0, jnp.uint32(0), _float_bits(jnp.uint32(8) | odd << jnp.uint32(2), exponent)
    )
    signed = bits | ((wide & jnp.uint32(8)) << jnp.uint32(28))
    return jnp.where(scale == 255, jnp.uint32(_NAN), signed)
