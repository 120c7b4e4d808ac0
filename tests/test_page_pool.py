import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.errors import PoolExhaustedError
from jaxattn.page_pool import PagePool


def test_page_zero_is_never_handed_out():
    assert sorted(PagePool(6).allocate(5)) == [1, 2, 3, 4, 5]


def test_exhaustion_says_what_was_asked_and_loses_nothing():
    pool = PagePool(8)
    held = pool.allocate(3)
    with pytest.raises(PoolExhaustedError, match="asked for 5 pages, but only 4 of 7 are free"):
        pool.allocate(5)
    assert pool.num_free == 4
    assert set(pool.allocate(4)) == set(range(1, 8)) - set(held)


def test_a_shared_page_is_free_when_its_last_owner_releases_it():
    pool = PagePool(4)
    pages = pool.allocate(2)
    pool.retain(pages)
    pool.release(pages)
    assert [pool.reference_count(page) for page in pages] == [1, 1]
    assert pool.num_free == 1
    pool.release(pages)
    assert [pool.reference_count(page) for page in pages] == [0, 0]
    assert pool.num_free == 3


def test_double_release_is_an_error_that_changes_nothing():
    pool = PagePool(4)
    first, second = pool.allocate(2)
    pool.release([first])
    with pytest.raises(ValueError, match=f"page {first} is free and cannot be released"):
        pool.release([second, first])
    assert pool.reference_count(second) == 1
    with pytest.raises(ValueError, match=f"page {second} is released 2 times, but has 1 owners"):
        pool.release([second, second])
    assert pool.reference_count(second) == 1
    assert pool.num_free == 2


def test_one_call_can_release_several_owners_of_a_page():
    pool = PagePool(3)
    (page,) = pool.allocate(1)
    pool.retain([page, page])
    pool.release([page, page, page])
    assert pool.num_free == 2
    assert sorted(pool.allocate(2)) == [1, 2]


@pytest.mark.parametrize("page", [-1, 0, 4, 2**40])
@pytest.mark.parametrize("method", ["release", "retain", "make_writable", "reference_count"])
def test_a_page_that_the_pool_does_not_hand_out_is_refused(method, page):
    with pytest.raises(ValueError, match=rf"expected pages in \[1, 4\), got {page}"):
        getattr(PagePool(4), method)(page)


@pytest.mark.parametrize("method", ["release", "retain", "make_writable"])
def test_a_free_page_is_refused(method):
    with pytest.raises(ValueError, match="page 2 is free"):
        getattr(PagePool(4), method)(2)


def test_pages_that_are_not_integers_are_refused():
    with pytest.raises(TypeError, match="expected integers, got float64"):
        PagePool(4).release([1.0])


def test_make_writable_copies_only_a_shared_page():
    pool = PagePool(4)
    (page,) = map(int, pool.allocate(1))
    assert pool.make_writable(page) == page
    pool.retain(page)
    new = pool.make_writable(page)
    assert new != page
    assert (pool.reference_count(page), pool.reference_count(new), pool.num_free) == (1, 1, 1)


def test_make_writable_of_a_shared_page_in_a_full_pool_changes_nothing():
    pool = PagePool(2)
    (page,) = map(int, pool.allocate(1))
    pool.retain(page)
    with pytest.raises(PoolExhaustedError, match="asked for 1 pages, but only 0 of 1 are free"):
        pool.make_writable(page)
    assert pool.reference_count(page) == 2


def test_empty_lists_and_bad_sizes():
    pool = PagePool(2)
    pool.release([])
    pool.retain(np.zeros(0, np.int64))
    assert pool.allocate(0).shape == (0,)
    assert pool.allocate(0).dtype == np.int64
    with pytest.raises(ValueError, match="expected a number of pages, got -1"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="expected at least 2, page 0 being reserved, got 1"):
        PagePool(1)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["allocate", "retain", "release"]), st.integers(0, 7)), max_size=40)
)
def test_counts_follow_a_plain_dictionary(actions):
    pool, owners = PagePool(9), {}
    for action, number in actions:
        if action == "allocate":
            free = 8 - len(owners)
            if number > free:
                with pytest.raises(PoolExhaustedError):
                    pool.allocate(number)
                continue
            pages = pool.allocate(number).tolist()
            assert len(set(pages)) == number
            assert not set(pages) & set(owners)
            owners |= dict.fromkeys(pages, 1)
        elif owners:
            page = sorted(owners)[number % len(owners)]
            getattr(pool, action)([page])
            owners[page] += 1 if action == "retain" else -1
            owners = {page: count for page, count in owners.items() if count}
        assert pool.num_free == 8 - len(owners)
        assert all(pool.reference_count(page) == owners.get(page, 0) for page in range(1, 9))
