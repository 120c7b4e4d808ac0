"""Device arrays for a shape, and the float64 check that gates every timing."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from bench.shapes import Shape, path_to

L2_BYTES = 64 << 20
STORED, DESCALE = 2.0, 0.5  # deviation of the values stored in one byte, and what they are multiplied with
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 4e-3, "float32": 1e-4, "float8_e4m3fn": 3e-2, "int8": 3e-2}


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
    sinks: jax.Array | None  # [H]
    k_descale: float | None
    v_descale: float | None

    def host(self, array) -> np.ndarray:
        """An array in float32 on the host."""
        return np.asarray(jnp.asarray(array, jnp.float32))

    def cached(self, cache, s: int, kv_head: int) -> np.ndarray:
        """Keys or values `[M, P, D]` of one KV head in the pages of sequence `s`, in float32."""
        return np.asarray(_take(cache, self.page_tables[0][s], kv_head))

    def queries(self, token: int) -> np.ndarray:
        """Queries `[H, D]` of one token, in float32."""
        return np.asarray(_row(self.q, token))


def rotations(shape: Shape, on_cpu: bool | None = None) -> int:
    """Copies of K and V that a timed program walks over; prefill is bound by arithmetic and needs one."""
    return 1 if shape.kind == "prefill" else copies_past_l2(shape.kv_bytes, on_cpu)


def copies_past_l2(size: float, on_cpu: bool | None = None) -> int:
    """Copies of so many bytes that fill four L2 caches; a CPU (by default, JAX's) keeps its caches warm."""
    on_cpu = jax.default_backend() == "cpu" if on_cpu is None else on_cpu
    return 1 if on_cpu else max(1, math.ceil(4 * L2_BYTES / size))


@functools.partial(jax.jit, static_argnames=("dims", "dtype", "scale"))
def draw(key, dims, dtype, scale=1.0):
    """Normal values of a dtype, without a copy in a wider one."""
    drawn = jnp.float32 if dtype == "float32" else jnp.bfloat16
    return (jax.random.normal(key, dims, drawn) * scale).astype(dtype)


def draw_tables(shape: Shape, copies: int, seed: int) -> tuple[tuple[np.ndarray, ...], int]:
    """Page tables int64 `[S, M]` of so many copies of a batch, shuffled over one pool, and the pages of the pool."""
    pages = np.array([-(-c // shape.page_size) for c in shape.contexts])
    order = np.random.default_rng(seed).permutation(pages.sum() * copies).reshape(copies, -1)
    tables = []
    for row in order:
        table = np.zeros((len(pages), pages.max()), np.int64)
        table[np.arange(pages.max()) < pages[:, None]] = row
        tables.append(table)
    return tuple(tables), order.size


def make_inputs(shape: Shape, seed: int = 0) -> Inputs:
    """Draw a batch; pages are shuffled over the pool."""
    tables, num_pages = draw_tables(shape, rotations(shape), seed)
    keys = jax.random.split(jax.random.key(seed, impl="rbg"), 4)
    pool = (num_pages, shape.page_size, shape.num_kv_heads, shape.head_dim)
    stored = STORED if shape.quantised else 1.0

    num_seqs = len(shape.contexts)
    num_tokens = num_seqs * shape.q_len
    return Inputs(
        shape=shape,
        q=draw(keys[0], (num_tokens, shape.num_heads, shape.head_dim), shape.q_dtype),
        k_cache=draw(keys[1], pool, shape.kv_dtype, stored),
        v_cache=draw(keys[2], pool, shape.kv_dtype, stored),
        page_tables=tables,
        cu_seqlens_q=np.arange(num_seqs + 1, dtype=np.int64) * shape.q_len,
        seqused_k=np.array(shape.contexts, np.int64),
        sinks=draw(keys[3], (shape.num_heads,), "float32") if shape.sinks else None,
        k_descale=DESCALE if shape.quantised else None,
        v_descale=DESCALE if shape.quantised else None,
    )


@jax.jit
def _take(cache, pages, kv_head):
    """Keys or values `[M, P, D]` of one KV head, in float32."""
    return cache[pages, :, kv_head].astype(jnp.float32)


@jax.jit
def _row(q, token):
    """Queries `[H, D]` of one token, in float32."""
    return q[token].astype(jnp.float32)


def expected_rows(inputs: Inputs, s: int, kv_head: int, i: int) -> np.ndarray:
    """Float64 output `[H / K, D]` of query token `i` of sequence `s` for the query heads of one KV head."""
    shape = inputs.shape
    last = shape.contexts[s] - shape.q_len + i + 1
    seen = np.arange(0 if shape.window is None else max(0, last - shape.window), last)
    if shape.parents is not None:
        prefix = shape.contexts[s] - shape.q_len
        seen = np.concatenate([np.arange(prefix), prefix + np.array(path_to(shape.parents, i))])

    def rows(cache, descale):
        picked = inputs.cached(cache, s, kv_head).astype(np.float64)
        return picked.reshape(-1, shape.head_dim)[seen] * (descale or 1.0)

    group = shape.num_heads // shape.num_kv_heads
    heads = slice(kv_head * group, (kv_head + 1) * group)
    q = inputs.queries(s * shape.q_len + i).astype(np.float64)[heads]
    scores = q @ rows(inputs.k_cache, inputs.k_descale).T / math.sqrt(shape.head_dim)
    top = scores.max(-1, keepdims=True)
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    if inputs.sinks is not None:
        total += np.exp(inputs.host(inputs.sinks).astype(np.float64)[heads, None] - top)
    return weights @ rows(inputs.v_cache, inputs.v_descale) / total


def sampled_error(inputs: Inputs, out, samples: int = 6, seed: int = 1) -> float:
    """Largest error of `out` against float64 over sampled (sequence, KV head, query token), over max |result|.

    Args:
        inputs: what the call was given; the first page table.
        out: `[T, H, D]`.
        samples: how many; the last query token of the longest sequence is among them.
        seed: of the random others.
    """
    shape, rng = inputs.shape, np.random.default_rng(seed)
    out = inputs.host(out).reshape(-1, shape.num_heads, shape.head_dim)
    if not np.isfinite(out).all():
        return math.nan
    group = shape.num_heads // shape.num_kv_heads
    picked = [(int(np.argmax(shape.contexts)), shape.num_kv_heads - 1, shape.q_len - 1)]
    limits = (len(shape.contexts), shape.num_kv_heads, shape.q_len)
    picked += [tuple(int(rng.integers(limit)) for limit in limits) for _ in range(samples - 1)]
    worst = 0.0
    for s, kv_head, i in picked:
        expected = expected_rows(inputs, s, kv_head, i)
        actual = out[s * shape.q_len + i, kv_head * group : (kv_head + 1) * group]
        worst = max(worst, float(np.abs(actual - expected).max() / np.abs(expected).max()))
    return worst
