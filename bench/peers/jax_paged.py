"""jax's own paged attention for GPUs, a Pallas kernel for decode."""

import importlib.util
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from bench.inputs import Inputs
from bench.peers import Candidate
from bench.shapes import Shape

MODULE = "jax.experimental.pallas.ops.gpu.paged_attention"
# pages of a block, splits
SETTINGS = ((4, 4), (8, 4), (8, 16), (8, 64))


def installed() -> bool:
    """Whether this jax still has the kernel."""
    try:
        return importlib.util.find_spec(MODULE) is not None
    except ModuleNotFoundError:
        return False


def unavailable(shape: Shape) -> str | None:
    """Why it cannot run `shape`."""
    if not installed():
        return f"this jax has no {MODULE}"
    if jax.default_backend() != "gpu":
        return "needs a GPU"
    return unsupported(shape)


def unsupported(shape: Shape) -> str | None:
    """Why it cannot run `shape` on any device."""
    if shape.q_len > 1 or shape.window or shape.sinks or shape.quantised:
        return "decode only, without windows, sinks and descales"
    return None


def candidates(inputs: Inputs) -> Iterator[Candidate]:
    """One candidate for each setting; its pools are `[K, N, P, D]`, so K and V are transposed beforehand."""
    from jax.experimental.pallas.ops.gpu.paged_attention import paged_attention

    k_pages, v_pages = (cache.transpose(2, 0, 1, 3) for cache in (inputs.k_cache, inputs.v_cache))
    q = inputs.q * inputs.shape.head_dim**-0.5
    lengths = jnp.asarray(inputs.seqused_k, jnp.int32)
    columns = inputs.page_tables[0].shape[1]
    for block, splits in SETTINGS:
        if columns % splits or (columns // splits) % block:
            continue

        def calls(q, k_pages, v_pages, tables, lengths, block=block, splits=splits):
            return [
                paged_attention(
                    q, k_pages, v_pages, table, lengths, pages_per_compute_block=block, k_splits=splits,
                    interpret=jax.default_backend() == "cpu",
                )
                for table in tables
            ]  # fmt: skip

        tables = [jnp.asarray(table, jnp.int32) for table in inputs.page_tables]
        arguments = (q.astype(inputs.q.dtype), k_pages, v_pages, tables, lengths)
        yield Candidate(
            f"pages={block} splits={splits}", calls, arguments, len(tables), lambda results: results[0]
        )
