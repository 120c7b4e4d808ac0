"""Paged attention over a schedule of equal work: programs walk runs of KV tiles across sequences.

The work of a launch is one line of tiles: for each block of query rows (`jaxattn.plan`), the tiles of keys that the
block sees. Run `r` holds the tiles `[r * total / active, (r + 1) * total / active)`, and `C.heads_abreast` programs
walk it, each for its KV heads. Where a run covers a whole (block, head) unit, output rows are written; where it
covers a part, the softmax state is written as a partial result, of which a program can have two: one that began
before its run and one that ends behind it. `reduce_kernel` merges them.
"""

import triton
import triton.language as tl

from jaxattn.kernels import _constants
from jaxattn.kernels.triton.formats import decode, stored_pointer
from jaxattn.kernels.triton.keys import (
    all_known,
    bare_range,
    hidden_zero,
    key_range,
    page_ids,
    path_of,
    unknown_pages,
)
from jaxattn.kernels.triton.output import fill_unowned_rows, store_rows
from jaxattn.kernels.triton.walk import first_tile, fresh_state, walk

CUT_UNIT_FIELDS = tl.constexpr(_constants.CUT_UNIT_FIELDS)


@triton.jit
def place_of_block(block_sequence_ptr, block_index_ptr, block, C: tl.constexpr):
    """The sequence of a block, and the first of the sequence's query rows that it holds."""
    return tl.load(block_sequence_ptr + block), tl.load(block_index_ptr + block) * C.rows_in_block


@triton.jit
def row_exponents(q_ptr, row, live, C: tl.constexpr):
    """Bits of the power of two that brings each query row to between 1 and 2."""
    column = tl.arange(0, C.padded_dim)
    mask = live[:, None] & (column < C.head_dim)[None, :]
    q = decode(
        tl.load(q_ptr + row[:, None] * C.head_dim + column[None, :], mask, 0.0), C.q_format, tl.float32
    )
    exponent = tl.max(tl.abs(q), 1).to(tl.int32, bitcast=True) & 0x7F800000
    return tl.minimum(tl.maximum(exponent, 0x20000000), 0x7E800000)


@triton.jit
def query_columns(q_ptr, row, column, live, exponent, negative, C: tl.constexpr):
    """Load some columns of query rows, counted from `q_ptr`, in the compute type."""
    mask = live[:, None] & (column < C.head_dim)[None, :]
    stored = tl.load(q_ptr + row[:, None] * C.head_dim + column[None, :], mask, 0.0)
    if C.scale_rows:
        q = decode(stored, C.q_format, tl.float32)
        q = (q * (0x7F000000 - exponent).to(tl.float32, bitcast=True)[:, None]).to(C.compute)
    else:
        q = decode(stored, C.q_format, C.compute)
    return tl.where(negative, -q, q)


@triton.jit
def scaled_rows(q_ptr, row, live, q_descale_ptr, k_descale_ptr, kv_head, C: tl.constexpr):
    """Load query rows in the compute type, and the positive factor from their products with K to scores."""
    q_ptr = stored_pointer(q_ptr, C.q_format)
    scale = tl.full([], C.softmax_scale, tl.float32)
    if C.q_descale:
        scale = scale * tl.load(q_descale_ptr + kv_head)
    if C.k_descale:
        scale = scale * tl.load(k_descale_ptr + kv_head)
    exponent = row
    row_scale = tl.full([C.block_rows], 1.0, tl.float32)
    if C.scale_rows:
        exponent = row_exponents(q_ptr, row, live, C)
        row_scale = exponent.to(tl.float32, bitcast=True)
    column = tl.arange(0, C.product_dim)
    if C.k_unpack != "":
        column = column // 2 * 4 + column % 2
        q = (
            query_columns(q_ptr, row, column, live, exponent, scale < 0.0, C),
            query_columns(q_ptr, row, column + 2, live, exponent, scale < 0.0, C),
        )
    else:
        q = (query_columns(q_ptr, row, column, live, exponent, scale < 0.0, C),)
    # A factor of 0 would turn the -inf of a masked score into NaN.
    return q, tl.maximum(tl.abs(scale) * row_scale, 1e-35)


@triton.jit
def store_partial(acc, peak, total, slot, live, acc_ptr, peak_ptr, total_ptr, C: tl.constexpr):
    """Store a softmax state under its slot, for `reduce_kernel`."""
    row = tl.arange(0, C.block_rows)
    column = tl.arange(0, C.padded_value_dim)
    at = slot * C.stored_rows + row  # [BM] int64
    mask = live & (row < C.stored_rows)
    tl.store(
        acc_ptr + at[:, None] * C.value_dim + column[None, :],
        acc,
        mask=mask[:, None] & (column < C.value_dim)[None, :],
    )
    tl.store(peak_ptr + at, peak, mask=mask)
    tl.store(total_ptr + at, total, mask=mask)


