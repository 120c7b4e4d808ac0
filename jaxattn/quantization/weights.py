"""QuantizedWeight: what stands in a parameter tree where an array would, and how a linear layer uses it."""

import abc

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32


class QuantizedWeight(abc.ABC):
    """A weight of logical shape `[..., out, in]` in a packed form; subclasses are registered pytrees.

    `linear` multiplies by `matmul`; nothing stores the dequantised weight.
    """

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Logical shape, `[..., out, in]`."""

    @abc.abstractmethod
    def dequantize(self, dtype) -> Float[Array, "... out in"]:
        """The weight as an array of `dtype`."""

    @abc.abstractmethod
    def matmul(self, x: Float[Array, "... in"]) -> Float32[Array, "... out"]:
        """`x @ weight.T`, the float32 sums."""


def dot(x: Float[Array, "... in"], weight: Float[Array, "out in"]) -> Float32[Array, "... out"]:
    """`x @ weight.T` accumulated in float32; float32 operands are not rounded to a narrower format."""
    return lax.dot_general(
        x,
        weight,
        (((x.ndim - 1,), (1,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
