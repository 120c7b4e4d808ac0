"""Runs a Triton kernel on numpy arrays with Triton's interpreter, beside compiled kernels in one process.

`TRITON_INTERPRET=1` would turn every `triton.jit` function of the process into an interpreted one when it is
decorated. Here a compiled function is interpreted on demand, and Triton's own conversions between floating
point types are replaced: they truncate to bfloat16 and know neither NaN nor carries in 8-bit types. An access
outside of the arrays of a launch, which on a GPU may go unnoticed, is an error.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import triton
import triton.language as tl

# It keeps what it finds in `triton.language` when it is first imported, which must not be the interpreter's patches.
import triton.compiler.code_generator  # isort: skip
from triton.runtime import interpreter

TRITON_NAMES = {
    "float64": "fp64",
    "float32": "fp32",
    "float16": "fp16",
    "bfloat16": "bf16",
    "float8_e4m3fn": "fp8e4nv",
    "float8_e4m3fnuz": "fp8e4b8",
    "float8_e5m2": "fp8e5",
    "float8_e5m2fnuz": "fp8e5b16",
    "bool": "i1",
} | {f"{prefix}{bits}": f"{prefix[0]}{bits}" for prefix in ("int", "uint") for bits in (8, 16, 32, 64)}

_NUMPY_FLOATS = {
    tl.float64: np.dtype(np.float64),
    tl.float32: np.dtype(np.float32),
    tl.float16: np.dtype(np.float16),
    tl.bfloat16: np.dtype(ml_dtypes.bfloat16),
    tl.float8e4nv: np.dtype(ml_dtypes.float8_e4m3fn),
    tl.float8e4b8: np.dtype(ml_dtypes.float8_e4m3fnuz),
    tl.float8e5: np.dtype(ml_dtypes.float8_e5m2),
    tl.float8e5b16: np.dtype(ml_dtypes.float8_e5m2fnuz),
}

# The interpreter patches `triton.language` and keeps its position in the grid in globals.
_lock = threading.RLock()


class _Storage:
    def __init__(self, array: np.ndarray):
        self._array = array

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def size(self) -> int:
        return self._array.nbytes

    def cpu(self) -> "_Storage":
        return self

    def copy_(self, other: "_Storage") -> None:
        """Do nothing: what the interpreter takes for the host's copy is the array itself."""


