"""Measures what a decode step pays once for all layers: its page table and its plan. `python -m bench.step`."""

import argparse

import jax
import jax.numpy as jnp
import numpy as np

from bench import timing
from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata
from jaxattn.page_table import build_page_table
from jaxattn.plan import make_plan
from jaxattn.slot_rows import slot_rows


@index64
def measure(sequences: int, max_pages: int, page_size: int = 16) -> dict[str, timing.Timing]:
    """Device time of the table from a request pool and of the plan of a decode step, by builder."""
    from jaxattn.kernels.triton.page_table import build_page_tables

    rng = np.random.default_rng(0)
    lengths = jnp.asarray(rng.integers(1, max_pages * page_size, sequences))
    pool = jnp.asarray(
        rng.permutation(sequences)[:, None] * max_pages * page_size + np.arange(max_pages * page_size)
    )
    rows = slot_rows(
        kv_indptr=None, kv_indices=None, req_to_token=pool, req_pool_indices=jnp.arange(sequences)[::-1]
    )
    q = jax.ShapeDtypeStruct((sequences, 32, 128), jnp.bfloat16)
    cache = jax.ShapeDtypeStruct((1024, page_size, 8, 128), jnp.bfloat16)

    def table_by_triton(rows, lengths):
        return build_page_tables(rows, lengths, page_size, max_pages)[0]

    def table_by_xla(rows, lengths):
        return build_page_table(rows, lengths, page_size, max_pages)

    def plan(table, lengths):
        metadata = AttentionMetadata(
            page_table=table, cu_seqlens_q=jnp.arange(sequences + 1), seqused_k=lengths,
            max_seqlen_q=1, page_size=page_size, mode="decode",
        )  # fmt: skip
        return make_plan(metadata, q, cache)

    table = table_by_xla(rows, lengths)
    return {
        "page table, triton": timing.device_time(table_by_triton, (rows, lengths)),
        "page table, xla": timing.device_time(table_by_xla, (rows, lengths)),
        "plan": timing.device_time(plan, (table, lengths)),
    }


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m bench.step", description=__doc__)
    parser.add_argument("--sequences", type=int, default=128)
    parser.add_argument("--max-pages", type=int, default=8192)
    options = parser.parse_args()
    for name, row in measure(options.sequences, options.max_pages).items():
        kernels = " ".join(f"{kernel.split('(')[0]} {us:.1f}" for kernel, us in row.kernels.items())
        print(f"{name:20s} {row.median:6.1f} us ({row.low:.1f} to {row.high:.1f})  {kernels}")
