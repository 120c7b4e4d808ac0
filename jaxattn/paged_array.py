"""Rows of a paged array `[N, P, ...]`, read and written by page and offset, in place where it is donated.

Pages and offsets index separate axes, so no flat element offset is formed. Call everything here inside an
`index64` scope.
"""

import jax
import jax.numpy as jnp
import jaxlib
from jaxtyping import Array, Bool, Int64, Num


def page_and_offset(
    slots: Int64[Array, "..."], num_pages: int, page_size: int
) -> tuple[Int64[Array, "..."], Int64[Array, "..."]]:
    """Split slots into pages and offsets; a slot outside the pool, -1 included, gets page `num_pages`."""
    live = inside(slots, num_pages * page_size)
    return jnp.where(live, slots // page_size, num_pages), jnp.where(live, slots % page_size, 0)


def inside(index: Int64[Array, "..."], size: int) -> Bool[Array, "..."]:
    """Whether each index is in `[0, size)`; JAX itself would wrap a negative one, whatever its mode."""
    return (index >= 0) & (index < size)


def read_rows(array: Num[Array, "N ..."], index: tuple[Int64[Array, "T"], ...]) -> Num[Array, "T ..."]:
    """Gather `array[index]`, one index array per leading axis; zeros where an index is past its axis."""
    # A loop-invariant widening of the whole array would otherwise be hoisted out of a caller's loop.
    array, index = jax.lax.optimization_barrier((array, index))
    return array.at[index].get(mode="fill", fill_value=0)


def write_rows(
    array: Num[Array, "N ..."], index: tuple[Int64[Array, "T"], ...], rows: Num[Array, "T ..."]
) -> Num[Array, "N ..."]:
    """Set `array[index] = rows`, one index array per leading axis; an index past its axis drops its row.

    Which row stays where an index occurs twice is undefined.
    """
    if 0 in (rows.size, array.size):
        return array
    if _widened_on_cpu(array.dtype):
        return jax.lax.platform_dependent(array, rows, *index, cpu=_sweep, default=_scatter)
    return _scatter(array, rows, *index)


def _scatter(array, rows, *index):
    if len(rows) == 1:
        # XLA turns a scatter of one row into an update that may fuse with a read of the array, and so copy it.
        index = [jnp.append(axis, size) for axis, size in zip(index, array.shape, strict=False)]
        rows = jnp.repeat(rows, 2, axis=0)
    return array.at[tuple(index)].set(rows, mode="drop")


def _sweep(array, rows, *index):
    """Write by one pass over the bits of the array, which XLA does in place."""
    size = array.shape[: len(index)]
    row = jnp.full(size, -1, jnp.int32).at[index].set(jnp.arange(len(rows), dtype=jnp.int32), mode="drop")
    values = _bits(rows).at[jnp.maximum(row, 0)].get(mode="promise_in_bounds")
    written = (row >= 0).reshape(*size, *(1,) * (array.ndim - len(index)))
    return jax.lax.bitcast_convert_type(jnp.where(written, values, _bits(array)), array.dtype)


def _bits(array):
    return jax.lax.bitcast_convert_type(array, jnp.dtype(f"uint{8 * array.dtype.itemsize}"))


def _widened_on_cpu(dtype) -> bool:
    """Whether XLA's CPU compiler scatters into this format by way of a wider copy of the whole array."""
    if dtype == jnp.bfloat16:
        return jaxlib.version.__version_info__ < (0, 11, 2)
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize == 1
