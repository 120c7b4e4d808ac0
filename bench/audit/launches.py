"""Launches besides the tuned ones: attention with every option, page tables, plans, cache writes, MXFP4 products.

Their tiles are tuned for plain attention, so the audit asks of them that they compile, fit and address safely.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.index64 import index64
from jaxattn.kernels import tuning
from jaxattn.kernels.triton import attention, cache_write, mxfp4, mxfp4_tiles, page_table, step
from jaxattn.kernels.triton.launch import recording
from jaxattn.kernels.triton.requests import CompileRequest, device_of, request_of
from jaxattn.plan import AttentionLayers, schedule_specs
from jaxattn.problem import AttentionProblem
from jaxattn.quantization import Mxfp4Tiles, Mxfp4Weight
from jaxattn.slot_rows import PooledRows, RaggedRows, SlotRows

SEQUENCES, PAGE_SIZE, KV_HEADS, GROUP, HEAD_DIM = 64, 16, 8, 4, 128
COLUMNS = 8192
# 2**34 elements a side, so that no compiler may take an offset into the pool for small.
PAGES = 2**20


def other_requests(arch: str) -> list[CompileRequest]:
    """Describe the launches that no entry of a tuning table is for.

    Args:
        arch: `gfx942`, `gfx950`, `sm90`, ...
    """
    return [
        *_attention_requests(arch),
        *_page_table_requests(arch),
        *_step_requests(arch),
        *_cache_write_requests(arch),
        *_mxfp4_requests(arch),
    ]


def trace(arch: str, name: str, function: Callable, *arguments: Any) -> Iterator[CompileRequest]:
    """Trace a call of abstract arguments for an architecture, and describe its launches."""
    device = device_of(arch)
    with tuning.using(device), recording() as calls:
        # a function of its own, because JAX remembers what it has traced
        index64(jax.eval_shape)(lambda *traced: function(*traced), *arguments)
    for call in calls:
        kernel = call.kernel.__name__.removesuffix("_kernel")
        yield request_of(call, f"{name}: {kernel}")


@index64
def array(*shape: int, dtype: Any = jnp.int64) -> jax.ShapeDtypeStruct:
    """An abstract array."""
    return jax.ShapeDtypeStruct(shape, dtype)


def _attention_requests(arch: str) -> Iterator[CompileRequest]:
    for name, q_len, batch_invariant in (
        ("verify", 4, False),
        ("prefill", 2048, False),
        ("invariant", 4, True),
    ):
        problem = dataclasses.replace(every_option(q_len), batch_invariant=batch_invariant)
        yield from trace(arch, f"{name}, every option", attention.run, problem)


def every_option(q_len: int) -> AttentionProblem:
    """A problem with a tree, a window, softcap, sinks, ALiBi, descales and an output scale."""
    tokens, heads = SEQUENCES * q_len, KV_HEADS * GROUP
    cache = array(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    descale = array(KV_HEADS, dtype=jnp.float32)
    return AttentionProblem(
        q=array(tokens, heads, HEAD_DIM, dtype=jnp.bfloat16),
        k_cache=cache,
        v_cache=cache,
        page_table=array(SEQUENCES, COLUMNS),
        cu_seqlens_q=array(SEQUENCES + 1),
        seqused_k=array(SEQUENCES),
        ancestors=array(tokens, 1, dtype=jnp.uint64),
        depths=array(tokens, dtype=jnp.int32),
        sinks=array(heads, dtype=jnp.float32),
        alibi_slopes=array(heads, dtype=jnp.float32),
        q_descale=descale,
        k_descale=descale,
        v_descale=descale,
        output_scale=array(dtype=jnp.float32),
        softmax_scale=HEAD_DIM**-0.5,
        max_seqlen_q=q_len,
        out_dtype=jnp.dtype(jnp.bfloat16),
        sliding_window=4096,
        softcap=30.0,
    )


def _slot_rows() -> Iterator[tuple[str, SlotRows]]:
    yield "ragged", RaggedRows(kv_indptr=array(SEQUENCES + 1), kv_indices=array(2**24))
    pool = array(4096, 2**20, dtype=jnp.int32)
    yield "pooled", PooledRows(req_to_token=pool, req_pool_indices=array(SEQUENCES))


def _page_table_requests(arch: str) -> Iterator[CompileRequest]:
    for name, rows in _slot_rows():

        def build(rows, lengths, full_to_swa):
            return page_table.build_page_tables(rows, lengths, PAGE_SIZE, COLUMNS, full_to_swa)

        arguments = (rows, array(SEQUENCES), array(2**33 // 512))
        yield from trace(arch, f"{name} rows and window", build, *arguments)


def _step_requests(arch: str) -> Iterator[CompileRequest]:
    layers = AttentionLayers(
        q=array(SEQUENCES, KV_HEADS * GROUP, HEAD_DIM, dtype=jnp.bfloat16),
        k_cache=array(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=jnp.bfloat16),
        sliding_windows=(4096,),
    )
    sizes = {"num_sequences": SEQUENCES, "page_size": PAGE_SIZE, "max_seqlen_q": 1}
    with tuning.using(device_of(arch)):
        # Places on the line of the longer rows need 64 bits.
        planned = {n: schedule_specs(layers, max_pages=n, **sizes) for n in (COLUMNS, 2**24)}
    lengths, starts, live = array(SEQUENCES), array(SEQUENCES + 1), array(SEQUENCES, dtype=jnp.bool_)
    for (name, rows), (columns, specs) in itertools.product(_slot_rows(), planned.items()):
        options = {"full_to_swa": None, "page_size": PAGE_SIZE, "max_pages": columns, "specs": specs}

        def build(rows, lengths, added, lookahead, options=options):
            return step.assemble(
                rows, lengths, added, None, live=None, lookahead=lookahead, q_len=1, **options
            )

        def build_ragged(rows, lengths, added, lookahead, live, cu_seqlens_q, options=options):
            return step.assemble(
                rows, lengths, added, cu_seqlens_q, live=live, lookahead=lookahead, q_len=None, **options
            )

        arguments = (rows, lengths, array(), array())
        yield from trace(arch, f"{name} rows of {columns} pages and plan", build, *arguments)
        name = f"{name} rows of {columns} pages and plan, ragged queries"
        yield from trace(arch, name, build_ragged, *arguments, live, starts)


def _cache_write_requests(arch: str) -> Iterator[CompileRequest]:
    fresh = array(SEQUENCES, KV_HEADS, HEAD_DIM, dtype=jnp.bfloat16)
    descale = array(KV_HEADS, dtype=jnp.float32)
    for dtype, scale in ((jnp.bfloat16, None), (jnp.float8_e4m3fn, descale), (jnp.int8, descale)):
        cache = array(PAGES, PAGE_SIZE, KV_HEADS, HEAD_DIM, dtype=dtype)
        arguments = (cache, cache, fresh, fresh, array(SEQUENCES), scale, scale)
        yield from trace(arch, f"{jnp.dtype(dtype).name} pool", cache_write.write_kv, *arguments)


def _mxfp4_requests(arch: str) -> Iterator[CompileRequest]:
    rows = columns = 8192
    packed, scale = (array(rows, columns // codes, dtype=jnp.uint8) for codes in (2, 32))
    for tokens in (1, 32):
        x = array(tokens, columns, dtype=jnp.bfloat16)
        product = functools.partial(mxfp4.run, rows=rows)
        yield from trace(arch, f"{tokens} x {columns} by {rows} rows", product, x, packed, scale)
    tiles = jax.eval_shape(Mxfp4Tiles.from_weight, Mxfp4Weight(packed, scale, rows, columns))
    for tokens in (1, 8, 16, 32):
        x = array(tokens, columns, dtype=jnp.bfloat16)
        with tuning.using(device_of(arch)):
            reason = mxfp4_tiles.supports(x)
        if reason is None:
            name = f"{tokens} x {columns} by {rows} rows in tiles"
            yield from trace(arch, name, mxfp4_tiles.run, x, tiles)