@triton.jit
def attention_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    page_table_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_sequence_ptr,
    block_index_ptr,
    tile_start_ptr,
    first_block_ptr,
    active_ptr,
    ancestors_ptr,
    depths_ptr,
    sinks_ptr,
    alibi_slopes_ptr,
    q_descale_ptr,
    k_descale_ptr,
    v_descale_ptr,
    output_scale_ptr,
    _out_ptr,
    _lse_ptr,
    out_ptr,
    lse_ptr,
    partial_acc_ptr,
    partial_peak_ptr,
    partial_total_ptr,
    cut_unit_ptr,
    C: tl.constexpr,
):
    """Compute the output rows of whole (block, head) units and partial results of the others."""
    program = tl.program_id(0).to(tl.int64)
    if C.uncut:
        # Blocks at the end of a sequence see the most keys, so they begin first.
        program = C.programs - 1 - program
    run = program // C.heads_abreast
    lane = program % C.heads_abreast
    # Loads that wait for no other come first.
    work = tl.load(tile_start_ptr + C.num_blocks)
    active = work if C.uncut else tl.load(active_ptr)
    block = run if C.uncut else tl.load(first_block_ptr + run)
    sequence, first_row = place_of_block(block_sequence_ptr, block_index_ptr, block, C)
    if C.fill:
        fill_unowned_rows(cu_seqlens_q_ptr, out_ptr, lse_ptr, program, C)
    if C.uncut:
        # Each block is one place of the line.
        position = run
        end = tl.minimum(run + 1, work)
    else:
        position = work
        end = work
        if run < active:
            position = run * work // active
            end = (run + 1) * work // active

    if (C.chunk == 0) and not C.described_by_unit:
        # Where no unit begins in this run and goes on behind it, `reduce_kernel` has nothing to merge.
        tl.store(cut_unit_ptr + program * CUT_UNIT_FIELDS, position * 0)

    table_ptr = page_table_ptr + hidden_zero()
    row = tl.arange(0, C.block_rows)  # [BM]
    while position < end:
        block_start = block
        block_end = block + 1
        if not C.uncut:
            block_start = tl.load(tile_start_ptr + block)
            block_end = tl.load(tile_start_ptr + block + 1)
        tiles = block_end - block_start
        unit_start = block_start
        kv_head = lane
        if C.heads_in_line > 1:
            tiles = tiles // C.heads_in_line
            passed = (position - block_start) // tiles
            unit_start += passed * tiles
            kv_head += passed * C.heads_abreast
        begun = position - unit_start
        done = tl.minimum(end - unit_start, tiles)
        if C.chunk > 0:
            done = begun + 1

        if not C.uncut:
            sequence, first_row = place_of_block(block_sequence_ptr, block_index_ptr, block, C)
        q_start = tl.load(cu_seqlens_q_ptr + sequence)
        q_len = tl.load(cu_seqlens_q_ptr + sequence + 1) - q_start
        used = tl.load(seqused_k_ptr + sequence)
        keys = tl.minimum(used, C.capacity)
        context = used - q_len
        first_token = first_row // C.group
        last_token = tl.minimum((first_row + C.rows_in_block - 1) // C.group, q_len - 1)
        start, stop = key_range(context, keys, first_token, last_token, C)
        first = start // C.tile + begun
        last = start // C.tile + done
        if C.chunk > 0:
            chunk = start // C.chunk + begun
            first = tl.maximum(chunk * C.tiles_in_chunk, start // C.tile)
            last = tl.minimum((chunk + 1) * C.tiles_in_chunk, (stop + C.tile - 1) // C.tile)

        # Positions within a sequence fit 32 bits, whatever the pool; they never enter an address unwidened. A length
        # beyond the table's row, which is an error that debug.py reports, must not wrap either.
        context = tl.minimum(context, 0x7FFFFFFF - q_len).to(tl.int32)
        start = start.to(tl.int32)
        stop = stop.to(tl.int32)
        first = first.to(tl.int32)
        last = last.to(tl.int32)
        q_len = q_len.to(tl.int32)
        # Tokens from the block's first and heads from the group's first on: what they add to the address of q is known
        # before the block is.
        local_row = row
        if C.rows_in_block % C.group != 0:
            local_row += (first_row % C.group).to(tl.int32)
        local_token, local_head = local_row // C.group, local_row % C.group
        token = first_token.to(tl.int32) + local_token
        live = token < q_len
        if C.rows_in_block < C.block_rows:
            live = live & (row < C.rows_in_block)
        head = kv_head * C.group + local_head  # [BM]
        buffer_row = q_start + tl.minimum(token, q_len - 1)  # [BM]
        row_position = context + token
        if C.tree_words > 0:
            row_position = context + tl.load(depths_ptr + buffer_row)
        last_seen = row_position if C.path_keys else context + token
        limit = tl.minimum(last_seen, stop - 1) if C.causal else tl.zeros_like(token) + (stop - 1)
        limit = tl.where(live, limit, -1)
        floor = row_position - (C.window - 1)
        slope = tl.full([C.block_rows], 0.0, tl.float32)
        if C.alibi:
            slope = tl.load(alibi_slopes_ptr + head, mask=live, other=0.0)

        rows = (limit, floor, row_position, slope)
        path = path_of(ancestors_ptr, q_start + first_token, C) if C.path_keys else context
        span = (start, stop, context, path)
        tree = (ancestors_ptr, depths_ptr, q_start, q_len, buffer_row)
        pointers = (
            table_ptr + sequence * C.table_width,
            stored_pointer(k_ptr, C.k_format) + kv_head * C.head_dim,
            stored_pointer(v_ptr, C.v_format) + kv_head * C.value_dim,
        )
        # The page ids that decide about bare tiles, and those that the loops begin with, come beside the query rows.
        bare_first = last
        bare = last * 0
        if C.bare_tiles:
            bare_first, bare_last = bare_range(context, start, stop, first_token, last_token, C)
            bare_first = tl.minimum(tl.maximum(bare_first, first), last)
            bare = tl.maximum(tl.minimum(bare_last, last) - bare_first, 0)
            unknown = unknown_pages(pointers[0], bare_first, bare_first + bare, C)
        page = page_ids(pointers[0], first_tile(first, bare_first, bare, C), span, C, False)
        bare_page = page
        if C.bare_tiles and not C.one_loop:
            bare_page = page_ids(pointers[0], bare_first, span, C, False)
        first_query = (q_start + first_token) * C.num_heads + kv_head * C.group
        local_query = local_token * C.num_heads + local_head  # [BM]
        q, scale = scaled_rows(
            q_ptr + first_query * C.head_dim, local_query, live, q_descale_ptr, k_descale_ptr, kv_head, C
        )
        if C.bare_tiles:
            # A page id outside the pool is rare: only where there is one are all tiles masked.
            known = all_known(unknown, pointers[0], bare_first, bare_first + bare, C)
            if not known:
                bare = bare * 0
                page = page_ids(pointers[0], first, span, C, False)
        acc, peak, total = walk(
            fresh_state(C), q, scale, rows, span, tree, pointers, page, first, last, bare_first, bare, C, True
        )
        if C.bare_tiles and not C.one_loop:
            bare_end = bare_first + bare
            acc, peak, total = walk(
                (acc, peak, total), q, scale, rows, span, tree, pointers, bare_page,
                bare_first, bare_end, bare_end, 0, C, False,
            )  # fmt: skip

        described = block * C.num_kv_heads + kv_head if C.described_by_unit else program
        field = cut_unit_ptr + described * CUT_UNIT_FIELDS
        if C.uncut or ((C.chunk == 0) and (done - begun == tiles)):
            if C.described_by_unit and not C.uncut:
                tl.store(field, position * 0)
            store_rows(
                acc, peak, total, buffer_row, head, live, kv_head,
                (sinks_ptr, v_descale_ptr, output_scale_ptr), (out_ptr, lse_ptr), C,
            )  # fmt: skip
        else:
            # Pieces of a unit lie one after another.
            slot = 2 * (lane * C.runs + run) + (begun == 0).to(tl.int64)
            if C.chunk > 0:
                slot = lane * C.longest_line + position
            elif begun == 0:
                tl.store(field, ((unit_start + tiles) * active - 1) // work - run + 1)
                tl.store(field + 1, q_start)
                tl.store(field + 2, q_len)
                tl.store(field + 3, first_row)
                tl.store(field + 4, kv_head)
                tl.store(field + 5, lane * C.runs + run)
            store_partial(
                acc, peak, total, slot, live, partial_acc_ptr, partial_peak_ptr, partial_total_ptr, C
            )
        position = unit_start + done
        block += (position == block_end).to(tl.int64)
