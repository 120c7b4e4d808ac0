"""The scatter kernels against the XLA builders, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
import table_cases

pytest.importorskip("triton")

from jaxattn import page_table
from jaxattn.index64 import index64
from jaxattn.kernels.triton import cache_write
from jaxattn.kernels.triton import page_table as triton_table
from jaxattn.kv_cache import write_kv
from jaxattn.slot_rows import slot_rows
from jaxattn.window_pool import WindowRows

LENGTHS = {1: [5, 0, 4, 1], 3: [15, 0, 7, 13], 16: [17, 0, 16, 80]}


@index64
def both_tables(lists, lengths, page_size, full_to_swa=None):
    lists = dict(lists)
    max_pages = lists.pop("max_pages")
    rows, lengths = slot_rows(**lists), jnp.asarray(np.array(lengths, np.int64))
    window = None if full_to_swa is None else jnp.asarray(full_to_swa)
    actual = jax.jit(triton_table.build_page_tables, static_argnums=(2, 3))(
        rows, lengths, page_size, max_pages, window
    )
    expected = [page_table.build_page_table(rows, lengths, page_size, max_pages)]
    if window is not None:
        expected.append(page_table.build_page_table(WindowRows(rows, window), lengths, page_size, max_pages))
    return [np.asarray(t) for t in actual if t is not None], [np.asarray(t) for t in expected]


@pytest.mark.parametrize("form", ["ragged", "pooled"])
@pytest.mark.parametrize("page_size", LENGTHS)
@pytest.mark.parametrize("holes", [False, True], ids=["whole", "holes"])
def test_tables_beyond_32_bits_equal_the_xla_builder(form, page_size, holes):
    lengths = LENGTHS[page_size]
    case = table_cases.make_case(3, lengths, page_size, holes=holes)
    actual, expected = both_tables(getattr(case, form)(), lengths, page_size)
    assert np.array_equal(actual[0], expected[0])


@pytest.mark.parametrize("form", ["ragged", "pooled"])
@pytest.mark.parametrize("page_size", LENGTHS)
def test_the_window_table_of_the_same_launch_equals_the_xla_builder(form, page_size):
    lengths = LENGTHS[page_size]
    case = table_cases.make_case(5, lengths, page_size, first_page=0)
    window = case.full_to_swa(np.random.default_rng(1))
    actual, expected = both_tables(getattr(case, form)(), lengths, page_size, window)
    assert len(actual) == 2
    for a, b in zip(actual, expected, strict=True):
        assert np.array_equal(a, b)


def test_p12_a_row_with_more_pages_than_columns_and_one_that_lists_too_little():
    case = table_cases.make_case(2, [80, 33, 16], 16, listed=[80, 20, 16])
    lists = dict(case.ragged(), max_pages=3)
    actual, expected = both_tables(lists, [80, 33, 16], 16)
    assert np.array_equal(actual[0], expected[0])
    assert (actual[0][0] == -1).all()


def test_a_padding_row_of_the_pool_and_a_pool_row_outside_it():
    case = table_cases.make_case(2, [16, 16, 16], 16)
    lists = case.pooled()
    lists["req_pool_indices"] = np.array([-1, 10**6, lists["req_pool_indices"][2]])
    actual, expected = both_tables(lists, [0, 16, 16], 16)
    assert np.array_equal(actual[0], expected[0])


def hostile_values(rng, shape):
    values = rng.normal(size=shape).astype(np.float32) * np.exp2(rng.integers(-20, 12, size=shape)).astype(
        np.float32
    )
    special = np.array(
        [448, 464, 465, 1000, -1000, 240, 248, 57344, 1e30, 0, -0.0, 2.5, 3.5, np.inf, -np.inf, np.nan]
    )
    values.reshape(-1)[: len(special)] = special
    return values


@index64
def both_writes(cache_dtype, dtype, descales):
    rng = np.random.default_rng(0)
    pages, page_size, heads, width, v_width, tokens = 5, 4, 3, 24, 10, 9
    k_cache = jnp.asarray(rng.normal(size=(pages, page_size, heads, width)).astype(np.float32)).astype(
        cache_dtype
    )
    v_cache = jnp.asarray(rng.normal(size=(pages, page_size, heads, v_width)).astype(np.float32)).astype(
        cache_dtype
    )
    k, v = (jnp.asarray(hostile_values(rng, (tokens, heads, w))).astype(dtype) for w in (width, v_width))
    slots = jnp.asarray(np.array([3, -1, 19, 0, 20, 7, 10**12, -5, 8], np.int64))
    scale = jnp.asarray(np.array([0.5, 1.7, 3.0], np.float32)) if descales else None
    assert cache_write.supports(k_cache, v_cache, k, v) is None
    actual = jax.jit(cache_write.write_kv)(k_cache, v_cache, k, v, slots, scale, scale)
    expected = write_kv(k_cache, v_cache, k, v, slots, k_descale=scale, v_descale=scale)
    return actual, expected, (k_cache, v_cache)


def bits(array):
    values = np.asarray(array)
    nan = np.isnan(values.astype(np.float32))
    return np.where(nan, 0, values.view(f"uint{8 * values.dtype.itemsize}")), nan


@pytest.mark.parametrize("descales", [False, True], ids=["plain", "descaled"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    "cache_dtype",
    [
        "float32",
        "bfloat16",
        "float16",
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "int8",
    ],
)
def test_writes_equal_the_xla_write_bit_for_bit(cache_dtype, dtype, descales):
    actual, expected, before = both_writes(jnp.dtype(cache_dtype), jnp.dtype(dtype), descales)
    for new, right, old in zip(actual, expected, before, strict=True):
        for a, b in zip(bits(new), bits(right), strict=True):
            assert np.array_equal(a, b)
        untouched = np.ones(20, bool)
        untouched[[3, 19, 0, 7, 8]] = False
        for a, b in zip(bits(new), bits(old), strict=True):
            assert np.array_equal(a.reshape(20, -1)[untouched], b.reshape(20, -1)[untouched])


@index64
def test_p41_every_value_of_a_small_format_survives_a_write():
    for name in ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"):
        stored = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name))
        rows = jnp.asarray(stored.astype(np.float32)).reshape(16, 1, 16)
        empty = jnp.zeros((4, 4, 1, 16), name)
        written, _ = cache_write.write_kv(
            empty, empty, rows, rows, jnp.arange(16, dtype=jnp.int64), None, None
        )
        finite = np.isfinite(stored.astype(np.float32))
        assert np.array_equal(np.asarray(written).reshape(-1)[finite], stored[finite])


@index64
def test_p59_a_donated_cache_is_written_in_place():
    cache = jnp.zeros((64, 16, 2, 32), jnp.bfloat16)
    other = jnp.zeros((64, 16, 2, 32), jnp.bfloat16)
    rows = jnp.ones((2, 2, 32), jnp.bfloat16)
    address = cache.unsafe_buffer_pointer()
    write = jax.jit(cache_write.write_kv, donate_argnums=(0, 1))
    k_cache, _ = write(cache, other, rows, rows, jnp.asarray([5, -1], jnp.int64), None, None)
    assert k_cache.unsafe_buffer_pointer() == address
    assert float(k_cache.astype(jnp.float32).sum()) == 64
