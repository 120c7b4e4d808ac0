import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.index64 import as_index, as_integer, cdiv, index64, take_or_padding
from jaxattn.metadata import decode_metadata
from jaxattn.page_table import page_table_from_req_to_token

as_index64 = index64(as_index)
take = index64(jax.jit(take_or_padding))


@pytest.fixture(autouse=True, params=[False, True], ids=["x64_off", "x64_on"])
def x64(request):
    with jax.enable_x64(request.param):
        yield request.param


def test_products_of_indices_are_64_bit_under_any_flag():
    scaled = index64(jax.jit(lambda page: page * 4096))
    page = as_index64(np.int64(2**21), "page")
    for run in (scaled, jax.jit(scaled), jax.jit(lambda p: jax.vmap(scaled)(p[None])[0])):
        assert run(page).dtype == jnp.int64
        assert int(run(page)) == 2**33
    carried = jax.lax.scan(lambda carry, _: (scaled(carry), None), page, None, length=2)[0]
    assert int(carried) == 2**45


def test_the_flag_is_the_callers_again_after_an_error(x64):
    with pytest.raises(TypeError):
        as_index64(np.float32(1), "slots")
    assert jax.config.jax_enable_x64 == x64


@pytest.mark.parametrize("value", [2**33 + 1, [2**33 + 1], np.int64(2**33 + 1), np.array([2**33 + 1])])
def test_host_values_keep_their_bits(value):
    assert np.asarray(as_index64(value, "slots")).reshape(-1).tolist() == [2**33 + 1]


def test_small_dtypes_and_empty_lists_become_int64():
    for value in (np.int32(7), np.uint8(7), jnp.int32(7)):
        assert as_index64(value, "slots").dtype == jnp.int64
    assert as_index64([], "slots").dtype == jnp.int64


def test_wrong_dtypes_are_named():
    with pytest.raises(TypeError, match=r"slots: expected an integer dtype .* got float64"):
        as_index64(np.zeros(0), "slots")
    with pytest.raises(TypeError, match=r"slots: expected an integer dtype .* got bool"):
        as_index64(np.array([True]), "slots")
    with pytest.raises(OverflowError, match="slots: expected values within int64, got 9223372036854775808"):
        as_index64(np.array([2**63], np.uint64), "slots")


def test_as_integer_does_not_widen():
    table = np.zeros(3, np.int16)
    assert index64(as_integer)(table, "kv_indices") is table


def test_out_of_range_indices_give_padding_and_never_another_entry():
    table = jnp.arange(10, 20, dtype=jnp.int32)
    index = as_index64([3, 2**32 + 3, -1, 10, 9, -(2**32) + 3, 2**63 - 1], "index")
    assert take(table, index).tolist() == [13, -1, -1, -1, 19, -1, -1]
    assert take(table, index).dtype == jnp.int64
    assert take(table[:0], index).tolist() == [-1] * 7
    grid = table.reshape(2, 5)
    rows, columns = as_index64([[1], [2**32]], "rows"), as_index64([[0, 4, 5, 2**32]], "columns")
    assert take(grid, rows, columns).tolist() == [[15, 19, -1, -1], [-1] * 4]


def aligned_zeros(shape):
    """Zeros that JAX takes without a copy, so that pages which nobody touches cost no memory."""
    size = int(np.prod(shape))
    raw = np.zeros(size + 64, np.int8)
    start = -raw.ctypes.data % 64
    return raw[start : start + size].reshape(shape)


def test_a_pool_of_more_than_2_31_entries_is_addressed_right():
    """Row times width passes 2^31 and, in the last row, 2^32."""
    width, page_size = 2**20 + 16, 16
    pool = aligned_zeros((4097, width))
    wanted = {2047: 16, 2049: 48, 4096: 80}
    for row, slot in wanted.items():
        pool[row, :20] = np.arange(slot, slot + 20)
        pool[row, -16:] = np.arange(96, 112)
    rows, lengths = np.array([*wanted], np.int32), np.array([20, width, 20], np.int32)
    table = page_table_from_req_to_token(pool, rows, lengths, page_size=page_size)
    assert np.asarray(table)[:, :2].tolist() == [[1, 2], [3, -1], [5, 6]]
    assert np.asarray(table)[:, -1].tolist() == [0, 6, 0]
    step = decode_metadata(seqused_k=lengths, page_size=page_size, req_to_token=pool, req_pool_indices=rows)
    assert step.slots(3).tolist() == [35, 111, 99]


@pytest.mark.parametrize(("a", "b", "expected"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2)])
def test_cdiv_rounds_up(a, b, expected):
    assert cdiv(a, b) == expected
    assert cdiv(np.int64(a), b) == expected
