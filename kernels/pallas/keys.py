"""Where the keys of a block of query rows are: their pages, and their rows in the pool."""

import jax.numpy as jnp

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.arithmetic import quotient, remainder
from jaxattn.kernels.pallas.memory import load


def page_ids(page_table, sequence, tile, start, stop, C: AttentionConstants):
    """Pages that a tile of keys needs, `[PAGES]` or a scalar; 0 where no key of the page is in [start, stop)."""
    if C.tile % C.page_size == 0:
        logical = tile * C.pages_in_tile + jnp.arange(C.pages_in_tile, dtype=jnp.int32)
    elif C.page_size % C.tile == 0:
        logical = quotient(tile, C.page_size // C.tile)
    else:
        logical = quotient(tile * C.tile + jnp.arange(C.tile, dtype=jnp.int32), C.page_size)
    live = logical * C.page_size < stop
    if C.window > 0:
        live = live & ((logical + 1) * C.page_size > start)
    return load(page_table, sequence * C.table_width + logical.astype(jnp.int64), live)


def per_key(of_page, C: AttentionConstants):
    """Spread a value of each page over the keys of a tile, `[TILE]`."""
    if C.tile % C.page_size == 0:
        return jnp.broadcast_to(of_page[:, None], (C.pages_in_tile, C.page_size)).reshape(C.tile)
    return jnp.broadcast_to(of_page, (C.tile,))


def pool_rows(page, tile, C: AttentionConstants):
    """Row in the pool, in tokens, of each key of a tile; those of unknown pages lie in page 0. `[TILE]` int64."""
    lane = jnp.arange(C.tile, dtype=jnp.int32)
    if C.tile % C.page_size == 0:
        in_page = remainder(lane, C.page_size)
    elif C.page_size % C.tile == 0:
        in_page = remainder(tile, C.page_size // C.tile) * C.tile + lane
    else:
        in_page = remainder(tile * C.tile + lane, C.page_size)
    first = jnp.where(is_known(page, C), page, 0) * C.page_size
    return per_key(first, C) + in_page.astype(jnp.int64)


def is_known(page, C: AttentionConstants):
    """Whether a page id lies in the pool."""
    return (page >= 0) & (page < C.num_pages)
