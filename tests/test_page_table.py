import jax
import jax.numpy as jnp
import loops
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from table_cases import MAX_PAGES, cases, make_case

from jaxattn.debug import checked
from jaxattn.page_table import (
    last_page_length,
    page_aligned,
    page_count,
    page_table_from_ragged,
    page_table_from_req_to_token,
    view_pages,
)

few = settings(max_examples=30, deadline=None)


def both_forms(case, lengths=None, **options):
    lengths = np.array(case.lengths if lengths is None else lengths, np.int64)
    ragged, pooled = case.ragged(), case.pooled()
    page_size = case.page_size
    return (
        page_table_from_ragged(**ragged, page_size=page_size, **options),
        page_table_from_req_to_token(**pooled, lengths=lengths, page_size=page_size, **options),
    )


@few
@given(case=cases(), x64=st.booleans())
def test_tables_equal_the_loop(case, x64):
    with jax.enable_x64(x64):
        tables = both_forms(case)
    expected = loops.page_table(case.rows, case.lengths, case.page_size, MAX_PAGES)
    for table in tables:
        assert table.dtype == jnp.int64
        np.testing.assert_array_equal(np.asarray(table), expected)


@few
@given(case=cases(first_page=0), seed=st.integers(0, 2**32 - 1), x64=st.booleans())
def test_window_tables_equal_the_loop(case, seed, x64):
    full_to_swa = case.full_to_swa(np.random.default_rng(seed))
    slots = np.full(MAX_PAGES * 16 * 21 + 1, -1, np.int64)  # one size for all cases
    slots[: len(full_to_swa)] = full_to_swa
    with jax.enable_x64(x64):
        tables = both_forms(case, full_to_swa=slots)
    rows = loops.translate(case.rows, full_to_swa)
    expected = loops.page_table(rows, case.lengths, case.page_size, MAX_PAGES)
    for table in tables:
        np.testing.assert_array_equal(np.asarray(table), expected)


@few
@given(case=cases(num_seqs=(4,)), data=st.data())
def test_unaligned_rows_are_found_and_never_aliased(case, data):
    """Draft branches behind a shared prefix: the branch's slots start in the middle of another page."""
    page_size = case.page_size
    rows = []
    for row in case.rows:
        cut = data.draw(st.integers(0, len(row)))
        shift = data.draw(st.integers(0, 2 * page_size))
        rows.append(np.where((np.arange(len(row)) >= cut) & (row >= 0), row + shift, row))
    case = type(case)(rows, case.lengths, page_size)
    expected = loops.page_table(rows, case.lengths, page_size, MAX_PAGES)
    for table in both_forms(case):
        np.testing.assert_array_equal(np.asarray(table), expected)
    lengths = np.array(case.lengths, np.int64)
    aligned = [loops.is_aligned(row, n, page_size) for row, n in zip(rows, case.lengths, strict=True)]
    for form in (case.ragged(), case.pooled()):
        np.testing.assert_array_equal(page_aligned(lengths, page_size=page_size, **form), aligned)


