"""cuDNN's attention through jax.nn, over contiguous K and V: what a prefill without pages costs."""

from collections.abc import Iterator

import jax

from bench.inputs import Inputs
from bench.peers import Candidate
from bench.shapes import Shape


def unavailable(shape: Shape) -> str | None:
    """Why cuDNN cannot run `shape`."""
    if jax.default_backend() != "gpu" or "rocm" in jax.devices()[0].client.platform_version.lower():
        return "cuDNN needs a CUDA device"
    if shape.kv_dtype not in ("bfloat16", "float16"):
        return "jax.nn.dot_product_attention takes fp16 and bf16 only"
    if len(set(shape.contexts)) > 1 or shape.q_len != shape.contexts[0]:
        return "contiguous causal attention needs equal lengths and no prefix"
    if shape.window or shape.sinks or shape.branches:
        return "compared without windows, sinks and draft trees"
    return None


def candidates(inputs: Inputs) -> Iterator[Candidate]:
    """One candidate; K and V are gathered into contiguous arrays beforehand."""
    shape = inputs.shape
    lead = (len(shape.contexts), shape.q_len)
    q = inputs.q.reshape(*lead, shape.num_heads, shape.head_dim)
    k, v = (
        cache[inputs.page_tables[0]].reshape(*lead, shape.num_kv_heads, shape.head_dim)
        for cache in (inputs.k_cache, inputs.v_cache)
    )

    def call(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation="cudnn")

    yield Candidate("", call, (q, k, v), 1, lambda result: result)
