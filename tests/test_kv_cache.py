import dataclasses
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.attention import unified_attention
from jaxattn.kv_cache import PagedKVCache, write_kv
from jaxattn.metadata import decode_metadata
from jaxattn.numerics import saturating_cast

FLOAT8 = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz")
DTYPES = ("float32", "bfloat16", "float16", *FLOAT8, "int8")
N, P, K, D, DV, T = 6, 4, 2, 8, 4, 5
ALLOCATE = {"num_layers": 2, "num_pages": 2, "page_size": P, "num_kv_heads": K, "head_dim": D}


def largest(dtype):
    return 127 if dtype == "int8" else float(ml_dtypes.finfo(dtype).max)


def quantise(values, descale, dtype):
    """Independent oracle: divide, saturate and round in numpy."""
    scaled = values.astype(np.float32)
    if descale is not None:
        scaled = scaled / np.broadcast_to(np.float32(descale), (K,))[:, None]
    if dtype == "int8":
        return np.clip(np.rint(scaled), -128, 127).astype(np.int8)
    return np.clip(scaled, -largest(dtype), largest(dtype)).astype(dtype)


def bits(array):
    array = np.asarray(array)
    return array.view(f"uint{8 * array.dtype.itemsize}")


def garbage(dtype, width, seed=0):
    """A pool of arbitrary bits, NaN included, which a write must leave as they are."""
    rng = np.random.default_rng(seed)
    itemsize = jnp.dtype(dtype).itemsize
    return jnp.asarray(rng.integers(0, 256, (N, P, K, width * itemsize), dtype=np.uint8).view(dtype))