class _NumpyTensor:
    """The part of a tensor that the interpreter asks for; no data is copied."""

    device = "cpu"

    def __init__(self, array: np.ndarray):
        self._array = array
        self.dtype = TRITON_NAMES[array.dtype.name]
        self.shape = array.shape

    def data_ptr(self) -> int:
        return self._array.ctypes.data

    def untyped_storage(self) -> _Storage:
        return _Storage(self._array)

    def storage_offset(self) -> int:
        return 0

    def size(self) -> tuple[int, ...]:
        return self._array.shape

    def stride(self, *_) -> tuple[int, ...]:
        return tuple(s // self._array.itemsize for s in self._array.strides)

    def new_empty(self, *_, **__) -> "_NumpyTensor":
        return self

    def set_(self, *_, **__) -> "_NumpyTensor":
        return self


class _Memory:
    """The arrays of a launch, and a check that a kernel stays in them."""

    def __init__(self, kernel: triton.JITFunction, arrays: list[np.ndarray]):
        self._kernel = kernel
        self._arrays = sorted(
            zip(kernel.arg_names, arrays, strict=False), key=lambda argument: argument[1].ctypes.data
        )
        self._starts = np.array([array.ctypes.data for _, array in self._arrays], np.uint64)
        # Of the arrays that begin at or before a start: what is aliased is there twice.
        ends = self._starts + np.array([array.nbytes for _, array in self._arrays], np.uint64)
        self._ends = np.maximum.accumulate(ends)

    def check(self, does: str, pointers: interpreter.TensorHandle, mask: np.ndarray) -> None:
        """Raise IndexError where an address that is not masked out lies in no array."""
        size = np.dtype(interpreter._get_np_dtype(pointers.get_element_ty())).itemsize
        addresses = pointers.data[np.broadcast_to(mask, pointers.data.shape)].astype(np.uint64)
        array = np.searchsorted(self._starts, addresses, side="right") - 1
        outside = (array < 0) | (addresses + np.uint64(size) > self._ends[array])
        if outside.any():
            at = int(addresses[outside][0])
            name, nearest = self._arrays[max(0, int(array[outside][0]))]
            raise IndexError(
                f"{self._kernel.__name__} {does} {size} bytes outside of its arrays: at byte "
                f"{at - nearest.ctypes.data} of {name}, which has {nearest.nbytes}"
            )


def run(kernel: triton.JITFunction, arrays: list[np.ndarray], grid: int, **constants) -> None:
    """Run `kernel` over a one-dimensional grid on `arrays`, which it reads and writes in place.

    Raises:
        IndexError: the kernel reads or writes outside of `arrays`.
    """
    with _lock, _interpreting(_Memory(kernel, arrays)):
        interpreted = interpreter.InterpretedFunction(kernel.fn)
        try:
            interpreted.run(*map(_NumpyTensor, arrays), grid=(grid,), warmup=False, **constants)
        except interpreter.InterpreterError as error:
            raise error.__cause__ or error from None


@contextlib.contextmanager
def _interpreting(memory: _Memory) -> Iterator[None]:
    """Route calls of jitted functions, accesses and conversions of floats; on leaving, undo every patch of Triton."""
    builder = interpreter.interpreter_builder
    touched = [
        interpreter,
        tl,
        tl.core,
        tl.math,
        tl.tensor,
        tl.dtype,
        tl.core.tensor_descriptor_base,
        tl.core.range,
    ]
    before = [(owner, dict(vars(owner))) for owner in touched]
    call, builder_state = triton.JITFunction.__call__, dict(vars(builder))
    triton.JITFunction.__call__ = _call_interpreted
    builder.cast_impl = _convert
    builder.create_fp_to_fp = lambda source, dtype, rounding: _convert(source, dtype)
    builder.create_dot = _dot
    builder.create_splat = _splat
    load, store = builder.create_masked_load, builder.create_masked_store

    def checked_load(pointers, mask, *others):
        memory.check("reads", pointers, mask.data)
        return load(pointers, mask, *others)

    def checked_store(pointers, value, mask, *others):
        memory.check("writes", pointers, mask.data)
        return store(pointers, value, mask, *others)

    builder.create_masked_load, builder.create_masked_store = checked_load, checked_store
    # Checking every integer operation for overflow doubles the time.
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)
    patch_tensor = interpreter._patch_lang_tensor

    def patch_tensor_and_index(tensor, *scope):
        patch_tensor(tensor, *scope)
        # Triton 3.6 wants an array of one element to be a number, which numpy 2.5 refuses.
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patch_tensor_and_index
    interpreter._patch_lang(_patched_everywhere)
    try:
        yield
    finally:
        triton.JITFunction.__call__ = call
        vars(builder).clear()
        vars(builder).update(builder_state)
        for owner, attributes in before:
            _restore(owner, attributes)


def _patched_everywhere():
    """Name the modules that the interpreter patches for a function: those among the function's globals."""
    return tl, core


core = tl.core


def _restore(owner, attributes: dict) -> None:
    for name, value in list(vars(owner).items()):
        if name not in attributes:
            delattr(owner, name)
        elif attributes[name] is not value:
            setattr(owner, name, attributes[name])


def _call_interpreted(function: triton.JITFunction, *args, **kwargs):
    return interpreter.InterpretedFunction(function.fn).rewrite()(*args, **kwargs)


def _values(handle) -> np.ndarray:
    dtype = handle.dtype.scalar
    return handle.data.view(_NUMPY_FLOATS[dtype]) if dtype in _NUMPY_FLOATS else handle.data


def _convert(source, dtype):
    """Convert as the hardware does: to nearest even, NaN to NaN."""
    scalar = dtype.scalar
    values = _values(source)
    if scalar not in _NUMPY_FLOATS:
        with np.errstate(invalid="ignore"):
            return interpreter.TensorHandle(values.astype(interpreter._get_np_dtype(scalar)), scalar)
    with np.errstate(over="ignore", invalid="ignore"):
        converted = values.astype(_NUMPY_FLOATS[scalar])
    return interpreter.TensorHandle(converted.view(interpreter._get_np_dtype(scalar)), scalar)


def _splat(block_type, scalar):
    """Keep the dtype of the data: a comparison's handle carries the dtype of what it compared."""
    return interpreter.TensorHandle(
        np.full(block_type.shape, scalar.data[0], scalar.data.dtype), scalar.dtype.scalar
    )


def _dot(a, b, acc, input_precision, max_num_imprecise_acc):
    # BLAS sums a row in an order that depends on its place in the matrix; rounded from float64, all orders agree.
    product = np.matmul(_values(a).astype(np.float64), _values(b).astype(np.float64)).astype(acc.data.dtype)
    return interpreter.TensorHandle(product + acc.data, acc.dtype.scalar)
