"""The cache-write kernel against the XLA write, bit for bit."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

pytest.importorskip("triton")

from jaxattn.index64 import index64
from jaxattn.kernels.triton import cache_write
from jaxattn.kv_cache import write_kv


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
