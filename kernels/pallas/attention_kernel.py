"""Paged attention over a schedule of equal work: programs walk runs of KV tiles across sequences.

The line of work is the one of `jaxattn.plan`. Run `r` holds the places `[r * total / active, (r + 1) * total /
active)`, and `C.heads_abreast` programs walk it, each for its KV heads. Where a run covers a whole (block, head)
unit, output rows are written; where it covers a part, the softmax state is written as a partial result, of which a
program can have two: one that began before its run and one that ends behind it. `reduce_kernel` merges them.
"""

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl

from jaxattn.kernels._constants import CUT_UNIT_FIELDS, AttentionConstants
from jaxattn.kernels.pallas.arithmetic import quotient, remainder
from jaxattn.kernels.pallas.block import find_unit, read_block
from jaxattn.kernels.pallas.memory import load, store, store_rows
from jaxattn.kernels.pallas.output import fill_unowned_rows, store_output
from jaxattn.kernels.pallas.queries import scaled_rows
from jaxattn.kernels.pallas.walk import Softmax, walk


def attention_kernel(
    q,
    k_cache,
    v_cache,
    page_table,
    cu_seqlens_q,
    seqused_k,
    block_sequence,
    block_index,
    tile_start,
    first_block,
    active,
    ancestors,
    depths,
    sinks,
    alibi_slopes,
    q_descale,
    k_descale,
    v_descale,
    output_scale,
    _out,
    _lse,
    out,
    lse,
    partial_acc,
    partial_peak,
    partial_total,
    cut_unit,
    *,
    C: AttentionConstants,
):
    """Compute the output rows of whole (block, head) units and partial results of the others."""
    program = pl.program_id(0).astype(jnp.int64)
    if C.uncut:
        # Blocks at the end of a sequence see the most keys, so they begin first.
        program = C.programs - 1 - program
    if C.fill:
        fill_unowned_rows(cu_seqlens_q, out, lse, program, C)
    run, lane = quotient(program, C.heads_abreast), remainder(program, C.heads_abreast)
    # Pieces of a unit lie one after another.
    place = lane * C.runs + run
    work = load(tile_start, np.int64(C.num_blocks))
    if C.uncut:
        # Each block is one place of the line.
        active, begin, end, begin_block = work, run, jnp.minimum(run + 1, work), run
    else:
        active = load(active, np.int64(0))

        def cut(number):
            return jnp.where(number < active, quotient(number * work, jnp.maximum(active, 1)), work)

        begin, end, begin_block = cut(run), cut(run + 1), load(first_block, run)
    if C.chunk == 0 and not C.described_by_unit:
        # Where no unit begins in this run and goes on behind it, `reduce_kernel` has nothing to merge.
        store_numbers(cut_unit, program * CUT_UNIT_FIELDS, ())

    def attend(state):
        position, number = state
        unit = find_unit(tile_start, number, position, lane, C)
        begun = position - unit.start
        done = jnp.minimum(end - unit.start, unit.places)
        if C.chunk > 0:
            done = begun + 1
        block, first_row = read_block(
            unit, block_sequence, block_index, cu_seqlens_q, seqused_k, depths, alibi_slopes, C
        )
        first, last = tiles_between(block, begun, done, C)
        rows, scale = scaled_rows(q, q_descale, k_descale, block, C)
        state = walk(rows, scale, block, page_table, k_cache, v_cache, ancestors, depths, first, last, C)

        described = unit.block * C.num_kv_heads + unit.kv_head if C.described_by_unit else program

        def finish():
            if C.described_by_unit and not C.uncut:
                store_numbers(cut_unit, described * CUT_UNIT_FIELDS, ())
            store_output(
                state, block.row, block.head, block.live, unit.kv_head,
                sinks, v_descale, output_scale, out, lse, C,
            )  # fmt: skip

        def suspend(slot):
            store_partial(state, slot, block.live, partial_acc, partial_peak, partial_total, C)

        def suspend_run():
            suspend(2 * place + (begun == 0))

            @pl.when(begun == 0)
            def _describe():
                pieces = quotient((unit.start + unit.places) * active - 1, work) - run + 1
                fields = (pieces, block.q_start, block.q_len, first_row, unit.kv_head, place)
                store_numbers(cut_unit, described * CUT_UNIT_FIELDS, fields)

        if C.uncut:
            finish()
        elif C.chunk > 0:
            suspend(lane * C.longest_line + position)
        else:
            lax.cond(done - begun == unit.places, finish, suspend_run)
        position = unit.start + done
        return position, number + (position == unit.block_end)

    lax.while_loop(lambda state: state[0] < end, attend, (begin, begin_block))


def tiles_between(block, begun, done, C: AttentionConstants):
    """First tile of keys and one past the last, int32, of the places [begun, done) of a unit."""
    start, stop = (position.astype(jnp.int64) for position in (block.start, block.stop))
    first_tile = quotient(start, C.tile)
    if C.chunk == 0:
        return (first_tile + begun).astype(jnp.int32), (first_tile + done).astype(jnp.int32)
    chunk = quotient(start, C.chunk) + begun
    first = jnp.maximum(chunk * C.tiles_in_chunk, first_tile)
    last = jnp.minimum((chunk + 1) * C.tiles_in_chunk, quotient(stop + (C.tile - 1), C.tile))
    return first.astype(jnp.int32), last.astype(jnp.int32)


def store_partial(
    state: Softmax, slot, live, partial_acc, partial_peak, partial_total, C: AttentionConstants
):
    """Store a softmax state under its slot, for `reduce_kernel`."""
    row = jnp.arange(C.block_rows, dtype=jnp.int64)
    at = slot * C.stored_rows + row  # [BM]
    live = live & (row < C.stored_rows)
    store_rows(partial_acc, at, C.value_dim, state.acc, live)
    store(partial_peak, at, state.peak, live)
    store(partial_total, at, state.total, live)


def store_numbers(cut_unit, at, numbers):
    """Store the description of a unit; fields without a number are 0."""
    lane = jnp.arange(CUT_UNIT_FIELDS, dtype=jnp.int64)
    fields = jnp.zeros_like(lane)
    for place, number in enumerate(numbers):
        fields = jnp.where(lane == place, number.astype(jnp.int64), fields)
    store(cut_unit, at + lane, fields, lane >= 0)