def rows(seed=1, tokens=T):
    rng = np.random.default_rng(seed)
    k, v = (rng.normal(size=(tokens, K, width)).astype(np.float32) * 10 for width in (D, DV))
    return jnp.asarray(k), jnp.asarray(v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("jitted", [False, True])
def test_write_changes_the_live_slots_and_nothing_else(dtype, jitted):
    k_cache, v_cache = garbage(dtype, D), garbage(dtype, DV)
    k, v = rows()
    slots = np.array([7, -1, 23, N * P, 0])
    k_descale, v_descale = np.array([0.5, 4.0], np.float32), np.float32(0.25)
    write = jax.jit(write_kv) if jitted else write_kv
    new_k, new_v = write(
        k_cache, v_cache, k, v, jnp.asarray(slots), k_descale=jnp.asarray(k_descale), v_descale=v_descale
    )
    want_k, want_v = np.array(k_cache), np.array(v_cache)
    for token, slot in enumerate(slots):
        if 0 <= slot < N * P:
            want_k[slot // P, slot % P] = quantise(np.asarray(k[token]), k_descale, dtype)
            want_v[slot // P, slot % P] = quantise(np.asarray(v[token]), v_descale, dtype)
    np.testing.assert_array_equal(bits(new_k), bits(want_k))
    np.testing.assert_array_equal(bits(new_v), bits(want_v))


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(-3, N * P + 3), min_size=T, max_size=T, unique=True), st.sampled_from(DTYPES))
def test_gather_reads_what_was_written(slots, dtype):
    cache = PagedKVCache.allocate(
        num_layers=2,
        num_pages=N,
        page_size=P,
        num_kv_heads=K,
        head_dim=D,
        v_head_dim=DV,
        dtype=dtype,
        k_descale=0.5,
        v_descale=np.array([0.25, 0.125]),
    )
    k, v = rows()
    got_k, got_v = cache.write(1, k, v, jnp.array(slots)).gather(1, jnp.array(slots))
    live = np.array([0 <= slot < N * P for slot in slots])[:, None, None]
    want_k = quantise(np.asarray(k), 0.5, dtype).astype(np.float32) * np.float32(0.5)
    want_v = quantise(np.asarray(v), [0.25, 0.125], dtype).astype(np.float32)
    want_v *= np.array([0.25, 0.125], np.float32)[:, None]
    assert got_k.dtype == got_v.dtype == jnp.float32
    np.testing.assert_array_equal(got_k, np.where(live, want_k, 0))
    np.testing.assert_array_equal(got_v, np.where(live, want_v, 0))


def test_gather_of_padding_reads_no_dead_slot():
    cache = PagedKVCache.allocate(num_layers=1, num_pages=N, page_size=P, num_kv_heads=K, head_dim=D)
    cache = dataclasses.replace(cache, k=(cache.k[0] * jnp.nan,), v=(cache.v[0] * jnp.nan,))
    k, v = cache.gather(0, jnp.array([-1, N * P, -(2**31), 2**31 - 1]))
    np.testing.assert_array_equal(k, np.zeros((4, K, D)))
    np.testing.assert_array_equal(v, np.zeros((4, K, D)))


def layers(cache):
    return [np.asarray(array) for array in (*cache.k, *cache.v)]


def filled(dtype="float32", window_layers=(), num_window_pages=None):
    cache = PagedKVCache.allocate(
        num_layers=3,
        num_pages=N,
        page_size=P,
        num_kv_heads=K,
        head_dim=D,
        v_head_dim=DV,
        dtype=dtype,
        k_descale=1.0,
        v_descale=1.0,
        window_layers=window_layers,
        num_window_pages=num_window_pages,
    )
    rng = np.random.default_rng(2)

    def fill(array):
        return jnp.asarray(rng.integers(0, 100, array.shape).astype(array.dtype))

    return dataclasses.replace(cache, k=tuple(map(fill, cache.k)), v=tuple(map(fill, cache.v)))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_copy_pages_reads_all_before_it_writes(dtype):
    cache = filled(dtype)
    source, destination = [1, 2, 5, -1, 3, N], [2, 1, 3, 4, N, 0]
    copied = cache.copy_pages(jnp.array(source), jnp.array(destination))
    for before, after in zip(layers(cache), layers(copied), strict=True):
        want = before.copy()
        want[2], want[1], want[3] = before[1], before[2], before[5]
        np.testing.assert_array_equal(bits(after), bits(want))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float8_e4m3fn", "int8"])
def test_copy_slots_reads_all_before_it_writes(dtype):
    cache = filled(dtype)
    source, destination = [4, 9, 23, -1, 3, N * P], [9, 4, 6, 1, N * P, 0]
    copied = cache.copy_slots(jnp.array(source), jnp.array(destination))
    for before, after in zip(layers(cache), layers(copied), strict=True):
        want, old = before.copy().reshape(N * P, K, -1), before.reshape(N * P, K, -1)
        want[9], want[4], want[6] = old[4], old[9], old[23]
        np.testing.assert_array_equal(bits(after), bits(want.reshape(before.shape)))


def test_window_layers_live_in_the_smaller_pool():
    cache = filled(window_layers=(0, 2), num_window_pages=3)
    assert [array.shape[0] for array in cache.k] == [3, N, 3]
    assert [array.shape[0] for array in cache.v] == [3, N, 3]

    full = cache.copy_pages(jnp.array([1]), jnp.array([2]))
    window = cache.copy_slots(jnp.array([4]), jnp.array([8]), window=True)
    for layer in range(3):
        before = np.asarray(cache.k[layer])
        want_full, want_window = before.copy(), before.copy()
        if layer == 1:
            want_full[2] = before[1]
        else:
            want_window[2, 0] = before[1, 0]
        np.testing.assert_array_equal(full.k[layer], want_full)
        np.testing.assert_array_equal(window.k[layer], want_window)

    k, v = rows(tokens=1)
    beyond = cache.write(0, k, v, jnp.array([3 * P]))
    np.testing.assert_array_equal(beyond.k[0], cache.k[0])
    inside = cache.write(1, k, v, jnp.array([3 * P]))
    np.testing.assert_array_equal(inside.k[1][3, 0], k[0])


def test_descales_come_as_one_for_all_layers_or_one_for_each():
    cache = PagedKVCache.allocate(**ALLOCATE, k_descale=np.array([1.0, 2.0]), v_descale=[None, 0.5])
    assert [layer.tolist() for layer in cache.k_descale] == [[1.0, 2.0], [1.0, 2.0]]
    assert cache.v_descale[0] is None
    assert cache.v_descale[1].tolist() == [0.5, 0.5]
    assert cache.v_descale[1].dtype == jnp.float32


def test_cache_is_a_pytree_with_static_window_layers():
    cache = filled(window_layers=(1,), num_window_pages=2)
    leaves, tree = jax.tree.flatten(cache)
    assert len(leaves) == 12
    assert jax.tree.unflatten(tree, leaves).window_layers == (1,)
    assert (cache.num_layers, cache.page_size) == (3, P)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_cast_rounds_to_nearest_even_and_saturates(dtype):
    values = np.arange(256, dtype=np.uint8).view(dtype).astype(np.float32)
    values = np.unique(values[np.isfinite(values)])
    middle = (values[1:] + values[:-1]) / 2
    inside = np.concatenate([values, middle, np.nextafter(middle, 1e9), np.nextafter(middle, -1e9)])
    got = saturating_cast(jnp.asarray(inside, jnp.float32), dtype)
    np.testing.assert_array_equal(bits(got), bits(inside.astype(np.float32).astype(dtype)))

    outside = saturating_cast(jnp.array([1.1 * largest(dtype), -1e38, jnp.nan]), dtype).astype(jnp.float32)
    np.testing.assert_array_equal(outside, [largest(dtype), -largest(dtype), np.nan])


def test_cast_keeps_infinity_where_the_format_has_one():
    infinite = jnp.array([jnp.inf, -jnp.inf])
    for dtype in ("bfloat16", "float16", "float8_e5m2"):
        assert saturating_cast(infinite, dtype).astype(jnp.float32).tolist() == [np.inf, -np.inf]
    for dtype in ("float8_e4m3fn", "float8_e4m3fnuz", "int8"):
        assert saturating_cast(infinite, dtype).astype(jnp.float32)[0] == largest(dtype)
    assert saturating_cast(jnp.array([7e4, -1e38]), jnp.float16).tolist() == [65504.0, -65504.0]


def test_cast_to_int8_rounds_half_to_even_and_has_no_nan():
    values = jnp.array([0.5, 1.5, -0.5, -2.5, 127.4, 1e9, -1e9, jnp.nan])
    assert saturating_cast(values, jnp.int8).tolist() == [0, 2, 0, -2, 127, 127, -128, 0]


def test_cast_refuses_what_it_cannot_cast():
    with pytest.raises(TypeError, match="x: expected a floating point dtype, got int32"):
        saturating_cast(jnp.array([1]), jnp.float16)
    with pytest.raises(TypeError, match="dtype: expected a floating point format or int8, got int32"):
        saturating_cast(jnp.array([1.0]), jnp.int32)


@pytest.mark.parametrize(
    ("change", "error", "text"),
    [
        ({"num_pages": 0}, ValueError, "num_pages: expected at least 1, got 0"),
        ({"dtype": jnp.int32}, TypeError, "dtype: expected one of float32, .*, got int32"),
        ({"dtype": jnp.int8}, ValueError, "k_descale: expected a descale with dtype int8"),
        ({"k_descale": [1.0]}, ValueError, "k_descale: expected 2 entries, one for each layer, got 1"),
        ({"v_descale": np.ones(3)}, ValueError, r"v_descale\[0\]: expected a scalar or shape \(2,\)"),
        ({"window_layers": (1,)}, ValueError, "num_window_pages: expected a number of pages"),
        ({"num_window_pages": 2}, ValueError, "num_window_pages: expected .* None without, got 2"),
        (
            {"window_layers": (1,), "num_window_pages": 0},
            ValueError,
            "num_window_pages: expected at least 1, got 0",
        ),
        ({"window_layers": (2,), "num_window_pages": 2}, ValueError, r"window_layers: .* \[0, 2\), got 2"),
    ],
)
def test_allocate_says_what_is_wrong(change, error, text):
    with pytest.raises(error, match=text):
        PagedKVCache.allocate(**ALLOCATE | change)


def test_methods_say_what_is_wrong():
    cache = PagedKVCache.allocate(**ALLOCATE)
    k, slots = jnp.zeros((3, K, D)), jnp.array([0, 1, 2])
    with pytest.raises(ValueError, match=r"layer: expected a layer in \[0, 2\), got -1"):
        cache.write(-1, k, k, slots)
    with pytest.raises(ValueError, match=r"k: expected shape \[2, 2, 8\], .* got \[3, 2, 8\]"):
        cache.write(0, k, k, slots[:2])
    with pytest.raises(ValueError, match=r"v: expected shape \[3, 2, 8\], .* got \[3, 2, 4\]"):
        cache.write(0, k, k[..., :4], slots)
    with pytest.raises(TypeError, match="k: expected a floating point dtype, got int32"):
        cache.write(0, k.astype(jnp.int32), k, slots)
    with pytest.raises(TypeError, match="slots: expected an integer dtype"):
        cache.write(0, k, k, slots.astype(jnp.float32))
    with pytest.raises(ValueError, match=r"slots: expected shape \[T\], got \[1, 3\]"):
        cache.gather(0, slots[None])
    with pytest.raises(ValueError, match="expected lists of one length, got 3 and 2 entries"):
        cache.copy_pages(slots, slots[:2])
    with pytest.raises(ValueError, match="window: expected False for a cache without window_layers"):
        cache.copy_slots(slots, slots, window=True)
    with pytest.raises(ValueError, match=r"expected \[N, P, K, D\] and \[N, P, K, Dv\]"):
        write_kv(cache.k[0], cache.v[0][:1], k, k, slots)


def test_no_tokens_and_no_pairs_change_nothing():
    for dtype in ("float32", "float8_e4m3fn"):
        cache = filled(dtype)
        none = jnp.zeros(0, jnp.int32)
        changed = cache.write(0, jnp.zeros((0, K, D)), jnp.zeros((0, K, DV)), none).copy_pages(none, none)
        for before, after in zip(layers(cache), layers(changed), strict=True):
            np.testing.assert_array_equal(bits(before), bits(after))


def test_write_maps_over_a_leading_axis():
    k_cache, v_cache = (
        jnp.stack([garbage("float8_e4m3fn", width, seed) for seed in (0, 1)]) for width in (D, DV)
    )
    k, v = (jnp.stack(pair) for pair in zip(rows(1), rows(2), strict=True))
    slots = jnp.array([[1, 2, 3, 4, -1], [20, 0, -1, 7, 8]])
    mapped = jax.vmap(write_kv)(k_cache, v_cache, k, v, slots)
    for i in range(2):
        looped = write_kv(k_cache[i], v_cache[i], k[i], v[i], slots[i])
        for got, want in zip(mapped, looped, strict=True):
            np.testing.assert_array_equal(bits(got[i]), bits(want))


BIG_POOL, WINDOW_POOL = 4096, 4000


def whole_step(copies):
    """One decode step: write and attend in every layer, then move what the result names."""
    pool = jnp.arange(16, 16 + 2 * 64).reshape(2, 64)
    full_to_swa = jnp.arange(BIG_POOL * 16 + 1)

    def step(cache, x, lengths):
        metadata = decode_metadata(
            seqused_k=lengths,
            page_size=16,
            req_to_token=pool,
            req_pool_indices=jnp.array([0, 1]),
            full_to_swa=full_to_swa,
        )
        for layer in range(cache.num_layers):
            own = metadata.for_window_pool() if layer in cache.window_layers else metadata
            cache = cache.write(layer, x, -x, own.slots(2))
            x = unified_attention(
                jnp.repeat(x, 2, axis=1),
                cache.k[layer],
                cache.v[layer],
                own,
                k_descale=cache.k_descale[layer],
                v_descale=cache.v_descale[layer],
            )[:, ::2]
        if copies:
            accepted = x[0, 0, :1].astype(jnp.int32)
            cache = cache.copy_pages(accepted, accepted + 1).copy_slots(accepted, accepted + 1, window=True)
        return x, cache

    return step


@pytest.mark.parametrize(
    ("dtype", "copies"),
    [
        ("float32", False),
        ("float16", False),
        ("bfloat16", False),
        ("float8_e4m3fn", False),
        ("float8_e4m3fnuz", False),
        ("int8", False),
        ("int8", True),
    ],
)
def test_a_donated_step_holds_no_copy_of_the_cache(dtype, copies):
    cache = PagedKVCache.allocate(
        num_layers=2,
        num_pages=BIG_POOL,
        page_size=16,
        num_kv_heads=2,
        head_dim=32,
        dtype=dtype,
        k_descale=0.5,
        v_descale=0.5,
        window_layers=(1,),
        num_window_pages=WINDOW_POOL,
    )
    arguments = (cache, jnp.ones((2, 2, 32)), jnp.array([40, 17]))
    compiled = jax.jit(whole_step(copies), donate_argnums=0).lower(*arguments).compile()
    memory = compiled.memory_analysis()
    arrays = (*cache.k, *cache.v)
    assert memory.alias_size_in_bytes >= sum(array.nbytes for array in arrays)
    assert memory.temp_size_in_bytes < min(array.nbytes for array in arrays) / 4

    made_whole = re.compile(
        rf"= \w+\[({BIG_POOL}|{WINDOW_POOL}),16,2,32\]\S* (copy|convert|bitcast-convert)\("
    )
    entry = compiled.as_text().split("\nENTRY ")[1]
    assert [line for line in entry.splitlines() if made_whole.search(line)] == []


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_without_donation_the_arguments_keep_their_values(dtype):
    cache = filled(dtype)
    before = [array.copy() for array in layers(cache)]
    k, v = rows()
    jax.block_until_ready(jax.jit(lambda cache: cache.write(0, k, v, jnp.arange(T)))(cache))
    for want, got in zip(before, layers(cache), strict=True):
        np.testing.assert_array_equal(bits(got), bits(want))


@pytest.mark.parametrize("dtype", ["float32", "float8_e4m3fn"])
def test_x64_changes_nothing(dtype):
    def run():
        k, v = rows()
        cache = filled(dtype).write(1, k, v, np.array([7, -1, 23, N * P, 0]))
        return cache.copy_pages(np.array([1]), np.array([2])), cache.gather(1, np.array([7, 0, -1]))

    off = run()
    with jax.enable_x64(True):
        on = run()
    for want, got in zip(jax.tree.leaves(off), jax.tree.leaves(on), strict=True):
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(bits(got), bits(want))


def test_float64_values_are_cast_once():
    with jax.enable_x64(True):
        values = jnp.array([0.1, 1e300, -1e300])
        assert saturating_cast(values, jnp.bfloat16).tolist() == [
            0.10009765625,
            3.3895313892515355e38,
            -3.3895313892515355e38,
        ]
