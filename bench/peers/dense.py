"""jax.nn.dot_product_attention as XLA compiles it, over contiguous K and V: runs everywhere, knows no pages."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from bench.inputs import Inputs
from bench.peers import Candidate
from bench.shapes import Shape

SCORES_LIMIT = 1 << 30


def unavailable(shape: Shape) -> str | None:
    """Why it cannot run `shape`."""
    if shape.quantised or shape.sinks:
        return "jax.nn.dot_product_attention knows neither descales nor sinks"
    if shape.branches:
        return "compared without draft trees"
    scores = 4 * len(shape.contexts) * shape.num_heads * shape.q_len * max(shape.contexts)
    if scores > SCORES_LIMIT:
        return f"its scores would take {scores >> 30} GiB"
    return None


def candidates(inputs: Inputs) -> Iterator[Candidate]:
    """One candidate; K and V are gathered into `[S, C, K, D]` beforehand, padded to the longest context."""
    shape = inputs.shape
    longest = max(shape.contexts)
    q = inputs.q.reshape(len(shape.contexts), shape.q_len, shape.num_heads, shape.head_dim)
    dims = (len(shape.contexts), -1, shape.num_kv_heads, shape.head_dim)
    k, v = (
        jnp.asarray(cache)[inputs.page_tables[0]].reshape(dims)[:, :longest]
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    position = (inputs.seqused_k - shape.q_len)[:, None, None] + np.arange(shape.q_len)[:, None]
    key = np.arange(longest)
    mask = (key <= position) & (position - key < (shape.window or longest))  # [S, q, C]

    def call(q, k, v, mask):
        return jax.nn.dot_product_attention(q, k, v, mask=mask)

    yield Candidate("", call, (q, k, v, jnp.asarray(mask[:, None])), 1, lambda result: result)
