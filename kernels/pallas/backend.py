"""JAX's Pallas Triton backend: whether it is there, and calls of it that do not depend on the caller's settings."""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
from jax.extend.core import Primitive
from jax.interpreters import mlir

from jaxattn.kernels._transforms import sealed


def refuse_backend() -> str | None:
    """Return why this jax cannot compile Pallas kernels through Triton, or None where it can."""
    try:
        importlib.import_module("jax.experimental.pallas.triton")
    except ImportError as error:
        return (
            f"jax {jax.__version__} has no Pallas Triton backend ({error}), which is deprecated since jax 0.11; "
            "install jaxattn[triton] for implementation='triton', or an older jax"
        )
    return None


@contextlib.contextmanager
def quiet_about_deprecation() -> Iterator[None]:
    """Silence the notice that the backend will be removed, which is about us and not about the caller."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*Pallas Triton.*", category=DeprecationWarning)
        yield


def call_when_lowered(
    function: Callable[..., Sequence[jax.Array]],
    outputs: Sequence[jax.ShapeDtypeStruct],
    operands: Sequence[jax.Array],
    *,
    index64: bool,
) -> list[jax.Array]:
    """Call `function`, which makes a `pallas_call`, when the program is lowered.

    Pallas lowers, and interprets, a kernel when the caller's program is lowered: then this module's settings hold
    there too, whatever the caller's x64 flag is.

    Args:
        function: hashable; takes the operands and returns the outputs.
        outputs: their shapes and dtypes.
        operands: arrays.
        index64: lower it in x64 mode.

    Returns:
        The outputs. `vmap` runs the calls of the mapped axis one after the other.

    Raises:
        UnsupportedError: differentiated.
    """
    shapes = tuple(jax.ShapeDtypeStruct(o.shape, o.dtype) for o in outputs)
    return list(_sealed(function, shapes, index64)(*operands))


@functools.cache
def _sealed(function: Callable, outputs: tuple[jax.ShapeDtypeStruct, ...], index64: bool) -> Callable:
    def bind(*operands):
        return tuple(_call.bind(*operands, function=function, outputs=outputs, index64=index64))

    return sealed(bind, "pallas")


_call = Primitive("jaxattn_pallas")
_call.multiple_results = True


@_call.def_abstract_eval
def _abstract_eval(*operands, function, outputs, index64):
    return [jax.core.ShapedArray(o.shape, o.dtype) for o in outputs]


@_call.def_impl
def _run_alone(*operands, **parameters):
    return jax.jit(functools.partial(_call.bind, **parameters))(*operands)


def _lower(ctx, *operands, function, outputs, index64):
    with jax.enable_x64(index64), quiet_about_deprecation():
        return mlir.lower_fun(function, multiple_results=True)(ctx, *operands)


mlir.register_lowering(_call, _lower)
