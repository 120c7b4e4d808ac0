"""Memory of the tiled walk does not grow with the context, and it copies no cache."""

import cases
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxattn.attention import unified_attention

PAGE_SIZE, HEADS, KV_HEADS, WIDTH = 16, 8, 2, 64


def temporary_bytes(context, q_len, dtype, options) -> int:
    pages = context // PAGE_SIZE
    metadata = cases.make_metadata(np.zeros((1, pages)), ((q_len, context),), page_size=PAGE_SIZE)
    cache = jax.ShapeDtypeStruct((pages, PAGE_SIZE, KV_HEADS, WIDTH), dtype)
    q = jax.ShapeDtypeStruct((q_len, HEADS, WIDTH), "float32")
    step = jax.jit(lambda q, k, v, m: unified_attention(q, k, v, m, implementation="xla", **options))
    compiled = step.lower(q, cache, cache, metadata).compile()
    return compiled.memory_analysis().temp_size_in_bytes


@pytest.mark.parametrize("q_len", [1, 4, 200])
@pytest.mark.parametrize(
    ("dtype", "options"), [("float32", {}), ("bfloat16", {"sliding_window": 1000}), ("float8_e4m3fn", {})]
)
def test_temporary_memory_is_the_same_at_4k_and_64k(q_len, dtype, options):
    small, large = (temporary_bytes(context, q_len, dtype, options) for context in (4096, 65536))
    assert abs(large - small) <= 4096
    assert large < 65536 * KV_HEADS * WIDTH * jnp.dtype(dtype).itemsize
