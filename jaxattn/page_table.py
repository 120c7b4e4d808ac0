"""Page tables: the physical page of each logical page of a sequence, built on the device.

An entry of a table `[S, M]` is:

* the page id, for a logical page whose slots lie in one physical page, in order, from its offset 0;
* -1, for a logical page that holds live positions but has no page id: its first slot is -1, unlisted or
  unmapped, or the page is not aligned. Its keys are masked out by the attention and never alias another page;
* 0, in the tail behind the live pages.

A sequence with more live pages than the table has columns gets -1 in all of them, never a truncated row.

Rows that are not page-aligned. Where draft branches share a partly filled page (topk > 1 with a page size
above 1), one logical page spans two physical pages, and no table of that page size can express the row. Build
the table with `page_size=1`, where every slot list can be expressed, and view the cache through
`view_pages(cache, 1)`, a reshape that copies nothing. `page_aligned` tells which rows need that.

Checked mode. Under `jaxattn.debug.checked` a builder raises for rows that do not fit the table, list too few
slots or are not page-aligned, with the number of the sequence.
"""

import functools
import importlib

import jax
import jax.numpy as jnp
from jax.experimental import checkify
from jaxtyping import Array, Bool, Int64, Integer, Shaped

from jaxattn.index64 import IndexArray, as_index, as_integer, cdiv, index64
from jaxattn.kernels import bookkeeping
from jaxattn.slot_rows import RaggedRows, SlotRows, pooled_rows, ragged_rows, slot_rows
from jaxattn.window_pool import WindowRows


@index64
def page_table_from_ragged(
    kv_indptr: Integer[IndexArray, "S_plus_1"],
    kv_indices: Integer[IndexArray, "nnz"],
    *,
    page_size: int,
    max_pages: int,
    full_to_swa: Integer[IndexArray, "full_slots"] | None = None,
    out: Int64[Array, "S M"] | None = None,
) -> Int64[Array, "S M"]:
    """Build the page table of ragged slot lists.

    Args:
        kv_indptr: `[S+1]`, start of each sequence's slots in `kv_indices`.
        kv_indices: `[nnz]`, slots in token units (`page * page_size + offset`); entries behind
            `kv_indptr[S]` are slack and never read.
        page_size: tokens in a page.
        max_pages: columns M of the table.
        full_to_swa: window-pool slot of each full-pool slot, negative where unmapped; given, the table is the
            one of the window pool.
        out: an int64 `[S, M]` array of any content to be donated; the result takes its memory.

    Returns:
        Int64 `[S, M]`; the module's docstring says what each entry holds.

    Raises:
        ValueError: an argument has a wrong shape, or `page_size` or `max_pages` is out of range.
        TypeError: an index array is not of an integer dtype, or `out` is not int64.

    Example:
        >>> import numpy as np
        >>> from jaxattn.page_table import page_table_from_ragged
        >>> slots = np.array([12, 13, 14, 15, 4, 5, 20])
        >>> page_table_from_ragged(np.array([0, 6, 7]), slots, page_size=4, max_pages=3).tolist()
        [[3, 1, 0], [5, 0, 0]]
    """
    rows = ragged_rows(kv_indptr, kv_indices)
    return _page_table(rows, rows.lengths, page_size, max_pages, full_to_swa, out)


