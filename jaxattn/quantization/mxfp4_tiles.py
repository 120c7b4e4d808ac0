"""Mxfp4Tiles: an MXFP4 weight laid out for a matrix instruction, so that a kernel expands it in few operations.

A tile is 32 rows by 128 columns: 512 words of eight codes and 32 words of four scales. The codes of a word are in
pairs, whose bits lie where one shift and one mask make two bfloat16 values of them.
"""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int32, UInt8

from jaxattn.index64 import cdiv, index64
from jaxattn.quantization import mxfp4
from jaxattn.quantization.mxfp4_matmul import TILE_ELEMENTS
from jaxattn.quantization.mxfp4_weight import Mxfp4Weight
from jaxattn.quantization.weights import QuantizedWeight, dot

ROWS, COLUMNS = 32, 128
# Where the bits of pair j are in the low half of a word, mantissa first: as in bfloat16, then three places to the right
# of that, then six, then what is left.
_PLACES = ((6, 7, 8, 15), (3, 4, 5, 12), (0, 1, 2, 9), (13, 14, 10, 11))
# Exponents of a row are stored relative to its largest where that is above this byte.
_LARGEST = 128
_UNIT = 126
# Of float32, in which a row's power of two is kept.
_BIAS, _MANTISSA = 127, 23


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mxfp4Tiles(QuantizedWeight):
    """A linear weight in MXFP4, tile by tile.

    It multiplies as `Mxfp4Weight` does, but for two cases that no trained weight has: a row with a NaN scale is NaN
    as a whole, and a value beyond the range of float32 is not an infinity until it is summed.

    Attributes:
        codes: words of eight codes: tile of rows, tile of columns, word.
        scale: words of four exponents, those of rows 8 apart.
        factor: what each row is multiplied by.
        rows: output features.
        columns: input features.
        quantize_input: see `Mxfp4Weight`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import Mxfp4Tiles, Mxfp4Weight
        >>> tiles = Mxfp4Tiles.from_weight(Mxfp4Weight.from_array(jnp.eye(4, 40)))
        >>> tiles.shape, tiles.codes.shape, tiles.matmul(jnp.arange(40.0)).tolist()
        ((4, 40), (1, 1, 512), [0.0, 1.0, 2.0, 3.0])
    """

    codes: Int32[Array, "row_tiles column_tiles 512"]
    scale: Int32[Array, "row_tiles column_tiles 32"]
    factor: Float32[Array, "padded_rows"]
    rows: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})
    quantize_input: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def from_weight(cls, weight: Mxfp4Weight) -> "Mxfp4Tiles":
        """Lay a weight out anew; its own arrays can be dropped.

        Raises:
            ValueError: the weight is a batch of weights.
        """
        if weight.packed.ndim != 2:
            raise ValueError(f"weight: expected one weight [rows, columns], got shape {list(weight.shape)}")
        codes, scale, factor = _tile(weight.packed[: weight.rows], weight.scale[: weight.rows])
        return cls(codes, scale, factor, weight.rows, weight.columns, weight.quantize_input)

    @property
    def shape(self) -> tuple[int, int]:
        """Logical shape, `[rows, columns]`."""
        return self.rows, self.columns

    def dequantize(self, dtype) -> Float[Array, "rows columns"]:
        """The weight as an array of `dtype`."""
        return _dequantize(self.codes, self.scale, self.factor, dtype)[: self.rows, : self.columns]

    @jax.jit
    def matmul(self, x: Float[Array, "... columns"]) -> Float32[Array, "... rows"]:
        """`x @ weight.T` in float32 sums: by the kernel for few rows, else a dequantised tile at a time.

        Raises:
            ValueError: `x` has another number of columns.
        """
        if x.shape[-1] != self.columns:
            raise ValueError(f"x: expected {self.columns} columns, got {x.shape[-1]}")
        if self.quantize_input:
            x = mxfp4.quantize_dequantize(x)
        tokens = x.reshape(-1, x.shape[-1])
        return _matmul(tokens, self).reshape(*x.shape[:-1], self.rows)


def tiles_are_faster() -> bool:
    """Whether the kernel of `Mxfp4Tiles` is tuned for this device and can be launched on it."""
    if jax.default_backend() == "cpu" or importlib.util.find_spec("triton") is None:
        return False
    from jaxattn.kernels.triton import mxfp4_tiles
    from jaxattn.kernels.triton.compat import jax_triton_status

    return jax_triton_status() is None and mxfp4_tiles.is_tuned()


@index64
def _matmul(x: Float[Array, "tokens columns"], weight: Mxfp4Tiles) -> Float32[Array, "tokens rows"]:
    if tiles_are_faster():
        from jaxattn.kernels.triton import mxfp4_tiles

        if mxfp4_tiles.supports(x) is None:
            return mxfp4_tiles.run(x, weight)
    return tiled_product(x, weight)


