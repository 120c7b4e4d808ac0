"""Where the keys of a block of query rows are: their pages, and their rows in the pool."""

import jax
import jax.numpy as jnp
from jax import lax

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.arithmetic import quotient, remainder
from jaxattn.kernels.pallas.block import Block
from jaxattn.kernels.pallas.memory import load


def path_of(ancestors, row, C: AttentionConstants):
    """For each draft node of a sequence, how many nodes of the path to `row` come before it; -1 beside the path."""
    node = jnp.arange(C.padded_nodes, dtype=jnp.int64)
    word = load(ancestors, row * C.tree_words + quotient(node, 64), node < 64 * C.tree_words)
    bit = (lax.shift_right_logical(word, remainder(node, 64).astype(jnp.uint64)) & 1).astype(jnp.int32)
    return jnp.where(bit != 0, lax.cumsum(bit) - 1, -1)


def path_rows(page_table, row, tile, block: Block, path, C: AttentionConstants):
    """Rows of the pool where the keys of a tile are, -1 without one: the prefix, then the path as if it followed."""
    key = tile * C.tile + jnp.arange(C.tile, dtype=jnp.int32)  # [TILE]
    ahead = key - block.context
    here = path[None, :] == ahead[:, None]  # [TILE, nodes]
    node = jnp.arange(C.padded_nodes, dtype=jnp.int32)
    node = jnp.sum(jnp.where(here, node[None, :] + 1, 0), 1) - 1
    index = jnp.where(ahead < 0, key, jnp.where(node < 0, -1, block.context + node))
    live = (index >= 0) & (index < block.stop)
    index = jnp.where(live, index, 0)
    page = load(page_table, row + quotient(index, C.page_size).astype(jnp.int64), live, -1)
    known = (page >= 0) & (page < C.num_pages)
    return jnp.where(known, page * C.page_size + remainder(index, C.page_size).astype(jnp.int64), -1)


def page_ids(page_table, row, tile, block: Block, path, C: AttentionConstants):
    """Pages that a tile of keys needs: a list of scalars where they are few, else an array, one for each page or key.

    The row of the table begins at `row`. What pages are where no key of them is in [start, stop) means nothing. Keys of
    a path have their rows of the pool in the place of pages.
    """
    start, stop = block.start, block.stop
    if C.path_keys:
        return path_rows(page_table, row, tile, block, path, C)
    if C.few_pages:
        first = quotient(tile, C.page_size // C.tile) if C.page_size % C.tile == 0 else tile * C.pages_in_tile
        return [
            load(page_table, row + (first + number).astype(jnp.int64), (first + number) * C.page_size < stop)
            for number in range(C.pages_in_tile)
        ]
    if C.tile % C.page_size == 0:
        logical = tile * C.pages_in_tile + jnp.arange(C.pages_in_tile, dtype=jnp.int32)
    else:
        logical = quotient(tile * C.tile + jnp.arange(C.tile, dtype=jnp.int32), C.page_size)
    live = logical * C.page_size < stop
    if C.window > 0:
        live = live & ((logical + 1) * C.page_size > start)
    return load(page_table, row + logical.astype(jnp.int64), live)


def hidden_zero():
    """Zero, but no compiler sees that all threads hold the same, see `hidden_zero` of the Triton kernels."""
    return jnp.min(jnp.arange(32, dtype=jnp.int32).astype(jnp.float32)).astype(jnp.int64)


def per_key(of_page, C: AttentionConstants):
    """Spread a value of each page over the keys of a tile, `[TILE]`."""
    if C.few_pages:
        first, *others = of_page
        of_key = jnp.broadcast_to(first, (C.tile,))
        for number, value in enumerate(others, 1):
            of_key = jnp.where(jnp.arange(C.tile, dtype=jnp.int32) >= number * C.page_size, value, of_key)
        return of_key
    if C.tile % C.page_size == 0 and not C.path_keys:
        return jnp.broadcast_to(of_page[:, None], (C.pages_in_tile, C.page_size)).reshape(C.tile)
    return of_page


def pool_rows(page, tile, C: AttentionConstants):
    """Row in the pool, in tokens, of each key of a tile; those of unknown pages lie in page 0. `[TILE]` int64."""
    if C.path_keys:
        return jnp.maximum(page, 0)
    lane = jnp.arange(C.tile, dtype=jnp.int32)
    if C.tile % C.page_size == 0:
        in_page = remainder(lane, C.page_size)
    elif C.page_size % C.tile == 0:
        in_page = remainder(tile, C.page_size // C.tile) * C.tile + lane
    else:
        in_page = remainder(tile * C.tile + lane, C.page_size)
    first = jax.tree.map(
        lambda page, known: jnp.where(known, page, 0) * C.page_size, page, are_known(page, C)
    )
    return per_key(first, C) + in_page.astype(jnp.int64)


def are_known(page, C: AttentionConstants):
    """Whether page ids lie in the pool."""
    if C.path_keys:
        return page >= 0
    return jax.tree.map(lambda page: (page >= 0) & (page < C.num_pages), page)
