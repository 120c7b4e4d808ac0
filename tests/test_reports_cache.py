"""Public bug reports about writing and reading the cache, by their numbers."""

import functools
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import oracle
import pytest

from jaxattn.attention import unified_attention
from jaxattn.debug import check_metadata
from jaxattn.kv_cache import PagedKVCache, write_kv
from jaxattn.metadata import decode_metadata, target_verify_metadata

RNG = np.random.default_rng(0)


def normal(*shape):
    return jnp.asarray(RNG.normal(size=shape), jnp.float32)


def bits(array):
    array = np.asarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def decode(lengths, rows, page_size):
    return decode_metadata(
        seqused_k=np.array(lengths),
        page_size=page_size,
        req_to_token=np.array(rows),
        req_pool_indices=np.arange(len(rows)),
    )


@pytest.mark.parametrize("dummy_slot", [0, -1])
def test_p07_content_of_the_dummy_slot_never_matters(dummy_slot):
    page_size, real = 4, np.array([21, 38, 63])
    k, v, q = normal(8, 2, 16), normal(8, 2, 16), normal(3, 4, 16)
    # One token each in pages 5, 9 and 15, at the offset that its length says; the tail is the dummy page.
    rows = [[20, 21, 0, 0, 0, 0, 0, 0], [36, 37, 38, 0, 0, 0, 0, 0], [60, 61, 62, 63, 0, 0, 0, 0]]
    metadata = decode([2, 3, 4], rows, page_size)
    before = normal(16, page_size, 2, 16)

    def attend(tokens, slots):
        k_cache, v_cache = write_kv(before, before, k[:tokens], v[:tokens], jnp.asarray(slots))
        return np.asarray(unified_attention(q, k_cache, v_cache, metadata))

    want = attend(3, real)
    k, v = (rows.at[3:].set(jnp.nan) for rows in (k, v))
    np.testing.assert_array_equal(attend(8, [*real, *[dummy_slot] * 5]), want)
    assert np.isfinite(want).all()


def test_p13_padding_slot_writes_nothing():
    before = normal(3, 4, 2, 8)
    k, v = normal(3, 2, 8), normal(3, 2, 8)
    after = write_kv(before, -before, k, v, jnp.array([-1, 7, -1]))
    for cache, rows, written in zip((before, -before), (k, v), after, strict=True):
        want = np.array(cache)
        want[1, 3] = rows[1]
        np.testing.assert_array_equal(bits(written), bits(want))


@pytest.mark.parametrize("slot", [9 * 4 + 1, 8 * 4, -2, -33, 2**31 - 1, -(2**31)])
def test_p14_write_outside_the_pool_is_dropped(slot):
    before = normal(8, 4, 2, 8)
    after = write_kv(before, -before, normal(1, 2, 8), normal(1, 2, 8), jnp.array([slot]))
    np.testing.assert_array_equal(bits(after[0]), bits(before))
    np.testing.assert_array_equal(bits(after[1]), bits(-before))


def test_p14_read_of_a_page_outside_the_pool_is_masked_and_refused_when_checked():
    k_cache, v_cache, q = normal(8, 4, 2, 16), normal(8, 4, 2, 16), normal(1, 4, 16)
    metadata = decode([7], [[12, 13, 14, 15, 36, 37, 38, 39]], 4)
    assert np.asarray(metadata.page_table).tolist() == [[3, 9]]
    out = unified_attention(q, k_cache, v_cache, metadata)
    only_page_3 = oracle.attention(
        np.asarray(q), np.asarray(k_cache), np.asarray(v_cache), np.array([[3]]), [0, 1], [4]
    )[0]
    np.testing.assert_allclose(out, only_page_3, atol=1e-5)
    with pytest.raises(ValueError, match=r"page_table: sequence 0, page 1 .*\[0, 8\), got 9"):
        check_metadata(metadata, k_cache.shape)


def indexing(jaxpr, size):
    """The shapes, and the index dtypes, with which a program indexes arrays of a number of elements."""
    found = set()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("gather", "scatter", "dynamic_slice", "dynamic_update_slice"):
            operand, *others = (variable.aval for variable in equation.invars)
            if operand.size == size:
                dtypes = {str(aval.dtype) for aval in others if aval.dtype in (jnp.int32, jnp.int64)}
                found |= {(operand.shape, dtype) for dtype in dtypes}
        for value in jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "eqns")):
            inner = getattr(value, "jaxpr", value)
            if hasattr(inner, "eqns"):
                found |= indexing(inner, size)
    return found


@pytest.mark.parametrize("dtype", ["float32", "int8"])
@pytest.mark.parametrize(
    ("shape", "index_dtype"), [((7800, 480, 1, 576), "int32"), ((2**32 + 5, 1, 1, 8), "int64")]
)
def test_p30_pages_are_indexed_on_an_axis_of_their_own_by_a_dtype_that_holds_them(dtype, shape, index_dtype):
    """The variant without memory: pools beyond 2^31 elements, or pages, are traced and never made."""
    _, page_size, _, width = shape
    pool = jax.ShapeDtypeStruct(shape, dtype)
    new = jax.ShapeDtypeStruct((2, 1, width), jnp.float32)
    lengths = jax.ShapeDtypeStruct((2,), jnp.int32)
    table = jax.ShapeDtypeStruct((2, 2 * page_size), jnp.int32)

    def step(k_cache, v_cache, new, lengths, table):
        metadata = decode_metadata(
            seqused_k=lengths, page_size=page_size, req_to_token=table, req_pool_indices=jnp.arange(2)
        )
        k_cache, v_cache = write_kv(k_cache, v_cache, new, new, metadata.slots(2))
        return unified_attention(new, k_cache, v_cache, metadata)

    jaxpr = jax.make_jaxpr(step)(pool, pool, new, lengths, table).jaxpr
    assert indexing(jaxpr, math.prod(shape)) == {(shape, index_dtype)}


