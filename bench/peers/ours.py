"""jaxattn's own implementations, through the public call."""

import dataclasses
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

import jaxattn
from bench.inputs import Inputs
from bench.peers import Candidate


def metadata_of(inputs: Inputs, page_table) -> jaxattn.AttentionMetadata:
    """Metadata of the batch with `page_table`."""
    shape = inputs.shape
    trees = None if shape.parents is None else np.tile(shape.parents, (len(shape.contexts), 1))
    with jax.enable_x64(True):
        return jaxattn.AttentionMetadata(
            page_table=jnp.asarray(page_table, jnp.int64),
            cu_seqlens_q=jnp.asarray(inputs.cu_seqlens_q, jnp.int64),
            seqused_k=jnp.asarray(inputs.seqused_k, jnp.int64),
            max_seqlen_q=shape.q_len,
            page_size=shape.page_size,
            ancestors=None if trees is None else jaxattn.ancestor_bits(trees),
            mode="decode" if shape.q_len == 1 else "target_verify" if shape.q_len <= 64 else "extend",
        )


def candidates(inputs: Inputs, implementation: str, batch_invariant: bool = False) -> Iterator[Candidate]:
    """The public call with its own tuned settings, the plan computed once and passed in, as layers share it."""
    window, k_descale, v_descale = inputs.shape.window, inputs.k_descale, inputs.v_descale
    metadata = [metadata_of(inputs, table) for table in inputs.page_tables]
    if implementation in ("triton", "pallas"):
        from jaxattn.plan import make_plan

        plan = make_plan(
            metadata[0],
            inputs.q,
            inputs.k_cache,
            sliding_windows=(window,),
            batch_invariant=batch_invariant,
        )
        metadata = [dataclasses.replace(m, plan=plan) for m in metadata]

    # The function outlives the inputs of a round, so it holds none of their arrays.
    def calls(q, k_cache, v_cache, metadata, sinks):
        return [
            jaxattn.unified_attention(
                q,
                k_cache,
                v_cache,
                m,
                sliding_window=window,
                sinks=sinks,
                k_descale=k_descale,
                v_descale=v_descale,
                implementation=implementation,
                batch_invariant=batch_invariant,
            )
            for m in metadata
        ]

    arguments = (inputs.q, inputs.k_cache, inputs.v_cache, metadata, inputs.sinks)
    yield Candidate("", calls, arguments, len(metadata), lambda results: results[0])
