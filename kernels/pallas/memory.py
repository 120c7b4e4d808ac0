"""Loads and stores of flat arrays by int64 places.

Places are arrays, never slices, which would copy the whole operand where Pallas interprets a kernel. It also writes
the old value of each lane that is masked, so such a lane must not share its place with a live one.
"""

import numpy as np
from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import triton as plt


def load(ref, at, mask=None, other=0):
    """Load the elements at `at`, and `other` where `mask` does not hold."""
    if mask is None:
        return plt.load(ref.at[at])
    return plt.load(ref.at[at], mask=mask, other=np.asarray(other, ref.dtype)[()])


def load_pairs(ref, at, mask=None):
    """Load the 8-bit elements `2 * at` and `2 * at + 1` as one int16, the first in its low byte; 0 where masked.

    A compiled kernel gets a reference to int16 elements, an interpreted one to single bytes.
    """
    if ref.dtype == jnp.int16:
        return load(ref, at, mask)
    low, high = (load(ref, 2 * at + byte, mask) for byte in range(2))
    low, high = (lax.bitcast_convert_type(byte, jnp.uint8).astype(jnp.int16) for byte in (low, high))
    return low | (high << 8)


def store(ref, at, value, live):
    """Store a value at each place that is live."""
    plt.store(ref.at[jnp.where(live, at, ref.shape[0])], value.astype(ref.dtype), mask=live)


def store_rows(ref, row, width: int, value, live):
    """Store the first `width` columns of each live row of a tile `[R, W]`."""
    column = jnp.arange(value.shape[1], dtype=jnp.int64)
    end = ref.shape[0]
    start = jnp.where(live, row * width, end)
    mask = jnp.broadcast_to(live[:, None], value.shape)
    if value.shape[1] > width:
        mask = mask & (column < width)[None, :]
        column = jnp.where(column < width, column, end)
    plt.store(ref.at[start[:, None] + column[None, :]], value.astype(ref.dtype), mask=mask)