def test_a_row_of_tokens_expresses_what_no_row_of_pages_can():
    """Two branches share the partly filled page 2: with topk > 1 and pages of 4 only slots express that."""
    prefix = [8, 9]
    kv_indices = np.array([*prefix, 16, 17, *prefix, 20, 21])
    kv_indptr = np.array([0, 4, 8])
    pages = page_table_from_ragged(kv_indptr, kv_indices, page_size=4, max_pages=1)
    assert pages.tolist() == [[-1], [-1]]  # neither page 2 nor page 4 or 5 alone would be right
    slots = page_table_from_ragged(kv_indptr, kv_indices, page_size=1, max_pages=4)
    assert slots.tolist() == [[8, 9, 16, 17], [8, 9, 20, 21]]
    cache = jnp.arange(6 * 4 * 3.0).reshape(6, 4, 1, 3)
    seen = view_pages(cache, 1)[np.asarray(slots)][:, :, 0]
    expected = [[cache[slot // 4, slot % 4] for slot in row] for row in slots.tolist()]
    np.testing.assert_array_equal(seen, np.array(expected))


def test_view_pages_keeps_slots_and_refuses_what_does_not_divide():
    cache = jnp.arange(12.0).reshape(2, 6, 1, 1)
    np.testing.assert_array_equal(view_pages(cache, 3).reshape(-1), cache.reshape(-1))
    assert view_pages(cache, 3).shape == (4, 3, 1, 1)
    with pytest.raises(ValueError, match="divisor of the cache's page size 6, got 4"):
        view_pages(cache, 4)


@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("num_seqs", [0, 4])
def test_donated_dirty_destination_is_reused_and_overwritten(x64, num_seqs):
    case = make_case(3, [33, 0, 5, 80][:num_seqs], 16)
    expected = loops.page_table(case.rows, case.lengths, 16, MAX_PAGES)
    forms = (
        lambda out: page_table_from_ragged(**case.ragged(), page_size=16, out=out),
        lambda out: page_table_from_req_to_token(
            **case.pooled(), lengths=np.array(case.lengths, np.int64), page_size=16, out=out
        ),
    )
    for build in forms:
        with jax.enable_x64(True):
            dirty = jnp.full((num_seqs, MAX_PAGES), 77, jnp.int64)
        pointer = dirty.unsafe_buffer_pointer()
        with jax.enable_x64(x64):
            table = build(dirty)
        assert dirty.is_deleted()
        if num_seqs:
            assert table.unsafe_buffer_pointer() == pointer
        np.testing.assert_array_equal(np.asarray(table), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.int16, np.int32, np.uint32, np.uint64])
def test_every_integer_dtype_is_widened(dtype):
    case = make_case(1, [16, 7, 0, 3], 3, listed=[15, 7, 0, 3], first_page=0)
    case = type(case)(case.rows, [15, 7, 0, 3], 3)
    expected = loops.page_table(case.rows, case.lengths, 3, MAX_PAGES)
    ragged, pooled = case.ragged(), case.pooled()
    cast = {
        name: np.maximum(array, 0).astype(dtype)
        for name, array in {**ragged, **pooled}.items()
        if name != "max_pages"
    }
    table = page_table_from_ragged(cast["kv_indptr"], cast["kv_indices"], page_size=3, max_pages=MAX_PAGES)
    np.testing.assert_array_equal(np.asarray(table), expected)
    table = page_table_from_req_to_token(
        cast["req_to_token"], cast["req_pool_indices"], np.array(case.lengths, dtype), page_size=3
    )
    assert table.dtype == jnp.int64
    np.testing.assert_array_equal(np.asarray(table), expected)


def test_builders_work_under_jit_scan_and_vmap_with_x64_off():
    case = make_case(5, [16, 40, 1, 64], 16, listed=[80] * 4)
    pooled = case.pooled()
    with jax.enable_x64(True):
        pool, indices = jnp.asarray(pooled["req_to_token"]), jnp.asarray(pooled["req_pool_indices"])
        lengths = jnp.asarray(np.array([case.lengths, [1, 2, 3, 4]], np.int64))
        kv_indptr, kv_indices = (jnp.asarray(case.ragged()[name]) for name in ("kv_indptr", "kv_indices"))

    def build(length):
        return page_table_from_req_to_token(pool, indices, length, page_size=16)

    expected = [loops.page_table(case.rows, n, 16, MAX_PAGES) for n in lengths.tolist()]
    for tables in (
        jax.jit(jax.vmap(build))(lengths),
        jax.lax.scan(lambda carry, n: (carry, build(n)), 0, lengths)[1],
        jax.jit(jax.vmap(lambda n: jax.lax.scan(lambda c, _: (c, build(n)), 0, None, length=1)[1][0]))(
            lengths
        ),
    ):
        assert tables.dtype == jnp.int64
        np.testing.assert_array_equal(np.asarray(tables), expected)
    doubled = jax.vmap(lambda p, i: page_table_from_ragged(p, i, page_size=16, max_pages=MAX_PAGES))(
        jnp.stack([kv_indptr, kv_indptr]), jnp.stack([kv_indices, kv_indices])
    )
    for table in doubled:
        np.testing.assert_array_equal(np.asarray(table), loops.page_table(case.rows, [80] * 4, 16, MAX_PAGES))


def test_outer_jit_donates_the_destination():
    case = make_case(7, [33, 0, 5, 80], 16)
    ragged = case.ragged()
    step = jax.jit(lambda out: page_table_from_ragged(**ragged, page_size=16, out=out), donate_argnums=0)
    with jax.enable_x64(True):
        dirty = jnp.full((4, MAX_PAGES), 77, jnp.int64)
        table = step(dirty)
    np.testing.assert_array_equal(np.asarray(table), loops.page_table(case.rows, case.lengths, 16, MAX_PAGES))


def test_a_row_that_does_not_fit_is_refused_whole():
    case = make_case(2, [33, 80, 5, 16], 16)
    ragged = case.ragged()
    ragged["max_pages"] = 2
    table = page_table_from_ragged(**ragged, page_size=16)
    expected = loops.page_table(case.rows, case.lengths, 16, 2)
    np.testing.assert_array_equal(np.asarray(table), expected)
    assert (expected[0] == -1).all()
    assert (expected[2] >= 0).all()


def error_of(build):
    try:
        checked(build)()
    except ValueError as error:
        return str(error)
    return ""


def test_checked_mode_names_the_sequence():
    case = make_case(2, [16, 80, 33, 5], 16)
    ragged, pooled = case.ragged(), case.pooled()
    good = {"page_size": 16, **ragged}
    assert error_of(lambda: page_table_from_ragged(**good)) == ""
    assert "sequence 1 needs more pages of 16 than the 4" in error_of(
        lambda: page_table_from_ragged(**{**good, "max_pages": 4})
    )
    short = ragged["kv_indices"][:100]
    assert "sequence 2 lists fewer slots" in error_of(
        lambda: page_table_from_ragged(**{**good, "kv_indices": short})
    )
    beyond = np.array([0, 1, 6, 2], np.int64)
    assert "sequence 2 lists fewer slots" in error_of(
        lambda: page_table_from_req_to_token(
            pooled["req_to_token"], beyond, np.array([1, 1, 1, 1]), page_size=16
        )
    )
    moved = ragged["kv_indices"].copy()
    moved[100:] += 1
    assert "sequence 2 is not aligned to pages of 16" in error_of(
        lambda: page_table_from_ragged(**{**good, "kv_indices": moved})
    )
    assert error_of(lambda: page_table_from_ragged(**{**good, "page_size": 1, "max_pages": 80})) == ""


def test_checked_mode_looks_at_every_slot():
    """Two slots swapped inside a page: its first and last slot alone would look right."""
    swapped = np.array([4, 6, 5, 7])
    error = error_of(lambda: page_table_from_ragged(np.array([0, 4]), swapped, page_size=4, max_pages=1))
    assert "sequence 0 is not aligned" in error


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"page_size": 0}, ValueError, "page_size: expected at least 1, got 0"),
        ({"max_pages": -1}, ValueError, "max_pages: expected at least 0, got -1"),
        ({"kv_indptr": np.zeros((2, 2), np.int64)}, ValueError, r"kv_indptr: expected shape \[S\+1\]"),
        ({"kv_indptr": np.zeros(0, np.int64)}, ValueError, r"kv_indptr: expected shape \[S\+1\], got \[0\]"),
        ({"kv_indices": np.zeros((2, 2), np.int64)}, ValueError, r"kv_indices: expected shape \[nnz\]"),
        ({"kv_indices": np.zeros(3, np.float32)}, TypeError, "kv_indices: expected an integer dtype"),
        ({"kv_indptr": np.zeros(2, np.float32)}, TypeError, "kv_indptr: expected an integer dtype"),
        ({"full_to_swa": np.zeros(2, np.float32)}, TypeError, "full_to_swa: expected an integer dtype"),
        ({"out": np.zeros((1, 3), np.int64)}, ValueError, r"out: expected shape \[S, M\] = \[1, 2\]"),
        ({"out": np.zeros((1, 2), np.int32)}, TypeError, "out: expected an int64 array, got int32"),
    ],
)
def test_bad_arguments_are_named(change, error, text):
    good = {"kv_indptr": np.array([0, 3]), "kv_indices": np.array([4, 5, 6]), "page_size": 4, "max_pages": 2}
    with pytest.raises(error, match=text):
        page_table_from_ragged(**{**good, **change})


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"req_to_token": np.zeros(3, np.int64)}, r"req_to_token: expected shape \[R, C\]"),
        ({"req_pool_indices": np.zeros((1, 1), np.int64)}, r"req_pool_indices: expected shape \[S\]"),
        ({"lengths": np.zeros(2, np.int64)}, r"lengths: expected shape \[S\] = \[1\], got \[2\]"),
        ({"max_pages": 1}, r"at least 2 pages of 4 for the 6 slots .* pass req_to_token\[:, :4\]"),
    ],
)
def test_bad_pools_are_named(change, text):
    good = {
        "req_to_token": np.zeros((2, 6), np.int64),
        "req_pool_indices": np.array([1]),
        "lengths": np.array([5]),
    }
    with pytest.raises(ValueError, match=text):
        page_table_from_req_to_token(**{**good, **change}, page_size=4)


@pytest.mark.parametrize("page_size", [1, 3, 16])
def test_page_counts_and_last_pages_equal_the_loop(page_size):
    lengths = np.arange(-1, 4 * page_size + 2)
    pages, tails = [], []
    for length in lengths:
        page = tail = 0
        for _ in range(length):
            tail = tail % page_size + 1
            page += tail == 1
        pages.append(page)
        tails.append(tail)
    np.testing.assert_array_equal(page_count(lengths, page_size), pages)
    np.testing.assert_array_equal(last_page_length(lengths, page_size), tails)
    assert page_count(2**40 + 1, 16) == 2**36 + 1
