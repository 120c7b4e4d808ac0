"""The sliding-window pool: slot translation, and which pages a window has left behind."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Int64

from jaxattn.index64 import as_index, index64, take_or_padding


def to_window_slots(slots: Int64[Array, "..."], full_to_swa: Int[Array, "slots+1"]) -> Int64[Array, "..."]:
    """Translate full-pool slots to window-pool slots; -1 for padding, unmapped and out-of-range slots.

    Call it inside an `index64` scope.
    """
    return jnp.maximum(take_or_padding(full_to_swa, slots), -1)


@index64
def evictable_pages(
    min_query_position: Int[Array, "S"],
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
