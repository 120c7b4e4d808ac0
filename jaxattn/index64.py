"""Scoped 64-bit index arithmetic.

JAX with x64 off turns the int64 result of every operation into int32 without an error. A function
under `index64` traces and runs inside `jax.enable_x64(True)`, so that its index arithmetic is int64
whatever the caller's flag is. Floats inside such a function must carry explicit dtypes.

A few operations are traced a second time when the caller's program is lowered, outside the scope, and
fail there while x64 is off: `argmax`, `argmin`, `jnp.nonzero` (from jax 0.12), and an integer matmul in
a scan under `vmap`. Use a masked `min` or `max` over `arange`, or a sum, instead.
"""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int64, Integer

P = ParamSpec("P")
R = TypeVar("R")
IndexArray = Array | np.ndarray


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


def as_integer(value, name: str):
    """Return `value` as an integer array of its own dtype; call it inside an `index64` scope.

    For large tables that are gathered from: widening them first would copy them.

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
        raise TypeError(
            f"{name}: expected an integer dtype (int64), got {value.dtype}; cast the indices first"
        )
    return value


def as_index(value, name: str) -> jax.Array:
    """Return `value` as an int64 array; call it inside an `index64` scope.

    Raises:
        TypeError: `value` is not of an integer dtype.
        OverflowError: a uint64 value is beyond int64.
    """
    return jnp.asarray(as_integer(value, name), dtype=jnp.int64)


def take_or_padding(table: Integer[IndexArray, "..."], *indices: Int64[Array, "..."]) -> Int64[Array, "..."]:
    """Gather `table[indices]`, one index array per axis, as int64; -1 where an index is out of range.

    JAX would clamp or wrap such an index. The axes stay apart, so no flat offset is formed that could
    pass the range of the table's dtype. Call it inside an `index64` scope.
    """
    shape = jnp.broadcast_shapes(*(index.shape for index in indices))
    if table.size == 0:
        return jnp.full(shape, -1, dtype=jnp.int64)
    inside = functools.reduce(
        jnp.logical_and,
        ((index >= 0) & (index < size) for index, size in zip(indices, table.shape, strict=True)),
    )
    safe = tuple(jnp.where(inside, index, 0) for index in indices)
    taken = jnp.asarray(table).at[safe].get(mode="promise_in_bounds")
    return jnp.where(inside, taken.astype(jnp.int64), -1)


def cdiv(a, b):
    """Ceiling division."""
    return -(-a // b)
