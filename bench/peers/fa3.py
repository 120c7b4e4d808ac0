"""FlashAttention 3 over a paged cache, from the package flash-attn3-jax."""

import importlib.util
from collections.abc import Iterator

import jax.numpy as jnp

from bench.inputs import Inputs
from bench.peers import Candidate
from bench.shapes import Shape

SPLITS = {"decode": (1, 2, 4, 8, 16, 32, 64), "prefill": (1,)}


def unavailable(shape: Shape) -> str | None:
    """Why FA3 cannot run `shape`."""
    if importlib.util.find_spec("flash_attn3_jax") is None:
        return "flash-attn3-jax is not installed"
    if shape.kv_dtype not in ("bfloat16", "float16"):
        return "the package takes fp16 and bf16 only"
    if shape.sinks or shape.branches:
        return "the package knows neither sinks nor draft trees"
    if shape.head_dim > 128:
        return "the package is built for head widths up to 128"
    return None


def candidates(inputs: Inputs) -> Iterator[Candidate]:
    """One candidate for each split count."""
    from flash_attn3_jax import flash_mha_with_kvcache

    shape = inputs.shape
    q = inputs.q.reshape(len(shape.contexts), shape.q_len, shape.num_heads, shape.head_dim)
    tables = [jnp.asarray(t, jnp.int32) for t in inputs.page_tables]
    lengths = jnp.asarray(inputs.seqused_k, jnp.int32)
    window = (-1, -1) if shape.window is None else (shape.window - 1, 0)
    for splits in SPLITS[shape.kind]:

        def calls(q, k_cache, v_cache, tables, lengths, splits=splits):
            return [
                flash_mha_with_kvcache(
                    q,
                    k_cache,
                    v_cache,
                    cache_seqlens=lengths,
                    page_table=t,
                    is_causal=True,
                    window_size=window,
                    num_splits=splits,
                )
                for t in tables
            ]

        arguments = (q, inputs.k_cache, inputs.v_cache, tables, lengths)
        yield Candidate(f"splits={splits}", calls, arguments, len(tables), lambda results: results[0])
