"""Device arrays for a shape, and the float64 check that gates every timing."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np

from bench.shapes import Shape

L2_BYTES = 64 << 20


@dataclasses.dataclass(frozen=True)
class Inputs:
    """Arrays of one shape. `page_tables` are rotated, so that no call finds its K and V in the L2 cache."""

    shape: Shape
    q: jax.Array  # [S * q_len, H, D]
    k_cache: jax.Array  # [N, P, K, D]
    v_cache: jax.Array
    page_tables: tuple[np.ndarray, ...]  # int64 [S, M]
    cu_seqlens_q: np.ndarray
    seqused_k: np.ndarray
    k_descale: float | None
    v_descale: float | None


def make_inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Draw a batch; pages are shuffled over the pool."""
    pages = np.array([-(-c // shape.page_size) for c in shape.contexts])
    copies = max(1, math.ceil(4 * L2_BYTES / shape.kv_bytes)) if shape.kind == "decode" else 1
    rng = np.random.default_rng(seed)
    order = rng.permutation(pages.sum() * copies).reshape(copies, -1)
    tables = []
    for row in order:
        table = np.zeros((len(pages), pages.max()), np.int64)
        table[np.arange(pages.max()) < pages[:, None]] = row
        tables.append(table)

    quantised = jnp.dtype(shape.kv_dtype).itemsize == 1
    keys = jax.random.split(jax.random.key(seed), 3)
    pool = (order.size, shape.page_size, shape.num_kv_heads, shape.head_dim)

    def draw(key, dims, dtype, scale=1.0):
        return jax.jit(lambda key: (jax.random.normal(key, dims, jnp.bfloat16) * scale).astype(dtype))(key)

    num_tokens = len(pages) * shape.q_len
    return Inputs(
        shape=shape,
        q=draw(keys[0], (num_tokens, shape.num_heads, shape.head_dim), jnp.bfloat16),
        k_cache=draw(keys[1], pool, shape.kv_dtype, 2.0 if quantised else 1.0),
        v_cache=draw(keys[2], pool, shape.kv_dtype, 2.0 if quantised else 1.0),
        page_tables=tuple(tables),
        cu_seqlens_q=np.arange(len(pages) + 1, dtype=np.int64) * shape.q_len,
        seqused_k=np.array(shape.contexts, np.int64),
        k_descale=0.5 if quantised else None,
        v_descale=0.5 if quantised else None,
    )


def sampled_error(inputs: Inputs, out, samples: int = 6, seed: int = 1) -> float:
    """Largest error of `out` against float64 over random (sequence, KV head, query token) rows, over max |result|.

    Args:
        inputs: what the call was given; the first page table.
        out: `[T, H, D]`.
    """
    shape, rng = inputs.shape, np.random.default_rng(seed)
    out = np.asarray(jnp.asarray(out, jnp.float32)).reshape(-1, shape.num_heads, shape.head_dim)
    group = shape.num_heads // shape.num_kv_heads
    worst = 0.0
    for _ in range(samples):
        s = int(rng.integers(len(shape.contexts)))
        head, i = int(rng.integers(shape.num_kv_heads)), int(rng.integers(shape.q_len))
        visible = shape.contexts[s] - shape.q_len + i + 1
        pages = inputs.page_tables[0][s][: -(-visible // shape.page_size)]

        def rows(cache, descale, pages=pages, head=head, visible=visible):
            picked = np.asarray(cache[jnp.asarray(pages), :, head].astype(jnp.float32), np.float64)
            return picked.reshape(-1, shape.head_dim)[:visible] * (descale or 1.0)

        row = s * shape.q_len + i
        heads = slice(head * group, (head + 1) * group)
        q = np.asarray(inputs.q[row, heads].astype(jnp.float32), np.float64)
        scores = q @ rows(inputs.k_cache, inputs.k_descale).T / math.sqrt(shape.head_dim)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        expected = weights @ rows(inputs.v_cache, inputs.v_descale) / weights.sum(-1, keepdims=True)
        worst = max(worst, float(np.abs(out[row, heads] - expected).max() / np.abs(expected).max()))
    return worst if np.isfinite(out).all() else math.nan
