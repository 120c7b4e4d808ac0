"""Launches of Triton kernels from JAX: compiled through jax_triton on a GPU, interpreted in a callback on a CPU."""

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
import triton
from jax.experimental.buffer_callback import buffer_callback

from jaxattn.kernels import tuning
from jaxattn.kernels._transforms import sealed
from jaxattn.kernels.triton.compat import installed_version, load_jax_triton


@dataclasses.dataclass(frozen=True, kw_only=True)
class KernelCall:
    """One launch as data: what is compiled, from what, and how it runs."""

    kernel: triton.JITFunction
    inputs: tuple[jax.ShapeDtypeStruct, ...]
    outputs: tuple[jax.ShapeDtypeStruct, ...]
    grid: int
    num_warps: int
    num_stages: int
    # Input number -> output number of the same memory.
    aliases: tuple[tuple[int, int], ...]
    constants: tuple[tuple[str, Any], ...]


_recorded: contextvars.ContextVar[list[KernelCall] | None] = contextvars.ContextVar(
    "jaxattn_recorded", default=None
)


@contextlib.contextmanager
def recording() -> Iterator[list[KernelCall]]:
    """Collect the launches that are traced, without compiling anything; for audits under `jax.eval_shape`.

    Trace a function that nothing else jits: what is traced here computes nothing.
    Use `jaxattn.kernels.tuning.using` to choose the architecture.
    """
    calls: list[KernelCall] = []
    token = _recorded.set(calls)
    try:
        yield calls
    finally:
        _recorded.reset(token)


def launch(
    kernel: triton.JITFunction,
    inputs: Sequence[jax.Array | None],
    outputs: Sequence[jax.ShapeDtypeStruct],
    *,
    grid: int,
    num_warps: int,
    num_stages: int = 1,
    aliases: dict[int, int] | None = None,
    **constants,
) -> list[jax.Array]:
    """Run `kernel(*inputs, *outputs, **constants)` over a one-dimensional grid.

    Args:
        kernel: takes a pointer for each input and each output, in this order, then constants.
        inputs: arrays; None passes a pointer that the kernel must not follow.
        outputs: shapes and dtypes of the results, whose memory begins with any content.
        grid: programs. Axis 0 only: the others end at 65,535.
        num_warps: warps of a program.
        num_stages: software pipeline depth.
        aliases: input number -> output number; the output begins with the input's content.
        constants: hashable compile-time arguments.

    Returns:
        The outputs. `vmap` runs the launches of the mapped axis one after the other.

    Raises:
        UnsupportedError: differentiated.
    """
    anything = next(array for array in inputs if array is not None)
    operands = [anything if array is None else array for array in inputs]
    call = KernelCall(
        kernel=kernel,
        inputs=tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in operands),
        outputs=tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs),
        grid=grid,
        num_warps=num_warps,
        num_stages=num_stages,
        aliases=tuple((aliases or {}).items()),
        constants=tuple(constants.items()),
    )
    calls = _recorded.get()
    if calls is not None:
        calls.append(call)
    return list(_sealed(call)(*operands))


@functools.cache
def _sealed(call: KernelCall):
    return sealed(functools.partial(_run, call), "triton")


def _run(call: KernelCall, *operands):
    if _recorded.get() is not None:
        return tuple(jax.numpy.zeros(o.shape, o.dtype) for o in call.outputs)
    if tuning.device().architecture == "interpreter":
        return _interpreted(call, operands)
    return _compiled(call, operands)


def _interpreted(call: KernelCall, operands):
    from jaxattn.kernels.triton import interpreter

    def callback(_, results, *buffers):
        arrays = [np.asarray(buffer) for buffer in (*buffers, *results)]
        interpreter.run(call.kernel, arrays, call.grid, **dict(call.constants))

    return tuple(
        buffer_callback(callback, call.outputs, input_output_aliases=dict(call.aliases) or None)(*operands)
    )


def _compiled(call: KernelCall, operands):
    jax_triton = load_jax_triton()
    outputs = "out_type" if installed_version("jax-triton") >= (0, 4) else "out_shape"
    results = jax_triton.triton_call(
        *(_viewed(x, _carrier(x.dtype)) for x in operands),
        kernel=call.kernel,
        grid=(call.grid,),
        num_warps=call.num_warps,
        num_stages=call.num_stages,
        input_output_aliases=dict(call.aliases),
        name=call.kernel.__name__,
        **{outputs: tuple(jax.ShapeDtypeStruct(o.shape, _carrier(o.dtype)) for o in call.outputs)},
        **dict(call.constants),
    )
    return tuple(_viewed(result, o.dtype) for result, o in zip(results, call.outputs, strict=True))


def _viewed(array, dtype):
    return array if array.dtype == dtype else jax.lax.bitcast_convert_type(array, dtype)


def _carrier(dtype):
    """The dtype that a pointer has for the compiler: bytes for an 8-bit float that it does not know."""
    name = np.dtype(dtype).name
    return np.uint8 if name.startswith("float8") and name not in tuning.tuning().native_formats else dtype
