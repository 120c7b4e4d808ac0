"""The page-table kernels against the XLA builders, bit for bit."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import table_cases

from jaxattn import page_table
from jaxattn.index64 import index64
from jaxattn.slot_rows import slot_rows
from jaxattn.window_pool import WindowRows

LENGTHS = {1: [5, 0, 4, 1], 3: [15, 0, 7, 13], 16: [17, 0, 16, 80]}


@index64
def both_tables(kernels, lists, lengths, page_size, full_to_swa=None):
    lists = dict(lists)
    max_pages = lists.pop("max_pages")
    rows, lengths = slot_rows(**lists), jnp.asarray(np.array(lengths, np.int64))
    window = None if full_to_swa is None else jnp.asarray(full_to_swa)
    build = importlib.import_module(f"jaxattn.kernels.{kernels}.page_table").build_page_tables
    actual = jax.jit(build, static_argnums=(2, 3))(rows, lengths, page_size, max_pages, window)
    expected = [page_table.build_page_table(rows, lengths, page_size, max_pages)]
    if window is not None:
        expected.append(page_table.build_page_table(WindowRows(rows, window), lengths, page_size, max_pages))
    return [np.asarray(t) for t in actual if t is not None], [np.asarray(t) for t in expected]


@pytest.mark.parametrize("form", ["ragged", "pooled"])
@pytest.mark.parametrize("page_size", LENGTHS)
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
def test_tables_beyond_32_bits_equal_the_xla_builder(kernels, form, page_size, holes):
    lengths = LENGTHS[page_size]
    case = table_cases.make_case(3, lengths, page_size, holes=holes)
    actual, expected = both_tables(kernels, getattr(case, form)(), lengths, page_size)
    assert np.array_equal(actual[0], expected[0])


@pytest.mark.parametrize("form", ["ragged", "pooled"])
@pytest.mark.parametrize("page_size", LENGTHS)
def test_the_window_table_of_the_same_launch_equals_the_xla_builder(kernels, form, page_size):
    lengths = LENGTHS[page_size]
    case = table_cases.make_case(5, lengths, page_size, first_page=0)
    window = case.full_to_swa(np.random.default_rng(1))
    actual, expected = both_tables(kernels, getattr(case, form)(), lengths, page_size, window)
    assert len(actual) == 2
    for a, b in zip(actual, expected, strict=True):
        assert np.array_equal(a, b)


def test_p12_a_row_with_more_pages_than_columns_and_one_that_lists_too_little(kernels):
    case = table_cases.make_case(2, [80, 33, 16], 16, listed=[80, 20, 16])
    lists = dict(case.ragged(), max_pages=3)
    actual, expected = both_tables(kernels, lists, [80, 33, 16], 16)
    assert np.array_equal(actual[0], expected[0])
    assert (actual[0][0] == -1).all()


def test_a_padding_row_of_the_pool_and_a_pool_row_outside_it(kernels):
    case = table_cases.make_case(2, [16, 16, 16], 16)
    lists = case.pooled()
    lists["req_pool_indices"] = np.array([-1, 10**6, lists["req_pool_indices"][2]])
    actual, expected = both_tables(kernels, lists, [0, 16, 16], 16)
    assert np.array_equal(actual[0], expected[0])
