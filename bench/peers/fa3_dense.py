"""FlashAttention 3 over contiguous K and V, from the package flash-attn3-jax: what its prefill pays for pages."""

from collections.abc import Iterator

from bench.inputs import Inputs
from bench.peers import Candidate, fa3
from bench.shapes import Shape


def unavailable(shape: Shape) -> str | None:
    """Why it cannot run `shape`."""
    if len(set(shape.contexts)) > 1 or shape.q_len != shape.contexts[0]:
        return "compared for prefill of equal lengths without a prefix"
    return fa3.unavailable(shape)


def candidates(inputs: Inputs) -> Iterator[Candidate]:
    """One candidate; K and V are gathered into `[S, C, K, D]` beforehand."""
    from flash_attn3_jax import flash_mha_with_kvcache

    shape = inputs.shape
    lead = (len(shape.contexts), shape.q_len)
    q = inputs.q.reshape(*lead, shape.num_heads, shape.head_dim)
    dims = (lead[0], -1, shape.num_kv_heads, shape.head_dim)
    k, v = (
        cache[inputs.page_tables[0]].reshape(dims)[:, : shape.q_len]
        for cache in (inputs.k_cache, inputs.v_cache)
    )
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)

    def call(q, k, v):
        return flash_mha_with_kvcache(q, k, v, is_causal=True, window_size=window)

    yield Candidate("", call, (q, k, v), 1, lambda result: result)
