"""Small kernels for the audit: some safe, some each with one fault."""

import dataclasses

import triton
import triton.language as tl

from jaxattn.kernels.triton.requests import CompileRequest
from jaxattn.kernels.triton.walk import turn

ROW = 2048


@triton.jit
def gather_pages(k_cache, page_table, out, ROW: tl.constexpr):
    """Safe: the page id is widened before it is multiplied, and is the same for the whole program."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(page_table + row).to(tl.int64)
    lanes = tl.arange(0, ROW)
    tl.store(out + row * ROW + lanes, tl.load(k_cache + page * ROW + lanes))


@triton.jit
def gather_lanes(k_cache, page_table, out, ROW: tl.constexpr):
    """Safe: every lane has a page id of its own, in a 64-bit pointer."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, ROW)
    page = tl.load(page_table + row * ROW + lanes // 16).to(tl.int64)
    tl.store(out + row * ROW + lanes, tl.load(k_cache + page * 16 + lanes % 16))


@triton.jit
def narrow_product(k_cache, page_table, out, ROW: tl.constexpr):
    """Fault: page * stride in the width of the table."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(page_table + row)
    lanes = tl.arange(0, ROW)
    tl.store(out + row * ROW + lanes, tl.load(k_cache + page * ROW + lanes))


@triton.jit
def widened_too_late(k_cache, page_table, out, ROW: tl.constexpr):
    """Fault: the offset is widened, but its product was not."""
    row = tl.program_id(0).to(tl.int64)
    offset = tl.load(page_table + row) * ROW + tl.arange(0, ROW)
    tl.store(out + row * ROW + tl.arange(0, ROW), tl.load(k_cache + offset.to(tl.int64)))


@triton.jit
def truncated(k_cache, page_table, out, ROW: tl.constexpr):
    """Fault: an int64 table, cut to int32 by hand."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(page_table + row).to(tl.int32)
    lanes = tl.arange(0, ROW)
    tl.store(out + row * ROW + lanes, tl.load(k_cache + page * ROW + lanes))


@triton.jit
def carried_by_a_loop(k_cache, page_table, out, pages, ROW: tl.constexpr):
    """Fault: the id of the next page is loaded one turn ahead, and one branch multiplies it in int32."""
    row = tl.program_id(0).to(tl.int64)
    lanes = tl.arange(0, ROW)
    total = tl.zeros([ROW], tl.float32)
    page = tl.load(page_table + row)
    turn = 0
    while turn < pages:
        offset = turn
        if turn % 2 == 0:
            offset = page * ROW
        total += tl.load(k_cache + offset + lanes)
        turn += 1
        page = tl.load(page_table + row + turn)
    tl.store(out + row * ROW + lanes, total.to(out.dtype.element_ty))


@triton.jit
def narrow_program(k_cache, page_table, out, ROW: tl.constexpr):
    """Fault: the number of the program times a stride in int32."""
    program = tl.program_id(0)
    page = tl.load(page_table + program).to(tl.int64)
    lanes = tl.arange(0, ROW)
    tl.store(out + program * ROW + lanes, tl.load(k_cache + page * ROW + lanes))


@dataclasses.dataclass(frozen=True)
class Turns:
    """What `turn` reads of the constants of an attention kernel."""

    begin_turn: str
    end_turn: str


@triton.jit
def turns(k_cache, page_table, out, ROW: tl.constexpr, C: tl.constexpr, BARRIER: tl.constexpr):
    """Fault where BARRIER: all warps wait for each other within a turn."""
    row = tl.program_id(0).to(tl.int64)
    page = tl.load(page_table + row).to(tl.int64)
    lanes = tl.arange(0, ROW)
    turn(tl.program_id(0), C, True)
    if BARRIER:
        tl.debug_barrier()
    turn(tl.program_id(0), C, False)
    tl.debug_barrier()
    tl.store(out + row * ROW + lanes, tl.load(k_cache + page * ROW + lanes))


@triton.jit
def bounded_uses(k_cache, page_table, cu_seqlens_q, out, ROW: tl.constexpr):
    """Safe: an offset within a page, and a length from a difference of two starts, fit 32 bits."""
    row = tl.program_id(0).to(tl.int64)
    slot = tl.load(page_table + row)
    length = (tl.load(cu_seqlens_q + row + 1) - tl.load(cu_seqlens_q + row)).to(tl.int32)
    lanes = (slot % 16).to(tl.int32) * 128 + tl.arange(0, ROW)
    tl.store(
        out + row * ROW + lanes,
        tl.load(k_cache + slot // 16 * ROW + lanes, mask=lanes < length * 2, other=0.0),
    )


@triton.jit
def attend(
    q, k_cache, v_cache, page_table, seqused_k, out, scale, table_width: tl.int64,
    SEGMENTS: tl.constexpr, BM: tl.constexpr, D: tl.constexpr, TILE: tl.constexpr, PAGE: tl.constexpr,
    WIDEN: tl.constexpr,
):  # fmt: skip
    """Split-KV attention in the style of AITER: the dtype of the lengths is the dtype of the tile offset."""
    sequence = tl.program_id(0).to(tl.int64)
    length = tl.load(seqused_k + sequence)
    tiles = tl.cdiv(length, SEGMENTS * TILE)
    rows = tl.arange(0, BM)
    columns = tl.arange(0, D)
    q_tile = tl.load(q + sequence * BM * D + rows[:, None] * D + columns[None, :])
    total = tl.zeros([BM, D], tl.float32)
    largest = tl.full([BM], float("-inf"), tl.float32)
    weight = tl.zeros([BM], tl.float32)
    first = tl.program_id(1) * tiles
    for tile in range(first, min(first + tiles, tl.cdiv(length, TILE))):
        key = tile * TILE + tl.arange(0, TILE)
        live = key < length
        page = tl.load(page_table + sequence * table_width + key // PAGE, mask=live, other=0)
        if WIDEN:
            page = page.to(tl.int64)
        slot = page * (PAGE * D) + (key % PAGE) * D
        k_tile = tl.load(k_cache + slot[None, :] + columns[:, None], mask=live[None, :], other=0.0)
        v_tile = tl.load(v_cache + slot[:, None] + columns[None, :], mask=live[:, None], other=0.0)
        score = tl.where(live[None, :], tl.dot(q_tile, k_tile) * scale, float("-inf"))
        above = tl.maximum(largest, tl.max(score, 1))
        p = tl.exp2(score - above[:, None])
        shrink = tl.exp2(largest - above)
        weight = weight * shrink + tl.sum(p, 1)
        total = total * shrink[:, None] + tl.dot(p.to(v_tile.dtype), v_tile)
        largest = above
    tl.store(
        out + (sequence * SEGMENTS + tl.program_id(1)) * BM * D + rows[:, None] * D + columns[None, :],
        total / weight[:, None],
    )


@triton.jit
def chained_products(a, b, out, SIZE: tl.constexpr):
    """Two chained products of square tiles; for large ones a wave has too few registers."""
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    x, y = tl.load(a + at), tl.load(b + at)
    x = tl.dot(x, y, input_precision="ieee").to(x.dtype)
    tl.store(out + at, tl.dot(x, y, input_precision="ieee").to(x.dtype) + x)


@triton.jit
def page_table_rows(kv_indptr, kv_indices, page_table, width, PAGE: tl.constexpr, COLUMNS: tl.constexpr):
    """Safe: a table builder that returns early, so that its IR branches between blocks."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    start = tl.load(kv_indptr + row)
    length = tl.load(kv_indptr + row + 1) - start
    if length <= 0:
        return
    slot = tl.load(kv_indices + start + column * PAGE, mask=column * PAGE < length, other=0)
    tl.store(page_table + row * width + column, slot // PAGE, mask=column < width)


def request(fn, signature, *, num_warps=4, num_stages=2, within_2_gib=(), aligned=True, **constexprs):
    """A request for one of these kernels; arrays are aligned to 16 bytes unless `aligned` is False.

    Args:
        fn: the kernel.
        signature: argument name -> type name, in order, without the constexpr arguments.
        within_2_gib: arguments that are promised to be small, which lets AMD's compiler narrow their offsets.
    """
    attrs = {}
    for position, (name, kind) in enumerate(signature.items()):
        attributes = [["tt.divisibility", 16]] if aligned and kind != "fp32" else []
        if name in within_2_gib:
            attributes.append(["tt.pointer_range", 32])
        attrs[position,] = attributes
    signature = {**signature, **dict.fromkeys(constexprs, "constexpr")}
    return CompileRequest(fn.__name__, fn, signature, constexprs, attrs, num_warps, num_stages)


def products(dtype="*bf16", *, size, **options):
    """A request for `chained_products`."""
    return request(
        chained_products, {"a": dtype, "b": dtype, "out": dtype}, num_stages=1, SIZE=size, **options
    )


def gather(fn, table="*i64", **options):
    """A request for one of the kernels that copy rows of pages."""
    return request(fn, {"k_cache": "*bf16", "page_table": table, "out": "*bf16"}, ROW=ROW, **options)


def attention(lengths="*i64", *, BM=16, D=128, TILE=64, widen=True, **options):
    """A request for `attend`."""
    signature = {
        "q": "*bf16", "k_cache": "*bf16", "v_cache": "*bf16", "page_table": "*i32", "seqused_k": lengths,
        "out": "*fp32", "scale": "fp32", "table_width": "i64",
    }  # fmt: skip
    return request(attend, signature, SEGMENTS=16, BM=BM, D=D, TILE=TILE, PAGE=16, WIDEN=widen, **options)
