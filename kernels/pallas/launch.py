"""Launches of Pallas kernels over flat arrays: compiled on a GPU, interpreted on a CPU."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxattn.kernels import tuning
from jaxattn.kernels.pallas.backend import call, result_shape


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One launch as data. Called with the inputs that are given, it makes the `pallas_call`."""

    kernel: Callable
    # Whether each input is given; the kernel gets None for the others.
    given: tuple[bool, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: int
    num_warps: int
    num_stages: int
    # Number of a given input -> output number of the same memory.
    aliases: tuple[tuple[int, int], ...]
    constants: tuple[tuple[str, Any], ...]
    interpreted: bool

    def __call__(self, *operands: jax.Array) -> list[jax.Array]:
        """Run the kernel on the operands and outputs as arrays of one axis."""
        from jax.experimental.pallas import triton as plt

        def body(*refs):
            present = iter(refs)
            inputs = [next(present) if given else None for given in self.given]
            self.kernel(*inputs, *present, **dict(self.constants))

        body.__name__ = body.__qualname__ = self.kernel.__name__
        aliases = dict(self.aliases)
        arrays = [
            operand if number in aliases else self._viewed(operand) for number, operand in enumerate(operands)
        ]
        results = pl.pallas_call(
            body,
            out_shape=[result_shape((o.size,), o.dtype) for o in self.outputs],
            grid=(self.grid,),
            input_output_aliases=aliases,
            compiler_params=plt.CompilerParams(num_warps=self.num_warps, num_stages=self.num_stages),
            interpret=self.interpreted,
            name=self.kernel.__name__,
        )(*(array.reshape(-1) for array in arrays))
        return [result.reshape(o.shape) for result, o in zip(results, self.outputs, strict=True)]

    def _viewed(self, operand: jax.Array) -> jax.Array:
        """Give the interpreter the bytes of 8-bit floats, which XLA on a CPU would widen, the whole array at once."""
        small = operand.dtype.itemsize == 1 and jnp.issubdtype(operand.dtype, jnp.floating)
        return jax.lax.bitcast_convert_type(operand, jnp.uint8) if self.interpreted and small else operand


def launch(
    kernel: Callable,
    inputs: Sequence[jax.Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    aliases: dict[int, int] | None = None,
    paired: Sequence[int] = (),
    **constants,
) -> list[jax.Array]:
    """Run `kernel(*inputs, *outputs, **constants)` over a one-dimensional grid.

    Args:
        kernel: takes a reference to a flat array for each input and each output, in this order, then constants.
        inputs: arrays; for None the kernel gets None.
        outputs: shapes and dtypes of the results, whose memory begins with any content.
        grid: programs. Axis 0 only: the others end at 65,535.
        num_warps: warps of a program.
        num_stages: software pipeline depth.
        aliases: input number -> output number; the output begins with the input's content.
        paired: numbers of inputs of 8-bit elements of which a compiled kernel gets references to int16 elements.
        constants: passed on.

    Returns:
        The outputs. `vmap` runs the launches of the mapped axis one after the other.

    Raises:
        UnsupportedError: differentiated.
    """
    given = tuple(array is not None for array in inputs)
    interpreted = tuning.device().architecture == "interpreter"
    kernel_call = KernelCall(
        kernel=kernel,
        given=given,
        outputs=tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        aliases=tuple((sum(given[:number]), output) for number, output in (aliases or {}).items()),
        constants=tuple(constants.items()),
        interpreted=interpreted,
    )
    return call(
        kernel_call,
        [array for array in inputs if array is not None],
        index64=True,
        paired=frozenset() if interpreted else frozenset(sum(given[:number]) for number in paired),
    )