@index64
def page_table_from_req_to_token(
    req_to_token: Integer[IndexArray, "R C"],
    req_pool_indices: Integer[IndexArray, "S"],
    lengths: Integer[IndexArray, "S"],
    *,
    page_size: int,
    max_pages: int | None = None,
    full_to_swa: Integer[IndexArray, "full_slots"] | None = None,
    out: Int64[Array, "S M"] | None = None,
) -> Int64[Array, "S M"]:
    """Build the page table of the rows of a request pool.

    Args:
        req_to_token: `[R, C]`, slots of each pool row in token units. Any integer dtype: the address of an
            entry is formed in 64 bits.
        req_pool_indices: `[S]`, the pool row of each sequence; -1 marks a padding sequence.
        lengths: `[S]`, tokens that the table must cover, with the call's own tokens.
        page_size: tokens in a page.
        max_pages: columns M of the table; by default `ceil(C / page_size)`, the fewest that hold any row.
        full_to_swa: window-pool slot of each full-pool slot, negative where unmapped; given, the table is the
            one of the window pool.
        out: an int64 `[S, M]` array of any content to be donated; the result takes its memory.

    Returns:
        Int64 `[S, M]`; the module's docstring says what each entry holds.

    Raises:
        ValueError: an argument has a wrong shape, `page_size` is out of range, or `max_pages` is too few for
            a row of `req_to_token`.
        TypeError: an index array is not of an integer dtype, or `out` is not int64.

    Example:
        >>> import numpy as np
        >>> from jaxattn.page_table import page_table_from_req_to_token
        >>> pool = np.array([[0, 0, 0, 0], [6, 7, 2, 3]])
        >>> page_table_from_req_to_token(pool, np.array([1]), np.array([3]), page_size=2).tolist()
        [[3, 1]]
    """
    rows = pooled_rows(req_to_token, req_pool_indices)
    lengths = as_index(lengths, "lengths")
    if lengths.shape != (rows.num_seqs,):
        raise ValueError(f"lengths: expected shape [S] = [{rows.num_seqs}], got {list(lengths.shape)}")
    lengths = jnp.where(rows.marked_live, lengths, 0)
    return _page_table(rows, lengths, page_size, max_pages, full_to_swa, out)


def _page_table(rows, lengths, page_size, max_pages, full_to_swa, out):
    max_pages = table_width(rows, page_size, max_pages)
    if full_to_swa is not None:
        full_to_swa = as_integer(full_to_swa, "full_to_swa")
    if out is not None:
        check_destination(out, rows.num_seqs, max_pages, "out")
    return _page_table_jit(rows, lengths, full_to_swa, out, page_size=page_size, max_pages=max_pages)


# keep_unused: the destination's content is never read, only its memory is taken.
@functools.partial(
    jax.jit, static_argnames=("page_size", "max_pages"), donate_argnames=("out",), keep_unused=True
)
def _page_table_jit(rows, lengths, full_to_swa, out, *, page_size, max_pages):
    seen = rows if full_to_swa is None else WindowRows(rows, full_to_swa)
    debug_check_rows(seen, lengths, page_size, max_pages)
    table, window_table = build_page_tables(rows, lengths, page_size, max_pages, full_to_swa)
    return table if full_to_swa is None else window_table


def build_page_tables(
    rows: SlotRows,
    lengths: Int64[Array, "S"],
    page_size: int,
    max_pages: int,
    full_to_swa: Integer[Array, "full_slots"] | None = None,
) -> tuple[Int64[Array, "S M"], Int64[Array, "S M"] | None]:
    """Build the table of checked `rows` and the one of the window pool: in one kernel on a GPU, in XLA elsewhere.

    Call it inside an `index64` scope.
    """
    package = bookkeeping()
    if package is not None:
        kernel = importlib.import_module(f"jaxattn.kernels.{package}.page_table")
        return kernel.build_page_tables(rows, lengths, page_size, max_pages, full_to_swa)
    return xla_page_tables(rows, lengths, page_size, max_pages, full_to_swa)


def xla_page_tables(
    rows: SlotRows,
    lengths: Int64[Array, "S"],
    page_size: int,
    max_pages: int,
    full_to_swa: Integer[Array, "full_slots"] | None,
) -> tuple[Int64[Array, "S M"], Int64[Array, "S M"] | None]:
    """Build what `build_page_tables` builds in XLA, on any device."""
    table = build_page_table(rows, lengths, page_size, max_pages)
    if full_to_swa is None:
        return table, None
    return table, build_page_table(WindowRows(rows, full_to_swa), lengths, page_size, max_pages)


def build_page_table(
    rows: SlotRows | WindowRows, lengths: Int64[Array, "S"], page_size: int, max_pages: int
) -> Int64[Array, "S M"]:
    """Build the table of checked `rows` for their first `lengths` positions; call it inside an `index64` scope."""
    first = jnp.arange(max_pages, dtype=jnp.int64)[None, :] * page_size
    last = jnp.minimum(first + page_size, lengths[:, None]) - 1
    first_slot = rows.slots(jnp.broadcast_to(first, last.shape))
    last_slot = rows.slots(last) if page_size > 1 else first_slot
    return table_entries(first_slot, last_slot, first, lengths[:, None], page_size, max_pages)


