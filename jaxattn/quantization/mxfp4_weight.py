"""Mxfp4Weight: a linear weight that stays packed."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, UInt8

from jaxattn.quantization.mxfp4 import GROUP_SIZE, dequantize, quantize, quantize_dequantize
from jaxattn.quantization.mxfp4_matmul import matmul
from jaxattn.quantization.weights import QuantizedWeight


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Mxfp4Weight(QuantizedWeight):
    """A linear weight in MXFP4.

    The arrays may be larger than the weight (`pad`); what lies outside `rows` and `columns` holds zeros.

    Attributes:
        packed: two codes a byte along the input columns.
        scale: e8m0 bytes, one per 32 columns.
        rows: output features.
        columns: input features.
        quantize_input: round the input of `matmul` to MXFP4 too (W4A4, what Quark simulates).

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import Mxfp4Weight
        >>> weight = Mxfp4Weight.from_array(jnp.eye(4, 40))
        >>> weight.shape, weight.packed.shape, weight.matmul(jnp.arange(40.0)).tolist()
        ((4, 40), (4, 32), [0.0, 1.0, 2.0, 3.0])
    """

    packed: UInt8[Array, "*batch padded_rows half"]
    scale: UInt8[Array, "*batch padded_rows groups"]
    rows: int = dataclasses.field(metadata={"static": True})
    columns: int = dataclasses.field(metadata={"static": True})
    quantize_input: bool = dataclasses.field(default=False, metadata={"static": True})

    @classmethod
    def from_array(cls, weight: Float[Array, "*batch rows columns"], **options) -> "Mxfp4Weight":
        """Quantise a weight."""
        packed, scale = quantize(weight)
        rows, columns = weight.shape[-2:]
        return cls(packed, scale, rows, columns, **options)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, `[..., rows, columns]`."""
        return (*self.packed.shape[:-2], self.rows, self.columns)

    def dequantize(self, dtype) -> Float[Array, "*batch rows columns"]:
        """The weight as an array of `dtype`, without padding."""
        return dequantize(self.packed, self.scale, dtype)[..., : self.rows, : self.columns]

    @jax.jit
    def matmul(self, x: Float[Array, "... columns"]) -> Float32[Array, "... rows"]:
        """`x @ weight.T` in float32 sums; see `jaxattn.quantization.mxfp4_matmul.matmul`."""
        if self.quantize_input:
            x = quantize_dequantize(x)
        tokens = x.reshape(-1, x.shape[-1])
        out = matmul(tokens, self.packed, self.scale, self.rows)
        return out.reshape(*x.shape[:-1], self.rows)

    def pad(self, row_multiple: int, column_multiple: int) -> "Mxfp4Weight":
        """The same weight in arrays whose rows and columns are multiples, for a kernel with fixed tiles.

        Raises:
            ValueError: `column_multiple` is not a multiple of 32.
        """
        if column_multiple % GROUP_SIZE:
            raise ValueError(f"column_multiple: expected a multiple of {GROUP_SIZE}, got {column_multiple}")
        rows = -(-self.rows // row_multiple) * row_multiple
        columns = -(-self.columns // column_multiple) * column_multiple
        return dataclasses.replace(
            self,
            packed=_pad_to(self.packed, rows, columns // 2, 0),
            scale=_pad_to(self.scale, rows, columns // GROUP_SIZE, 127),
        )


def _pad_to(array: Array, rows: int, columns: int, value: int) -> Array:
    widths = [(0, 0)] * (array.ndim - 2) + [
        (0, max(0, rows - array.shape[-2])),
        (0, max(0, columns - array.shape[-1])),
    ]
    return jnp.pad(array, widths, constant_values=value)