@pytest.mark.parametrize(("dtype", "value"), [("float8_e4m3fn", 1.0), ("float8_e4m3fnuz", 0.5)])
def test_p40_the_dtype_of_the_array_decides_what_a_byte_means(dtype, value):
    stored = jnp.asarray(np.full((2, 4, 1, 16), 0x38, np.uint8).view(dtype))
    cache = PagedKVCache(k=(stored,), v=(stored,), k_descale=(None,), v_descale=(None,))
    k, v = cache.gather(0, jnp.array([5]))
    np.testing.assert_array_equal(k, np.full((1, 1, 16), value))
    np.testing.assert_array_equal(v, np.full((1, 1, 16), value))
    out = unified_attention(normal(1, 1, 16), stored, stored, decode([3], [[4, 5, 6, 7]], 4))
    np.testing.assert_allclose(out, np.full((1, 1, 16), value), rtol=1e-6)


@pytest.mark.parametrize(
    ("dtype", "stored"),
    [
        ("float8_e4m3fn", [448, 448, 448, 448, -448]),
        ("float8_e4m3fnuz", [240, 240, 240, 240, -240]),
        ("int8", [127, 127, 127, 127, -128]),
        ("float16", [448, 464, 465, 1000, -1000]),
    ],
)
def test_p41_a_write_saturates(dtype, stored):
    values = jnp.array([448.0, 464, 465, 1000, -1000]).reshape(5, 1, 1)
    empty = jnp.zeros((2, 4, 1, 1), dtype)
    for cache in write_kv(empty, empty, values, values, jnp.arange(5), k_descale=1.0, v_descale=1.0):
        assert cache.astype(jnp.float32).reshape(-1)[:5].tolist() == stored


@pytest.mark.parametrize("q_dtype", ["float8_e4m3fn", "bfloat16"])
def test_p42_the_writer_divides_by_the_descales_that_attention_multiplies_by(q_dtype):
    cache = PagedKVCache.allocate(
        num_layers=1,
        num_pages=4,
        page_size=4,
        num_kv_heads=2,
        head_dim=16,
        dtype="float8_e4m3fn",
        k_descale=2.0,
        v_descale=4.0,
    )
    k, v = normal(6, 2, 16), normal(6, 2, 16)
    cache = cache.write(0, k, v, jnp.array([12, 13, 14, 15, 4, 5]))
    q = normal(1, 4, 16).astype(q_dtype)
    q_descale = 0.5 if q_dtype == "float8_e4m3fn" else None
    out = unified_attention(
        q,
        cache.k[0],
        cache.v[0],
        decode([6], [[12, 13, 14, 15, 4, 5, 6, 7]], 4),
        q_descale=q_descale,
        k_descale=cache.k_descale[0],
        v_descale=cache.v_descale[0],
        out_dtype=jnp.float32,
    )
    dense_k, dense_v = (
        (np.asarray(rows / descale).astype(ml_dtypes.float8_e4m3fn).astype(np.float32) * descale)[None]
        for rows, descale in ((k, 2), (v, 4))
    )
    dense_q = np.asarray(q).astype(np.float64) * (q_descale or 1)
    want = oracle.attention(dense_q, dense_k, dense_v, np.array([[0]]), [0, 1], [6])[0]
    np.testing.assert_allclose(out, want, atol=1e-5)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_p59_donated_caches_survive_a_write_of_padding_only(dtype):
    before = [np.asarray(normal(4, 4, 2, 8).astype(dtype)) for _ in range(2)]
    write = jax.jit(write_kv, donate_argnums=(0, 1))
    after = write(*map(jnp.array, before), normal(3, 2, 8), normal(3, 2, 8), jnp.full(3, -1))
    for want, got in zip(before, after, strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_p59_donation_and_the_order_of_results_change_nothing(dtype):
    k_host, v_host = (np.asarray(normal(4, 4, 2, 16).astype(dtype)) for _ in range(2))
    q, k, v = normal(2, 4, 16), normal(2, 2, 16), normal(2, 2, 16)
    metadata = target_verify_metadata(
        prefix_lens=np.array([5]),
        num_draft_tokens=2,
        page_size=4,
        req_to_token=np.array([[8, 9, 10, 11, 4, 5, 6, 7]]),
        req_pool_indices=np.array([0]),
    )

    def step(k_cache, v_cache, out_first):
        k_cache, v_cache = write_kv(k_cache, v_cache, k, v, metadata.slots(2))
        out = unified_attention(q, k_cache, v_cache, metadata)
        return (out, k_cache, v_cache) if out_first else (k_cache, v_cache, out)

    def run(out_first, donated):
        caches = jnp.array(k_host), jnp.array(v_host)
        jitted = jax.jit(
            functools.partial(step, out_first=out_first), donate_argnums=(0, 1) if donated else ()
        )
        results = [np.array(result) for result in jitted(*caches)]
        if not donated:
            np.testing.assert_array_equal(bits(caches[0]), bits(k_host))
            np.testing.assert_array_equal(bits(caches[1]), bits(v_host))
        return results if out_first else [results[2], *results[:2]]

    want = run(out_first=True, donated=False)
    for out_first, donated in ((True, True), (False, True), (False, False)):
        for got, expected in zip(run(out_first, donated), want, strict=True):
            np.testing.assert_array_equal(bits(got), bits(expected))
