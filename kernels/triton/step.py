"""All that a metadata builder computes in one launch, which takes no longer than its page tables alone.

The lengths, equal to those of `jaxattn.table_inputs.assemble` bit for bit; the tables; and a schedule of the plan.
"""

import dataclasses

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Bool, Int64, Integer

from jaxattn.kernels._tables import NUM_WARPS, table_launch
from jaxattn.kernels.triton import plan
from jaxattn.kernels.triton.launch import launch
from jaxattn.kernels.triton.page_table import row_of, stretch_of, write_stretch
from jaxattn.plan import Schedule, ScheduleSpec
from jaxattn.slot_rows import SlotRows

Step = tuple[
    tuple[Int64[Array, "S M"], Int64[Array, "S M"] | None],
    Int64[Array, "S+1"],
    Int64[Array, "S"],
    tuple[Schedule, ...],
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LengthConstants:
    """Static facts of the lengths of a batch."""

    # Query rows of every sequence, or 0 where `cu_seqlens_q` is given.
    q_len: int
    # Whether padding sequences are marked.
    live: bool


def assemble(
    rows: SlotRows,
    lengths: Int64[Array, "S"],
    added: Int64[Array, ""],
    cu_seqlens_q: Int64[Array, "S+1"] | None,
    *,
    live: Bool[Array, "S"] | None,
    lookahead: Int64[Array, ""],
    full_to_swa: Integer[Array, "full_slots"] | None,
    q_len: int | None,
    page_size: int,
    max_pages: int,
    specs: tuple[ScheduleSpec, ...],
) -> Step | None:
    """Compute the tables, `cu_seqlens_q`, `seqused_k` and the schedules, or return None where no launch can.

    Arguments are those of `jaxattn.table_inputs.assemble`. The first schedule that the kernel can lay out shares the
    launch of the tables; each other one has its own.
    """
    table = table_launch(rows, lengths, page_size, max_pages, full_to_swa)
    shared = next((spec for spec in specs if plan.refuse(spec) is None), None)
    if table is None or shared is None:
        return None
    parts = plan.programs_of(shared)
    starts = rows.num_seqs + 1 if cu_seqlens_q is None else 1
    results = launch(
        step_kernel,
        (*table.inputs, added.reshape(1), lookahead.reshape(1), live, cu_seqlens_q),
        (
            *table.outputs,
            *(jax.ShapeDtypeStruct((n,), jnp.int64) for n in (starts, rows.num_seqs)),
            *plan.shapes_of(shared),
        ),
        grid=parts + table.grid,
        num_warps=NUM_WARPS,
        C=table.constants,
        N=LengthConstants(q_len=q_len or 0, live=live is not None),
        spec=shared,
        L=plan.constants_of(shared),
        PARTS=parts,
    )
    tables, seqused_k, schedule = table.tables(results), results[3], plan.schedule_of(shared, results[4:])
    if cu_seqlens_q is None:
        cu_seqlens_q = results[2]
    schedules = (
        schedule if spec == shared else plan.build_schedule(spec, cu_seqlens_q, seqused_k) for spec in specs
    )
    return tables, cu_seqlens_q, seqused_k, tuple(schedules)


@triton.jit
def step_kernel(
    lengths_ptr,
    slots_ptr,
    starts_ptr,
    full_to_swa_ptr,
    added_ptr,
    lookahead_ptr,
    live_ptr,
    given_cu_seqlens_q_ptr,
    table_ptr,
    window_table_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_sequence_ptr,
    block_index_ptr,
    tile_start_ptr,
    first_block_ptr,
    active_ptr,
    C: tl.constexpr,
    N: tl.constexpr,
    spec: tl.constexpr,
    L: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Lay out a schedule in the first programs, which start first, and write stretches of the tables in the others."""
    program = tl.program_id(0).to(tl.int64)
    if program < PARTS:
        _plan(
            program,
            lengths_ptr,
            starts_ptr,
            added_ptr,
            live_ptr,
            given_cu_seqlens_q_ptr,
            cu_seqlens_q_ptr,
            seqused_k_ptr,
            block_sequence_ptr,
            block_index_ptr,
            tile_start_ptr,
            first_block_ptr,
            active_ptr,
            C,
            N,
            spec,
            L,
        )
    else:
        _fill(
            program - PARTS,
            lengths_ptr,
            slots_ptr,
            starts_ptr,
            full_to_swa_ptr,
            added_ptr,
            lookahead_ptr,
            live_ptr,
            given_cu_seqlens_q_ptr,
            table_ptr,
            window_table_ptr,
            C,
            N,
        )


@triton.jit
def _plan(
    part,
    lengths_ptr,
    starts_ptr,
    added_ptr,
    live_ptr,
    given_cu_seqlens_q_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_sequence_ptr,
    block_index_ptr,
    tile_start_ptr,
    first_block_ptr,
    active_ptr,
    C: tl.constexpr,
    N: tl.constexpr,
    spec: tl.constexpr,
    L: tl.constexpr,
):
    """Find the lengths and lay out a part of the schedule; part 0 stores the lengths."""
    sequence = tl.arange(0, L.sequences)  # [S]
    real = sequence < C.num_sequences
    start = tl.load(starts_ptr + sequence, mask=real, other=-1)
    used = _keys_in_use(sequence, real, start, lengths_ptr, added_ptr, live_ptr, given_cu_seqlens_q_ptr, C, N)
    if N.q_len > 0:
        # Padding behind the last live sequence has no query rows.
        count = tl.max(tl.where(used > 0, sequence + 1, 0), 0)
        q_len = tl.where(sequence < count, N.q_len, 0).to(tl.int64)
        if part == 0:
            end = tl.minimum(sequence + 1, count).to(tl.int64) * N.q_len
            tl.store(cu_seqlens_q_ptr + sequence + 1, end, mask=real)
            tl.store(cu_seqlens_q_ptr, 0)
    else:
        q_len = plan.rows_of(given_cu_seqlens_q_ptr, sequence, real)
    if part == 0:
        tl.store(seqused_k_ptr + sequence, used, mask=real)
    plan.lay_out(
        part,
        q_len,
        used,
        block_sequence_ptr,
        block_index_ptr,
        tile_start_ptr,
        first_block_ptr,
        active_ptr,
        spec,
        L,
    )


@triton.jit
def _fill(
    stretch,
    lengths_ptr,
    slots_ptr,
    starts_ptr,
    full_to_swa_ptr,
    added_ptr,
    lookahead_ptr,
    live_ptr,
    given_cu_seqlens_q_ptr,
    table_ptr,
    window_table_ptr,
    C: tl.constexpr,
    N: tl.constexpr,
):
    """Write a stretch of the tables, as far as `advance` may reach."""
    sequence, first_column = stretch_of(stretch, C)
    start, listed = row_of(starts_ptr, sequence, C)
    used = _keys_in_use(sequence, True, start, lengths_ptr, added_ptr, live_ptr, given_cu_seqlens_q_ptr, C, N)
    reach = listed
    if not C.ragged:
        reach = tl.minimum(used + tl.load(lookahead_ptr), listed)
    # The lookahead may end with the table; the sequence itself may not.
    covered = tl.maximum(used, tl.minimum(reach, C.max_pages * C.page_size))
    write_stretch(
        sequence,
        first_column,
        tl.where(used > 0, covered, 0),
        start,
        listed,
        slots_ptr,
        full_to_swa_ptr,
        table_ptr,
        window_table_ptr,
        C,
    )


@triton.jit
def _keys_in_use(
    sequence,
    real,
    start,
    lengths_ptr,
    added_ptr,
    live_ptr,
    cu_seqlens_q_ptr,
    C: tl.constexpr,
    N: tl.constexpr,
):
    """Keys of each sequence, with this call's own tokens; 0 for padding."""
    length = tl.load(lengths_ptr + sequence, mask=real, other=0)
    used = length + tl.load(added_ptr)
    alive = (length >= 0) & (used >= N.q_len)
    if N.q_len == 0:
        alive = plan.rows_of(cu_seqlens_q_ptr, sequence, real) > 0
    if not C.ragged:
        alive = alive & (start >= 0)
    if N.live:
        alive = alive & tl.load(live_ptr + sequence, mask=real, other=False)
    return tl.where(alive & real, used, 0)
