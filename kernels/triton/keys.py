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
def hidden_zero():
    """Zero, but no compiler sees that all threads hold the same: what is loaded by it goes to vector registers.

    Page ids are loaded a tile ahead. In a scalar register they would be awaited at once (CUDA), or with every access
    to shared memory (ROCm).
    """
    return tl.min(tl.arange(0, 32).to(tl.float32), 0).to(tl.int64)


@triton.jit
def path_of(ancestors_ptr, row, C: tl.constexpr):
    """For each draft node of a sequence, how many nodes of the path to `row` come before it; -1 beside the path."""
    node = tl.arange(0, C.padded_nodes)
    word = tl.load(ancestors_ptr + row * C.tree_words + node // 64, mask=node < 64 * C.tree_words, other=0)
    bit = ((word >> (node % 64).to(tl.uint64)) & 1).to(tl.int32)
    return tl.where(bit != 0, tl.cumsum(bit, 0) - 1, -1)


@triton.jit
def path_rows(table_ptr, tile, span, C: tl.constexpr):
    """Rows of the pool where the keys of a tile are, -1 without one: the prefix, then the path as if it followed."""
    _, stop, context, path = span
    key = tile * C.tile + tl.arange(0, C.tile)  # [TILE]
    ahead = key - context
    here = path[None, :] == ahead[:, None]  # [TILE, nodes]
    node = tl.sum(tl.where(here, tl.arange(0, C.padded_nodes)[None, :] + 1, 0), 1) - 1
    index = tl.where(ahead < 0, key, tl.where(node < 0, -1, context + node))
    live = (index >= 0) & (index < stop)
    index = tl.where(live, index, 0)
    page = tl.load(table_ptr + (index // C.page_size).to(tl.int64), mask=live, other=-1)
    return tl.where(_is_known(page, C), page * C.page_size + index % C.page_size, -1)


@triton.jit
def page_ids(table_ptr, tile, span, C: tl.constexpr, BARE: tl.constexpr):
    """Pages that a tile of keys needs; what they are where no key of the page is in [start, stop) means nothing.

    Every key of a BARE tile is.

    Few pages come as a tuple of scalars, which all threads hold, so that a key's address is the sum of what its place
    in a page and what the page adds; many come as a tensor, one for each key where tiles and pages do not nest. Keys of
    a path have their rows of the pool in the place of pages.
    """
    start, stop, _, _ = span
    PAGES: tl.constexpr = C.pages_in_tile
    if C.path_keys:
        pages = path_rows(table_ptr, tile, span, C)
    elif C.few_pages:
        first = tile // (C.page_size // C.tile) if C.page_size % C.tile == 0 else tile * PAGES
        pages = ()
        for number in tl.static_range(PAGES):
            # Where rows of the table are whole tiles, one page decides for all.
            decides = first if C.table_width % PAGES == 0 else first + number
            live = decides * C.page_size < stop
            pages += (tl.load(table_ptr + first.to(tl.int64) + number, mask=live, other=0),)
    else:
        if C.tile % C.page_size == 0:
            logical = tile * PAGES + tl.arange(0, PAGES)
        else:
            logical = (tile * C.tile + tl.arange(0, C.tile)) // C.page_size
        if BARE:
            pages = tl.load(table_ptr + logical.to(tl.int64))
        else:
            live = logical * C.page_size < stop
            if C.window > 0:
                live = live & ((logical + 1) * C.page_size > start)
            pages = tl.load(table_ptr + logical.to(tl.int64), mask=live, other=0)
    return pages


@triton.jit
def known_keys(page, C: tl.constexpr):
    """Whether each key of a tile lies in a page of the pool."""
    PAGES: tl.constexpr = C.pages_in_tile
    if C.few_pages:
        known = ()
        for number in tl.static_range(PAGES):
            known += (_is_known(page[number], C),)
    elif C.path_keys:
        known = page >= 0
    else:
        known = _is_known(page, C)
    return _per_key(known, C)  # [TILE]


@triton.jit
def unknown_pages(table_ptr, first, last, C: tl.constexpr):
    """Whether each of the first pages of the tiles [first, last) lies outside the pool; 0 where there are less."""
    page_first, page_last = _pages_of_tiles(first, last, C)
    return _unknown_pages(table_ptr, page_first, page_last, C)


@triton.jit
def all_known(unknown, table_ptr, first, last, C: tl.constexpr):
    """Whether every page of the tiles [first, last) lies in the pool; of the first ones `unknown` tells."""
    page_first, page_last = _pages_of_tiles(first, last, C)
    for start in range(page_first + C.pages_at_once, page_last, C.pages_at_once):
        unknown = unknown | _unknown_pages(table_ptr, start, page_last, C)
    return tl.max(unknown, 0) == 0


@triton.jit
def page_starts(page, C: tl.constexpr, CHECKED: tl.constexpr):
    """Tokens of the pool before the page of each key of a tile; unknown pages are page 0, unless all were CHECKED."""
    PAGES: tl.constexpr = C.pages_in_tile
    if C.few_pages:
        start = ()
        for number in tl.static_range(PAGES):
            start += (_page_start(page[number], C, CHECKED),)
    else:
        start = _page_start(page, C, CHECKED)
    return _per_key(start, C)  # [TILE] int64


@triton.jit
def key_places(ptr, start, tile, WIDTH: tl.constexpr, column, C: tl.constexpr):
    """Where some columns of each key of a tile lie, in a pool with WIDTH elements a token."""
    lane = tl.arange(0, C.tile)
    if C.path_keys:
        in_page = lane * 0
    elif C.tile % C.page_size == 0:
        in_page = lane % C.page_size
    elif C.page_size % C.tile == 0:
        in_page = tile % (C.page_size // C.tile) * C.tile + lane
    else:
        in_page = (tile * C.tile + lane) % C.page_size
    if C.few_pages and C.page_size * WIDTH < 2**31:
        # The places in a page stay what they are from tile to tile; no compiler adds offsets of two types first.
        places = (ptr + column)[None, :] + (in_page * WIDTH)[:, None] + (start * WIDTH)[:, None]
    else:
        places = ptr + ((start + in_page.to(tl.int64)) * WIDTH)[:, None] + column[None, :]
    return places  # [TILE, columns]


@triton.jit
def _pages_of_tiles(first, last, C: tl.constexpr):
    """First page of the tiles [first, last) and one past the last; equal where there is no tile."""
    page_last = last * C.tile // C.page_size
    if C.tile % C.page_size != 0:
        page_last += ((first < last) & (last * C.tile % C.page_size > 0)).to(tl.int32)
    return first * C.tile // C.page_size, page_last


@triton.jit
def _unknown_pages(table_ptr, start, stop, C: tl.constexpr):
    logical = start + tl.arange(0, C.pages_at_once)
    page = tl.load(table_ptr + logical.to(tl.int64), mask=logical < stop, other=0)
    return (_is_known(page, C) == 0).to(tl.int32)


@triton.jit
def _per_key(of_page, C: tl.constexpr):
    """Spread a value of each page over the keys of a tile."""
    PAGES: tl.constexpr = C.pages_in_tile
    if C.few_pages:
        # The compiler knows which keys are a thread's, and makes no choice of it.
        of_key = tl.broadcast_to(of_page[0], [C.tile])
        for number in tl.static_range(1, PAGES):
            of_key = tl.where(tl.arange(0, C.tile) >= number * C.page_size, of_page[number], of_key)
    elif (not C.path_keys) and (C.tile % C.page_size == 0):
        of_key = tl.reshape(tl.broadcast_to(of_page[:, None], [PAGES, C.page_size]), [C.tile])
    else:
        of_key = of_page
    return of_key  # [TILE]


@triton.jit
def _page_start(page, C: tl.constexpr, CHECKED: tl.constexpr):
    if C.path_keys:
        first = tl.maximum(page, 0)
    else:
        if not CHECKED:
            page = tl.where(_is_known(page, C), page, 0)
        first = page * C.page_size
    return first


@triton.jit
def _is_known(page, C: tl.constexpr):
    """Whether a page id lies in the pool."""
    return page.to(tl.uint64) < C.num_pages
