"""Merge of partial softmax states: a few output rows a program, a tile of partials at a time."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxattn.index64 import cdiv
from jaxattn.kernels._constants import CUT_UNIT_FIELDS, AttentionConstants
from jaxattn.kernels.pallas.arithmetic import quotient, remainder
from jaxattn.kernels.pallas.memory import load
from jaxattn.kernels.pallas.output import store_output
from jaxattn.kernels.pallas.walk import Softmax
from jaxattn.plan import key_range


def reduce_kernel(
    cu_seqlens_q,
    seqused_k,
    block_sequence,
    block_index,
    tile_start,
    sinks,
    v_descale,
    output_scale,
    partial_acc,
    partial_peak,
    partial_total,
    cut_unit,
    _out,
    _lse,
    out,
    lse,
    *,
    C: AttentionConstants,
    PARTIALS: int,
    MANY: int,
    ROWS: int,
):
    """Merge the partial results of each (block, head) unit that `attention_kernel` cut, in the order of keys.

    A unit is found by its number; where cuts follow from the load balance and units are more than programs, by the
    program in which it begins.
    """
    program = pl.program_id(0).astype(jnp.int64)
    parts = cdiv(C.stored_rows, ROWS)
    place = quotient(program, parts)
    block_row = remainder(program, parts) * ROWS + jnp.arange(ROWS, dtype=jnp.int64)  # [ROWS]
    # Partials are summed in groups that begin at fixed positions where the cuts do, so that a row's sum does not
    # depend on the rows beside it.
    skipped = jnp.zeros_like(place)
    if C.chunk > 0:
        block, kv_head = quotient(place, C.num_kv_heads), remainder(place, C.num_kv_heads)
        block_start = load(tile_start, block)
        count = quotient(load(tile_start, block + 1) - block_start, C.heads_in_line)
        first_slot = remainder(kv_head, C.heads_abreast) * C.longest_line + block_start
        if C.heads_in_line > 1:
            first_slot = first_slot + quotient(kv_head, C.heads_abreast) * count
        sequence = load(block_sequence, block)
        q_start = load(cu_seqlens_q, sequence)
        q_len = load(cu_seqlens_q, sequence + 1) - q_start
        first_packed = load(block_index, block) * C.rows_in_block
        if C.window > 0:
            used = load(seqused_k, sequence)
            first_token = quotient(first_packed, C.group)
            start, _ = key_range(
                used - q_len,
                jnp.minimum(used, C.capacity),
                first_token,
                first_token,
                causal=C.causal,
                tree=C.tree_words > 0,
                sliding_window=C.window,
            )
            skipped = remainder(quotient(start, C.chunk), PARTIALS)
    else:
        count, q_start, q_len, first_packed, kv_head, first_place = (
            load(cut_unit, place * CUT_UNIT_FIELDS + field) for field in range(6)
        )
        # They are below those numbers, which says that they fit any offset.
        kv_head = remainder(kv_head, C.num_kv_heads)
        first_slot = 2 * remainder(first_place, C.programs)
        if C.described_by_unit:
            # Units of no live block are described by nobody.
            block = quotient(place, C.num_kv_heads)
            count = jnp.where(load(tile_start, block) == load(tile_start, block + 1), 0, count)

    packed = first_packed + block_row  # [ROWS]
    token = quotient(packed, C.group)
    live = (block_row < C.stored_rows) & (token < q_len)

    def step(partials, turn, state):
        acc, peak, total = state
        index = turn * partials - skipped + jnp.arange(partials, dtype=jnp.int64)  # [PARTIALS]
        slot = first_slot + index
        if C.chunk == 0:
            # The run in which the unit begins stores it second, the later ones store it first.
            slot = slot + index + (index == 0)
        stored = ((index >= 0) & (index < count))[:, None] & live[None, :]  # [PARTIALS, ROWS]
        at = slot[:, None] * C.stored_rows + block_row[None, :]
        peaks = load(partial_peak, at, stored, -jnp.inf)
        totals = load(partial_total, at, stored)
        column = jnp.arange(C.padded_value_dim, dtype=jnp.int64)
        accs = load(
            partial_acc,
            at[:, :, None] * C.value_dim + column[None, None, :],
            stored[:, :, None] & (column < C.value_dim)[None, None, :],
        )  # [PARTIALS, ROWS, DV]
        new_peak = jnp.maximum(peak, jnp.max(peaks, 0))
        base = jnp.where(new_peak == -jnp.inf, 0.0, new_peak)
        weight = lax.exp2(peaks - base[None, :])
        decay = lax.exp2(peak - base)
        acc = acc * decay[:, None] + jnp.sum(accs * weight[:, :, None], 0)
        return acc, new_peak, total * decay + jnp.sum(totals * weight, 0)

    def merged(partials):
        return lax.fori_loop(
            jnp.int64(0),
            quotient(count + skipped + (partials - 1), partials),
            functools.partial(step, partials),
            (
                jnp.zeros((ROWS, C.padded_value_dim), jnp.float32),
                jnp.full((ROWS,), -jnp.inf, jnp.float32),
                jnp.zeros((ROWS,), jnp.float32),
            ),
        )

    @pl.when((count > 0) & (jnp.max(live.astype(jnp.int32)) > 0))
    def _merge():
        if MANY > PARTIALS:
            state = lax.cond(count > PARTIALS, lambda: merged(MANY), lambda: merged(PARTIALS))
        else:
            state = merged(PARTIALS)
        store_output(
            Softmax(*state), q_start + token, kv_head * C.group + remainder(packed, C.group), live, kv_head,
            sinks, v_descale, output_scale, out, lse, C,
        )  # fmt: skip
