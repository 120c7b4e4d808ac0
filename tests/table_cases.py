"""Ragged batches of sequences over shuffled pages, and the two forms in which builders take them."""

import dataclasses

import numpy as np
from hypothesis import strategies as st

MAX_PAGES = 5
PAGE_SIZES = (1, 3, 16)
FIRST_PAGE = 2**33  # every page id is beyond 32 bits
GARBAGE = -(2**40)


@dataclasses.dataclass(frozen=True)
class Case:
    """`rows[s]` lists the slots of sequence s, `lengths[s]` of which are in use."""

    rows: list[np.ndarray]
    lengths: list[int]
    page_size: int
    first_page: int = FIRST_PAGE

    @property
    def capacity(self):
        return MAX_PAGES * self.page_size

    def ragged(self):
        """kv_indptr and kv_indices, the latter of one size for all cases of a shape, with slack."""
        indptr = np.cumsum([0, *(len(row) for row in self.rows)])
        indices = np.full(len(self.rows) * self.capacity + 7, GARBAGE, np.int64)
        indices[: indptr[-1]] = np.concatenate([*self.rows, np.zeros(0, np.int64)])
        return {"kv_indptr": indptr.astype(np.int64), "kv_indices": indices, "max_pages": MAX_PAGES}

    def pooled(self):
        """req_to_token and req_pool_indices, in a shuffled pool with garbage behind each row."""
        order = np.random.default_rng(len(self.rows)).permutation(len(self.rows) + 2)[: len(self.rows)]
        pool = np.full((len(self.rows) + 2, self.capacity), GARBAGE, np.int64)
        for index, row in zip(order, self.rows, strict=True):
            pool[index, : len(row)] = row
        return {"req_to_token": pool, "req_pool_indices": order.astype(np.int64), "max_pages": MAX_PAGES}

    def full_to_swa(self, rng):
        """A window pool that maps some of the pages; needs small page ids."""
        pages = np.concatenate([*self.rows, np.zeros(1, np.int64)]).max() // self.page_size + 1
        window_page = rng.permutation(pages)
        mapped = rng.random(pages) < 0.7
        slots = window_page[:, None] * self.page_size + np.arange(self.page_size)
        return np.append(np.where(mapped[:, None], slots, -1).reshape(-1), -1)


def make_case(seed, lengths, page_size, *, listed=None, holes=False, first_page=FIRST_PAGE):
    """Give each sequence shuffled pages of its own and list `listed` slots (its length, by default)."""
    rng = np.random.default_rng(seed)
    listed = lengths if listed is None else listed
    pages = first_page + rng.permutation(len(lengths) * MAX_PAGES + 1)
    rows = []
    for s, count in enumerate(listed):
        own = pages[s * MAX_PAGES : (s + 1) * MAX_PAGES]
        row = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)[:count]
        if holes:
            row = np.where(rng.random(count) < 0.2, -1, row)
        rows.append(row.astype(np.int64))
    return Case(rows, list(lengths), page_size, first_page)


@st.composite
def cases(draw, *, least=0, spare=0, holes=True, first_page=FIRST_PAGE, num_seqs=(0, 1, 4)):
    """Draw a batch whose sequences have `least` to capacity - `spare` tokens, page boundaries made likely."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    most = MAX_PAGES * page_size - spare
    boundaries = [n for n in (0, 1, page_size, 2 * page_size, most) if least <= n <= most]
    length = st.one_of(st.integers(least, most), st.sampled_from(boundaries or [most]))
    count = draw(st.sampled_from(num_seqs))
    lengths = draw(st.lists(length, min_size=count, max_size=count))
    with_holes = holes and draw(st.booleans())
    return make_case(
        draw(st.integers(0, 2**32 - 1)),
        lengths,
        page_size,
        listed=[n + spare for n in lengths],
        holes=with_holes,
        first_page=first_page,
    )
