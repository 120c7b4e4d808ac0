"""The sliding-window pool: slot translation, and which pages a window has left behind."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int64, Integer

from jaxattn.index64 import IndexArray, as_index, as_integer, index64, take_or_padding
from jaxattn.slot_rows import SlotRows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class WindowRows:
    """The rows of the full pool, with each slot translated to the window pool."""

    rows: SlotRows
    full_to_swa: Integer[IndexArray, "full_slots"]

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return self.rows.num_seqs

    def slots(self, position: Int64[Array, "S X"]) -> Int64[Array, "S X"]:
        """Window-pool slot of each position, -1 for padding and for what is not mapped."""
        return _translate(self.full_to_swa, self.rows.slots(position))

    def holds(self, lengths: Int64[Array, "S"]) -> Bool[Array, "S"]:
        """Whether the rows of the full pool list `lengths` slots."""
        return self.rows.holds(lengths)


@index64
def to_window_slots(
    full_to_swa: Integer[IndexArray, "full_slots"], slots: Integer[IndexArray, "..."]
) -> Int64[Array, "..."]:
    """Translate full-pool slots to window-pool slots.

    Args:
        full_to_swa: `[slots+1]`, window-pool slot of each full-pool slot, negative where unmapped.
        slots: full-pool slots of any shape, -1 for padding.

    Returns:
        Int64 of the shape of `slots`; -1 for padding, unmapped and out-of-range slots.

    Raises:
        TypeError: an array is not of an integer dtype.

    Example:
        >>> import numpy as np
        >>> from jaxattn.window_pool import to_window_slots
        >>> to_window_slots(np.array([0, 8, -1, 4, -1]), np.array([3, 2, -1])).tolist()
        [4, -1, -1]
    """
    return _translate_jit(as_integer(full_to_swa, "full_to_swa"), as_index(slots, "slots"))


def _translate(full_to_swa, slots):
    return jnp.maximum(take_or_padding(full_to_swa, slots), -1)


_translate_jit = jax.jit(_translate)


@index64
def evictable_pages(
    min_query_position: Integer[IndexArray, "S"],
    *,
    sliding_window: int,
    page_size: int,
    max_pages: int,
) -> Bool[Array, "S M"]:
    """Mark the logical pages that no query from `min_query_position` on can see.

    A page is free iff `last_position(page) < min_query_position - sliding_window + 1`: the earliest query of
    the coming call decides, never the chunk size or the last query.

    Args:
        min_query_position: `[S]`, position of the earliest query row of the coming call, per sequence.
        sliding_window: keys visible to a query, counting itself.
        page_size: tokens in a page.
        max_pages: columns of the result.

    Returns:
        Bool `[S, M]`, true where the page's slots can be freed and unmapped (`full_to_swa[slot] = -1`).

    Raises:
        ValueError: `sliding_window` or `page_size` is below 1, or `max_pages` is negative.
        TypeError: `min_query_position` is not of an integer dtype.

    Example:
        >>> import numpy as np
        >>> from jaxattn.window_pool import evictable_pages
        >>> evictable_pages(np.array([16]), sliding_window=8, page_size=4, max_pages=4).tolist()
        [[True, True, False, False]]
    """
    for name, value, least in (
        ("sliding_window", sliding_window, 1),
        ("page_size", page_size, 1),
        ("max_pages", max_pages, 0),
    ):
        if value < least:
            raise ValueError(f"{name}: expected at least {least}, got {value}")
    position = as_index(min_query_position, "min_query_position")
    return _evictable_pages(position, sliding_window, page_size, max_pages)


@functools.partial(jax.jit, static_argnames=("sliding_window", "page_size", "max_pages"))
def _evictable_pages(min_query_position, sliding_window, page_size, max_pages):
    last_position = jnp.arange(1, max_pages + 1) * page_size - 1
    return last_position < min_query_position[..., None] - sliding_window + 1
