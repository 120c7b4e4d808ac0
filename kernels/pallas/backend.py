"""JAX's Pallas Triton backend: whether it is there, and calls of it that do not depend on the caller's settings."""

import contextlib
import functools
import importlib
import warnings
from collections.abc import Callable, Iterator, Sequence

import jax
import jax.numpy as jnp
from jax.extend.core import Primitive, jaxpr_as_fun
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


def result_shape(shape: tuple[int, ...], dtype) -> jax.ShapeDtypeStruct:
    """Describe a result, with what JAX says of every array: in a shard_map, over which axes it varies."""
    return jax.eval_shape(lambda: jnp.zeros(shape, dtype))


def call(
    function: Callable[..., Sequence[jax.Array]],
    operands: Sequence[jax.Array],
    *,
    index64: bool,
    paired: frozenset[int] = frozenset(),
) -> list[jax.Array]:
    """Call `function`, which makes a `pallas_call`, whatever the caller's settings are.

    Pallas lowers, and interprets, a kernel when the caller's program is lowered, outside of any scope that it was
    traced in. So this is an operation of its own, which is lowered under the settings that it needs.

    Args:
        function: takes the operands and returns arrays.
        operands: arrays.
        index64: trace and lower it in x64 mode.
        paired: numbers of operands of 8-bit elements that `function` gets as flat arrays of int16, the first of two
            elements in the low byte. It may only pass them on to `pallas_call`.

    Returns:
        What `function` returns. `vmap` runs the calls of the mapped axis one after the other.

    Raises:
        UnsupportedError: differentiated.
    """
    with jax.enable_x64(index64):
        shapes = [
            jax.ShapeDtypeStruct((x.size // 2,), jnp.int16)
            if number in paired
            else jax.ShapeDtypeStruct(x.shape, x.dtype)
            for number, x in enumerate(operands)
        ]
        jaxpr = jax.make_jaxpr(function)(*shapes)
    bind = functools.partial(_call.bind, jaxpr=jaxpr, index64=index64, paired=paired)
    return list(sealed(lambda *arrays: tuple(bind(*arrays)), "pallas")(*operands))


_call = Primitive("jaxattn_pallas")
_call.multiple_results = True


@_call.def_abstract_eval
def _abstract_eval(*operands, jaxpr, **_):
    return jaxpr.out_avals


@_call.def_impl
def _run_alone(*operands, **parameters):
    return jax.jit(functools.partial(_call.bind, **parameters))(*operands)


def _lower(ctx, *operands, jaxpr, index64, paired):
    with jax.enable_x64(index64), quiet_about_deprecation():
        # A kernel that is compiled gets the address of an operand, whatever that is called outside. So elements of
        # 8 bits are handed over as they are: XLA's own conversion to wider ones would copy a cache.
        operands = [
            _flattened(ctx, aval, operand) if number in paired else operand
            for number, (aval, operand) in enumerate(zip(ctx.avals_in, operands, strict=True))
        ]
        return _lower_jaxpr(ctx, jaxpr, operands)


def _flattened(ctx, aval, operand):
    jaxpr = jax.make_jaxpr(lambda x: x.reshape(-1))(jax.ShapeDtypeStruct(aval.shape, aval.dtype))
    (flat,) = _lower_jaxpr(ctx, jaxpr, [operand])
    return flat


def _lower_jaxpr(ctx, jaxpr, operands):
    # In a shard_map operands vary over mesh axes, which nothing inside needs to know.
    ctx = ctx.replace(avals_in=jaxpr.in_avals, avals_out=jaxpr.out_avals)
    return mlir.lower_fun(jaxpr_as_fun(jaxpr), multiple_results=True)(ctx, *operands)


mlir.register_lowering(_call, _lower)
