"""Scoped 64-bit index arithmetic.

JAX with x64 off turns the int64 result of every operation into int32 without an error. A function
under `index64` traces and runs inside `jax.enable_x64(True)`, so that its index arithmetic is int64
whatever the caller's flag is. Floats inside such a function must carry explicit dtypes.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

P = ParamSpec("P")
R = TypeVar("R")


def index64(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` in x64 mode, whatever the caller's flag.

    Put it outside `jax.jit`: numpy int64 arguments are then converted in x64 mode and keep their values.

    Example:
        >>> import jax, numpy as np
        >>> from jaxattn.index64 import index64
        >>> page_start = index64(jax.jit(lambda page: page * 4096))
        >>> int(page_start(np.int64(2**21)))
        8589934592
    """

    @functools.wraps(function)
    def scoped(*args: P.args, **kwargs: P.kwargs) -> R:
        with jax.enable_x64(True):
            return function(*args, **kwargs)

    return scoped


def as_index(value, name: str) -> jax.Array:
    """Return `value` as an int64 array; call it inside an `index64` scope.

    Raises:
        TypeError: `value` is not of an integer dtype.
        OverflowError: a uint64 value is beyond int64.
    """
    if isinstance(value, np.ndarray | np.generic | list | tuple | int):
        host = np.asarray(value)
        if host.size == 0 and host.dtype == np.float64 and not isinstance(value, np.ndarray):
            host = host.astype(np.int64)
        if host.dtype == np.uint64 and host.size and host.max() > np.iinfo(np.int64).max:
            raise OverflowError(f"{name}: expected values within int64, got {host.max()}")
        value = host
    if not jnp.issubdtype(value.dtype, jnp.integer):
        raise TypeError(f"{name}: expected an integer dtype (int64), got {value.dtype}; cast the indices first")
    return jnp.asarray(value, dtype=jnp.int64)


def cdiv(a, b):
    """Ceiling division."""
    return -(-a // b)