def tiled_product(x: Float[Array, "tokens columns"], weight: Mxfp4Tiles) -> Float32[Array, "tokens rows"]:
    """The product in XLA, dequantising some tiles of rows after the others."""
    row_tiles, column_tiles, _ = weight.codes.shape
    group = max(1, min(row_tiles, TILE_ELEMENTS // (ROWS * COLUMNS * column_tiles)))
    missing = -row_tiles % group
    x = jnp.pad(x, ((0, 0), (0, column_tiles * COLUMNS - x.shape[1])))

    def grouped(array):
        array = jnp.pad(array, ((0, missing), *((0, 0) for _ in array.shape[1:])))
        return array.reshape(-1, group, *array.shape[1:])

    arrays = (weight.codes, weight.scale, weight.factor.reshape(row_tiles, ROWS))
    products = lax.map(
        lambda part: dot(x, _dequantize(part[0], part[1], part[2].reshape(-1), x.dtype)),
        jax.tree.map(grouped, arrays),
    )  # [groups, tokens, rows of a group]
    return jnp.moveaxis(products, 0, 1).reshape(len(x), (row_tiles + missing) * ROWS)[:, : weight.rows]


@jax.jit
def _tile(packed: UInt8[Array, "rows half"], scale: UInt8[Array, "rows groups"]):
    rows, columns = cdiv(len(packed), ROWS), cdiv(2 * packed.shape[1], COLUMNS)
    missing = rows * ROWS - len(packed)
    packed = jnp.pad(packed, ((0, missing), (0, columns * COLUMNS // 2 - packed.shape[1])))
    scale = jnp.pad(
        scale,
        ((0, missing), (0, columns * COLUMNS // mxfp4.GROUP_SIZE - scale.shape[1])),
        constant_values=127,
    )

    # rows: tile, 16-row part, half, row; columns: tile, lane, pair, word, which of the pair
    codes = mxfp4.unpack(packed).reshape(rows, 2, 2, 8, columns, 4, 4, 4, 2)
    codes = codes.transpose(0, 4, 1, 2, 3, 5, 7, 6, 8).astype(jnp.uint32)
    words = jnp.zeros(codes.shape[:-2], jnp.uint32)
    for pair, which, bit, place in _bits():
        words |= (codes[..., pair, which] >> bit & 1) << place

    byte = scale.astype(jnp.int32)
    is_nan = byte == 255
    down = jnp.maximum(0, jnp.max(jnp.where(is_nan, 0, byte), axis=1) - _LARGEST)
    power = lax.bitcast_convert_type((down + _BIAS) << _MANTISSA, jnp.float32)
    factor = jnp.where(jnp.any(is_nan, axis=1), jnp.float32(jnp.nan), power)
    exponents = jnp.clip(byte - down[:, None] + _UNIT, 0, 254).astype(jnp.uint32)
    exponents = exponents.reshape(rows, 4, 8, columns, 4).transpose(0, 3, 2, 4, 1)
    scales = functools.reduce(jnp.bitwise_or, (exponents[..., i] << (8 * i) for i in range(4)))
    return (
        lax.bitcast_convert_type(words, jnp.int32).reshape(rows, columns, -1),
        lax.bitcast_convert_type(scales, jnp.int32).reshape(rows, columns, -1),
        factor,
    )


@functools.partial(jax.jit, static_argnames="dtype")
def _dequantize(
    codes: Int32[Array, "tiles columns 512"],
    scale: Int32[Array, "tiles columns 32"],
    factor: Float32[Array, "rows"],
    dtype,
) -> Float[Array, "rows width"]:
    rows, columns, _ = codes.shape
    words = lax.bitcast_convert_type(codes, jnp.uint32).reshape(rows, columns, 2, 2, 8, 4, 4)
    found = [[jnp.zeros(words.shape, jnp.uint32) for _ in range(2)] for _ in range(4)]
    for pair, which, bit, place in _bits():
        found[pair][which] |= (words >> place & 1) << bit
    # [tile, columns, part, half, row, lane, word, pair, which] and back
    unpacked = jnp.stack([jnp.stack(pair, axis=-1) for pair in found], axis=-2).astype(jnp.uint8)
    unpacked = unpacked.transpose(0, 2, 3, 4, 1, 5, 7, 6, 8).reshape(rows * ROWS, columns * COLUMNS)

    scales = lax.bitcast_convert_type(scale, jnp.uint32).reshape(rows, columns, 8, 4)
    exponents = jnp.stack([scales >> (8 * i) & 0xFF for i in range(4)], axis=-1).astype(jnp.int32)
    exponents = exponents.transpose(0, 4, 2, 1, 3).reshape(rows * ROWS, -1)  # [rows, groups]
    down = (lax.bitcast_convert_type(factor, jnp.int32) >> _MANTISSA) - _BIAS
    byte = jnp.where(jnp.isnan(factor)[:, None], 255, exponents - _UNIT + down[:, None])
    return mxfp4.dequantize(mxfp4.pack(unpacked), jnp.clip(byte, 0, 255).astype(jnp.uint8), dtype)


def _bits():
    """Every bit of a word: pair, which of the pair, bit of the code, place in the word."""
    for pair, places in enumerate(_PLACES):
        for which in range(2):
            for bit, place in enumerate(places):
                yield pair, which, bit, place + 16 * which
