"""PagePool: which pages of a cache are in use, counted on the host."""

import numpy as np
from jaxtyping import Int64

from jaxattn.errors import PoolExhaustedError

RESERVED_PAGES = 1


class PagePool:
    """Hands out page ids with reference counts, so that sequences can share the pages of a common prefix.

    Page 0 is never handed out: it is what the table rows of padding sequences may name. A window pool is a
    `PagePool` of its own. Not thread-safe.

    Example:
        >>> from jaxattn.page_pool import PagePool
        >>> pool = PagePool(num_pages=5)
        >>> prefix = pool.allocate(2)
        >>> pool.retain(prefix)  # a second sequence shares the prefix
        >>> pool.make_writable(int(prefix[1]))  # the second sequence appends to its own copy
        3
        >>> pool.release(prefix)
        >>> pool.num_free
        2
    """

    def __init__(self, num_pages: int):
        """Make a pool whose pages are all free.

        Args:
            num_pages: pages of the cache, `N`, page 0 included.

        Raises:
            ValueError: there is no page besides page 0.
        """
        if num_pages <= RESERVED_PAGES:
            raise ValueError(
                f"num_pages: expected at least {RESERVED_PAGES + 1}, page 0 being reserved, got {num_pages}"
            )
        self._references = np.zeros(num_pages, np.int64)
        # A stack; the lowest page is on top.
        self._free = np.arange(num_pages - 1, RESERVED_PAGES - 1, -1, dtype=np.int64)
        self._num_free = len(self._free)

    @property
    def num_pages(self) -> int:
        """Pages of the cache, page 0 included."""
        return len(self._references)

    @property
    def num_free(self) -> int:
        """Pages that can be allocated."""
        return self._num_free

    def reference_count(self, page: int) -> int:
        """How many owners a page has, 0 when it is free.

        Raises:
            ValueError: the pool does not hand out this page.
        """
        return int(self._references[self._own(page)][0])

    def allocate(self, count: int) -> Int64[np.ndarray, "count"]:
        """Take `count` pages with one reference each.

        Raises:
            PoolExhaustedError: fewer pages are free; nothing was taken.
            ValueError: `count` is negative.
        """
        if count < 0:
            raise ValueError(f"count: expected a number of pages, got {count}")
        if count > self._num_free:
            raise PoolExhaustedError(
                f"asked for {count} pages, but only {self._num_free} of "
                f"{self.num_pages - RESERVED_PAGES} are free; release pages or make the cache larger"
            )
        left = self._num_free - count
        pages = self._free[left : self._num_free][::-1].copy()
        self._num_free = left
        self._references[pages] = 1
        return pages

    def retain(self, pages) -> None:
        """Add one owner to each page, listed as often as it gains owners.

        Raises:
            ValueError: a page is free, or the pool does not hand it out; nothing was changed.
        """
        pages = self._own(pages)
        self._check_in_use(pages, "retained")
        np.add.at(self._references, pages, 1)

    def release(self, pages) -> None:
        """Take one owner from each page, listed as often as it loses owners; a page without owner is free.

        Raises:
            ValueError: a page has fewer owners than that, or the pool does not hand it out; nothing was
                changed.
        """
        pages = self._own(pages)
        self._check_in_use(pages, "released")
        np.subtract.at(self._references, pages, 1)
        left = self._references[pages]
        if (left < 0).any():
            np.add.at(self._references, pages, 1)
            page = int(pages[left < 0][0])
            raise ValueError(
                f"pages: page {page} is released {int((pages == page).sum())} times, "
                f"but has {self.reference_count(page)} owners"
            )
        freed = np.unique(pages[left == 0])[::-1]
        self._free[self._num_free : self._num_free + len(freed)] = freed
        self._num_free += len(freed)

    def make_writable(self, page: int) -> int:
        """Return a page that only the caller owns, in exchange for one reference to `page`.

        It is `page` itself when nobody shares it. Otherwise it is a new page, and the caller copies the content:
        `cache.copy_pages([page], [new])`.

        Raises:
            PoolExhaustedError: the page is shared and none is free; nothing was changed.
            ValueError: the page is free, or the pool does not hand it out.
        """
        self._check_in_use(self._own(page), "made writable")
        if self.reference_count(page) == 1:
            return page
        (new,) = self.allocate(1)
        self.release(page)
        return int(new)

    def _own(self, pages) -> Int64[np.ndarray, "pages"]:
        pages = np.atleast_1d(np.asarray(pages))
        if pages.size == 0:
            return pages.astype(np.int64).reshape(-1)
        if not np.issubdtype(pages.dtype, np.integer):
            raise TypeError(f"pages: expected integers, got {pages.dtype}")
        foreign = (pages < RESERVED_PAGES) | (pages >= self.num_pages)
        if foreign.any():
            raise ValueError(
                f"pages: expected pages in [{RESERVED_PAGES}, {self.num_pages}), got {int(pages[foreign][0])}"
            )
        return pages.astype(np.int64).reshape(-1)

    def _check_in_use(self, pages: Int64[np.ndarray, "pages"], what: str) -> None:
        free = pages[self._references[pages] == 0]
        if free.size:
            raise ValueError(f"pages: page {int(free[0])} is free and cannot be {what}")
