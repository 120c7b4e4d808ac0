"""Where the keys of a block of query rows are: their range, their pages, and their rows in the pool."""

import triton
import triton.language as tl


@triton.jit
def key_range(context, keys, first_token, last_token, C: tl.constexpr):
    """First key that the tokens [first_token, last_token] of a sequence can see, and one past the last."""
    stop = keys
    if C.causal:
        stop = tl.minimum(stop, context + last_token + 1)
    stop = tl.maximum(stop, 0)
    start = stop * 0
    if C.window > 0:
        # A tree row sits at or after the context, so its window starts at or after that of the context.
        first_position = context if C.tree_words > 0 else context + first_token
        start = tl.minimum(tl.maximum(first_position - C.window + 1, 0), stop)
    return start, stop


@triton.jit
def bare_range(context, start, stop, first_token, last_token, C: tl.constexpr):
    """Tiles [first, last) in which every row of a block sees every key."""
    last_key = stop
    if C.tree_words > 0:
        last_key = tl.minimum(stop, context)
    elif C.causal:
        last_key = tl.minimum(stop, context + first_token.to(tl.int32) + 1)
    first_key = start
    if C.window > 0:
        first_key = tl.maximum(start, context + last_token.to(tl.int32) - (C.window - 1))
    return (first_key + C.tile - 1) // C.tile, tl.maximum(last_key, 0) // C.tile


@triton.jit
def page_ids(table_ptr, tile, start, stop, C: tl.constexpr):
    """Pages that a tile of keys needs, `[PAGES]` or a scalar; 0 where no key of the page is in [start, stop)."""
    if C.tile % C.page_size == 0:
        logical = tile * (C.tile // C.page_size) + tl.arange(0, C.tile // C.page_size)
    elif C.page_size % C.tile == 0:
        logical = tile // (C.page_size // C.tile)
    else:
        logical = (tile * C.tile + tl.arange(0, C.tile)) // C.page_size
    live = logical * C.page_size < stop
    if C.window > 0:
        live = live & ((logical + 1) * C.page_size > start)
    return tl.load(table_ptr + logical.to(tl.int64), mask=live, other=0)


@triton.jit
def per_key(of_page, C: tl.constexpr):
    """Spread a value of each page over the keys of a tile."""
    if C.tile % C.page_size == 0:
        pages: tl.constexpr = C.tile // C.page_size
        of_key = tl.reshape(tl.broadcast_to(of_page[:, None], [pages, C.page_size]), [C.tile])
    elif C.page_size % C.tile == 0:
        of_key = tl.broadcast_to(of_page, [C.tile])
    else:
        of_key = of_page
    return of_key  # [TILE]


@triton.jit
def pool_rows(page, tile, C: tl.constexpr):
    """Row in the pool, in tokens, of each key of a tile; those of unknown pages lie in page 0."""
    lane = tl.arange(0, C.tile)
    if C.tile % C.page_size == 0:
        in_page = lane % C.page_size
    elif C.page_size % C.tile == 0:
        in_page = tile % (C.page_size // C.tile) * C.tile + lane
    else:
        in_page = (tile * C.tile + lane) % C.page_size
    return per_key(tl.where(is_known(page, C), page, 0) * C.page_size, C) + in_page  # [TILE] int64


@triton.jit
def is_known(page, C: tl.constexpr):
    """Whether a page id lies in the pool."""
    return page.to(tl.uint64) < C.num_pages