def table_entries(first_slot, last_slot, first, length, page_size: int, max_pages: int):
    """Compute table entries from the slots of the first and the last position of each page.

    Args:
        first_slot: slot of position `first`, -1 where none is listed.
        last_slot: slot of the page's last position below `length`.
        first: first position of each page.
        length: positions of the row.
        page_size: tokens in a page.
        max_pages: columns of the table.
    """
    page = jnp.maximum(first_slot // page_size, -1)
    if page_size > 1:
        # A hole (-1) at the end of a page leaves the page's id known, so only two real slots can disagree.
        distance = jnp.minimum(first + page_size, length) - 1 - first
        in_order = (last_slot < 0) | (last_slot - first_slot == distance)
        page = jnp.where((first_slot % page_size == 0) & in_order, page, -1)
    fits = cdiv(length, page_size) <= max_pages
    return jnp.where(first < length, jnp.where(fits, page, -1), 0)


def debug_check_rows(
    rows: SlotRows | WindowRows, lengths: Int64[Array, "S"], page_size: int, max_pages: int
) -> None:
    """Add checks by value, which do nothing unless the program is functionalised by `checkify`."""
    num_seqs = rows.num_seqs
    sequence = jnp.arange(num_seqs, dtype=jnp.int64)

    def check(good, message):
        first_bad = jnp.min(jnp.where(good, num_seqs, sequence), initial=num_seqs)
        checkify.debug_check(first_bad == num_seqs, "sequence {sequence} " + message, sequence=first_bad)

    check(
        page_count(lengths, page_size) <= max_pages,
        f"needs more pages of {page_size} than the {max_pages} of its page-table row; size max_pages for the "
        "longest context with its draft tokens",
    )
    check(
        rows.holds(lengths),
        "lists fewer slots than it has tokens, or lists them outside the index array; list the slots of the "
        "call's own tokens too",
    )
    check(
        _page_aligned(rows, lengths, page_size, max_pages),
        f"is not aligned to pages of {page_size}: the slots of one logical page span two physical pages; build "
        "the table with page_size=1 and view the cache with view_pages(cache, 1)",
    )


@index64
def page_aligned(
    lengths: Integer[IndexArray, "S"],
    *,
    page_size: int,
    kv_indptr: Integer[IndexArray, "S+1"] | None = None,
    kv_indices: Integer[IndexArray, "nnz"] | None = None,
    req_to_token: Integer[IndexArray, "R C"] | None = None,
    req_pool_indices: Integer[IndexArray, "S"] | None = None,
    max_pages: int | None = None,
) -> Bool[Array, "S"]:
    """Tell which sequences a table of pages of `page_size` can express, looking at every slot.

    A sequence is aligned when each slot of its first `lengths` positions has the offset of its position within
    the page and lies in the same physical page as its neighbours there. A slot of -1 agrees with any other.

    Args:
        lengths: `[S]`, positions to look at.
        page_size: tokens in a page.
        kv_indptr: with `kv_indices`, ragged slot lists.
        kv_indices: see `kv_indptr`.
        req_to_token: with `req_pool_indices`, the rows of a request pool.
        req_pool_indices: see `req_to_token`.
        max_pages: logical pages to look at; needed with ragged rows, by default all of a pool row.

    Returns:
        Bool `[S]`.

    Raises:
        ValueError: an argument has a wrong shape or is out of range.
        TypeError: an index array is not of an integer dtype.

    Example:
        >>> import numpy as np
        >>> from jaxattn.page_table import page_aligned
        >>> slots = np.array([8, 9, 20, 21, 4, 5])  # the first logical page lies in pages 2 and 5
        >>> kv_indptr = np.array([0, 4, 6])
        >>> page_aligned(np.array([4, 2]), page_size=4, max_pages=1, kv_indptr=kv_indptr, kv_indices=slots).tolist()
        [False, True]
    """
    rows = slot_rows(
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        req_to_token=req_to_token,
        req_pool_indices=req_pool_indices,
    )
    max_pages = table_width(rows, page_size, max_pages)
    return _page_aligned(rows, as_index(lengths, "lengths"), page_size, max_pages)


def _page_aligned(rows, lengths, page_size, max_pages):
    position = jnp.arange(max_pages * page_size, dtype=jnp.int64)[None, :]
    slots = rows.slots(jnp.broadcast_to(position, (rows.num_seqs, max_pages * page_size)))
    known = (slots >= 0) & (position < lengths[:, None])
    by_page = (rows.num_seqs, max_pages, page_size)
    page, known = (slots // page_size).reshape(by_page), known.reshape(by_page)
    limit = jnp.iinfo(jnp.int64)
    lowest = jnp.min(jnp.where(known, page, limit.max), axis=2, initial=limit.max)
    highest = jnp.max(jnp.where(known, page, limit.min), axis=2, initial=limit.min)
    in_place = ~known | ((slots - position) % page_size == 0).reshape(by_page)
    return jnp.all(in_place, axis=(1, 2)) & jnp.all(lowest >= highest, axis=1)


def page_count(lengths: Integer[IndexArray, "*S"], page_size: int) -> Integer[IndexArray, "*S"]:
    """Count the pages that hold `lengths` tokens: `ceil(length / page_size)`, 0 for an empty sequence.

    Works on Python integers, numpy arrays and, inside an `index64` scope, JAX arrays.

    Example:
        >>> import numpy as np
        >>> from jaxattn.page_table import page_count
        >>> page_count(np.array([100, 16, 1, 32, 0]), 16).tolist()
        [7, 1, 1, 2, 0]
    """
    return cdiv(lengths, page_size) * (lengths > 0)


def last_page_length(lengths: Integer[IndexArray, "*S"], page_size: int) -> Integer[IndexArray, "*S"]:
    """Count the tokens in the last page of a sequence: `(length - 1) % page_size + 1`, 0 for an empty sequence.

    Works on Python integers, numpy arrays and, inside an `index64` scope, JAX arrays.

    Example:
        >>> import numpy as np
        >>> from jaxattn.page_table import last_page_length
        >>> last_page_length(np.array([100, 16, 1, 32, 0]), 16).tolist()
        [4, 16, 1, 16, 0]
    """
    return ((lengths - 1) % page_size + 1) * (lengths > 0)


def view_pages(cache: Shaped[Array, "N P *row"], page_size: int) -> Shaped[Array, "N2 P2 *row"]:
    """View a cache of pages of P tokens as one of smaller pages; slots keep their numbers and nothing is copied.

    Args:
        cache: `[N, P, ...]`.
        page_size: tokens in a page of the view; must divide P.

    Returns:
        `[N * P / page_size, page_size, ...]`.

    Raises:
        ValueError: `page_size` does not divide P.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.page_table import view_pages
        >>> view_pages(jnp.zeros((3, 16, 2, 8)), 1).shape
        (48, 1, 2, 8)
    """
    pages, tokens, *row = cache.shape
    if page_size < 1 or tokens % page_size:
        raise ValueError(f"page_size: expected a divisor of the cache's page size {tokens}, got {page_size}")
    return cache.reshape(pages * (tokens // page_size), page_size, *row)


def table_width(rows: SlotRows, page_size: int, max_pages: int | None) -> int:
    """Return the columns of the table of `rows`, checked against the width of a request pool.

    Raises:
        ValueError: `page_size` or `max_pages` is out of range, or `max_pages` is missing for ragged rows or too
            few for a row of `req_to_token`.
    """
    if page_size < 1:
        raise ValueError(f"page_size: expected at least 1, got {page_size}")
    if isinstance(rows, RaggedRows):
        if max_pages is None:
            raise ValueError("max_pages: expected a number with kv_indptr and kv_indices, got None")
        if max_pages < 0:
            raise ValueError(f"max_pages: expected at least 0, got {max_pages}")
        return max_pages
    width = rows.req_to_token.shape[1]
    needed = cdiv(width, page_size)
    if max_pages is None:
        return needed
    if max_pages < needed:
        raise ValueError(
            f"max_pages: expected at least {needed} pages of {page_size} for the {width} slots of a req_to_token "
            f"row, got {max_pages}; raise max_pages or pass req_to_token[:, :{max_pages * page_size}]"
        )
    return max_pages


def check_destination(out: jax.Array | None, num_seqs: int, max_pages: int, name: str) -> None:
    """Raise unless `out` can be donated for an int64 table `[num_seqs, max_pages]`."""
    expected = (num_seqs, max_pages)
    if out is None or out.shape != expected:
        raise ValueError(
            f"{name}: expected shape [S, M] = {list(expected)}, got {None if out is None else list(out.shape)}"
        )
    if out.dtype != jnp.int64:
        raise TypeError(f"{name}: expected an int64 array, got {out.dtype}; a table of this builder is one")
