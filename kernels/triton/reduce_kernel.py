"""Merge of partial softmax states: a few output rows a program, a tile of partials at a time."""

import triton
import triton.language as tl

from jaxattn.kernels.triton.attention_kernel import CUT_UNIT_FIELDS
from jaxattn.kernels.triton.keys import key_range
from jaxattn.kernels.triton.output import store_rows


@triton.jit
def reduce_kernel(
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_sequence_ptr,
    block_index_ptr,
    tile_start_ptr,
    sinks_ptr,
    v_descale_ptr,
    output_scale_ptr,
    partial_acc_ptr,
    partial_peak_ptr,
    partial_total_ptr,
    cut_unit_ptr,
    _out_ptr,
    _lse_ptr,
    out_ptr,
    lse_ptr,
    C: tl.constexpr,
    PARTIALS: tl.constexpr,
    MANY: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Merge the partial results of each (block, head) unit that `attention_kernel` cut, in the order of keys.

    A unit is found by its number; where cuts follow from the load balance and units are more than programs, by the
    program in which it begins.
    """
    program = tl.program_id(0).to(tl.int64)
    parts: tl.constexpr = (C.stored_rows + ROWS - 1) // ROWS
    place = program // parts
    block_row = program % parts * ROWS + tl.arange(0, ROWS)  # [ROWS]
    if C.chunk > 0:
        block = place // C.num_kv_heads
        kv_head = place % C.num_kv_heads
        block_start = tl.load(tile_start_ptr + block)
        count = (tl.load(tile_start_ptr + block + 1) - block_start) // C.heads_in_line
        first_slot = kv_head % C.heads_abreast * C.longest_line + block_start
        if C.heads_in_line > 1:
            first_slot += kv_head // C.heads_abreast * count
        sequence = tl.load(block_sequence_ptr + block)
        q_start = tl.load(cu_seqlens_q_ptr + sequence)
        q_len = tl.load(cu_seqlens_q_ptr + sequence + 1) - q_start
        first_packed = tl.load(block_index_ptr + block) * C.rows_in_block
    else:
        field = cut_unit_ptr + place * CUT_UNIT_FIELDS
        count = tl.load(field)
        q_start = tl.load(field + 1)
        q_len = tl.load(field + 2)
        first_packed = tl.load(field + 3)
        kv_head = tl.load(field + 4)
        first_slot = 2 * tl.load(field + 5)
        if C.described_by_unit:
            # Units of no live block are described by nobody.
            block = place // C.num_kv_heads
            dead = tl.load(tile_start_ptr + block) == tl.load(tile_start_ptr + block + 1)
            count = tl.where(dead, 0, count)

    if count > 0:
        packed = first_packed + block_row  # [ROWS]
        token = packed // C.group
        live = (block_row < C.stored_rows) & (token < q_len)
        if tl.max(live.to(tl.int32), 0) > 0:
            # Partials are summed in groups that begin at fixed positions where the cuts do, so that a row's sum
            # does not depend on the rows beside it.
            skipped = count * 0
            if (C.chunk > 0) and (C.window > 0):
                used = tl.load(seqused_k_ptr + sequence)
                first_token = first_packed // C.group
                start, _ = key_range(used - q_len, tl.minimum(used, C.capacity), first_token, first_token, C)
                skipped = start // C.chunk % PARTIALS
            partials = (partial_acc_ptr, partial_peak_ptr, partial_total_ptr)
            if (MANY > PARTIALS) and (count > PARTIALS):
                acc, peak, total = merged(
                    partials, first_slot, count, skipped, block_row, live, C, MANY, ROWS
                )
            else:
                acc, peak, total = merged(
                    partials, first_slot, count, skipped, block_row, live, C, PARTIALS, ROWS
                )
            store_rows(
                acc, peak, total, q_start + token, kv_head * C.group + packed % C.group, live, kv_head,
                (sinks_ptr, v_descale_ptr, output_scale_ptr), (out_ptr, lse_ptr), C,
            )  # fmt: skip


@triton.jit
def merged(
    partials,
    first_slot,
    count,
    skipped,
    block_row,
    live,
    C: tl.constexpr,
    PARTIALS: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Softmax state of some rows of a unit: `count` partial ones, of which a tile of PARTIALS is merged at a time."""
    partial_acc_ptr, partial_peak_ptr, partial_total_ptr = partials
    column = tl.arange(0, C.padded_value_dim)
    acc = tl.full([ROWS, C.padded_value_dim], 0.0, tl.float32)
    peak = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.full([ROWS], 0.0, tl.float32)
    for first in range(-skipped, count, PARTIALS):
        index = first + tl.arange(0, PARTIALS)  # [PARTIALS] int64
        slot = first_slot + index
        if C.chunk == 0:
            # The run in which the unit begins stores it second, the later ones store it first.
            slot += index + (index == 0).to(tl.int64)
        stored = ((index >= 0) & (index < count))[:, None] & live[None, :]  # [PARTIALS, ROWS]
        at = slot[:, None] * C.stored_rows + block_row[None, :]
        peaks = tl.load(partial_peak_ptr + at, mask=stored, other=float("-inf"))
        totals = tl.load(partial_total_ptr + at, mask=stored, other=0.0)
        accs = tl.load(
            partial_acc_ptr + at[:, :, None] * C.value_dim + column[None, None, :],
            mask=stored[:, :, None] & (column < C.value_dim)[None, None, :],
            other=0.0,
        )  # [PARTIALS, ROWS, DV]
        new_peak = tl.maximum(peak, tl.max(peaks, 0))
        base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
        weight = tl.exp2(peaks - base[None, :])
        decay = tl.exp2(peak - base)
        acc = acc * decay[:, None] + tl.sum(accs * weight[:, :, None], 0)
        total = total * decay + tl.sum(totals * weight, 0)
        peak = new_peak
    return acc, peak, total
