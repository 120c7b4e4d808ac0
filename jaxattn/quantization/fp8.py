"""FP8 weights: 8-bit elements and one float32 scale per tensor or per output row."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from jaxattn.numerics import saturating_cast
from jaxattn.quantization.weights import QuantizedWeight, dot


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Fp8Weight(QuantizedWeight):
    """A linear weight in FP8; value = stored * scale.

    Attributes:
        values: float8_e4m3fn, float8_e4m3fnuz or float8_e5m2.
        scale: one per output row, or one for the weight (`[..., 1]`).
        input_scale: static scale of the input; with it `matmul` rounds its input to FP8 (W8A8, what Quark
            simulates). None leaves the input as it is.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import Fp8Weight
        >>> weight = Fp8Weight.from_array(jnp.array([[448.0, 1.0], [0.0, 896.0]]))
        >>> weight.scale.tolist(), weight.matmul(jnp.array([1.0, 0.0])).tolist()
        ([1.0, 2.0], [448.0, 0.0])
    """

    values: Num[Array, "*batch rows columns"]
    scale: Float32[Array, "*batch scales"]
    input_scale: Float32[Array, "*batch"] | None = None

    @classmethod
    def from_array(cls, weight: Float[Array, "*batch rows columns"], dtype=jnp.float8_e4m3fn) -> "Fp8Weight":
        """Quantise a weight with one scale per row: the row's largest magnitude over the largest of `dtype`."""
        largest = jnp.abs(weight.astype(jnp.float32)).max(axis=-1)
        limit = jnp.float32(jnp.finfo(dtype).max)
        scale = jnp.where(largest > 0, largest / limit, jnp.float32(1))
        return cls(saturating_cast(weight.astype(jnp.float32) / scale[..., None], dtype), scale)

    @property
    def shape(self) -> tuple[int, ...]:
        """Logical shape, `[..., rows, columns]`."""
        return self.values.shape

    def dequantize(self, dtype) -> Float[Array, "*batch rows columns"]:
        """The float32 products of values and scales, in `dtype`."""
        return (self.values.astype(jnp.float32) * self.scale[..., None]).astype(dtype)

    @jax.jit
    def matmul(self, x: Float[Array, "... columns"]) -> Float32[Array, "... rows"]:
        """`x @ weight.T`, the scale applied to the float32 sums."""
        if self.input_scale is None:
            return dot(x, self.values.astype(x.dtype)) * self.scale
        stored = saturating_cast(x.astype(jnp.float32) / self.input_scale, self.values.dtype)
        x = (stored.astype(jnp.float32) * self.input_scale).astype(x.dtype)
        # Quark freezes the rounded weight in the bfloat16 of the model that it quantised.
        return dot(x, self.dequantize(jnp.bfloat16).astype(x.dtype))
