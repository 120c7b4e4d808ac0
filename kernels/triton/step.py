"""The page tables of a step and a schedule of its plan in one launch, which takes no longer than the tables do."""

import triton
import triton.language as tl
from jaxtyping import Array, Int64, Integer

from jaxattn.kernels._tables import NUM_WARPS, table_launch
from jaxattn.kernels.triton import plan
from jaxattn.kernels.triton.launch import launch
from jaxattn.kernels.triton.page_table import build_page_tables, write_stretch
from jaxattn.plan import Schedule, ScheduleSpec
from jaxattn.slot_rows import SlotRows


def build_tables_and_schedules(
    rows: SlotRows,
    lengths: Int64[Array, "S"],
    page_size: int,
    max_pages: int,
    full_to_swa: Integer[Array, "full_slots"] | None,
    specs: tuple[ScheduleSpec, ...],
    cu_seqlens_q: Int64[Array, "S+1"],
    seqused_k: Int64[Array, "S"],
) -> tuple[tuple[Int64[Array, "S M"], Int64[Array, "S M"] | None], tuple[Schedule, ...]]:
    """Build the tables of `jaxattn.page_table.build_page_tables` and a schedule for each of `specs`.

    The first schedule that the kernel can lay out shares the launch of the tables; each other one has its own.
    """
    table = table_launch(rows, lengths, page_size, max_pages, full_to_swa)
    shared = next((spec for spec in specs if plan.refuse(spec) is None), None)
    if table is None or shared is None:
        tables = build_page_tables(rows, lengths, page_size, max_pages, full_to_swa)
        return tables, tuple(plan.build_schedule(spec, cu_seqlens_q, seqused_k) for spec in specs)
    parts = plan.programs_of(shared)
    results = launch(
        step_kernel,
        (*table.inputs, cu_seqlens_q, seqused_k),
        (*table.outputs, *plan.shapes_of(shared)),
        grid=parts + table.grid,
        num_warps=NUM_WARPS,
        C=table.constants,
        spec=shared,
        L=plan.constants_of(shared),
        PARTS=parts,
    )
    tables, schedule = table.tables(results), plan.schedule_of(shared, results[2:])
    schedules = (
        schedule if spec == shared else plan.build_schedule(spec, cu_seqlens_q, seqused_k) for spec in specs
    )
    return tables, tuple(schedules)


@triton.jit
def step_kernel(
    lengths_ptr,
    slots_ptr,
    starts_ptr,
    full_to_swa_ptr,
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    table_ptr,
    window_table_ptr,
    block_sequence_ptr,
    block_index_ptr,
    tile_start_ptr,
    first_block_ptr,
    active_ptr,
    C: tl.constexpr,
    spec: tl.constexpr,
    L: tl.constexpr,
    PARTS: tl.constexpr,
):
    """Lay out a schedule in the first programs, which start first, and write stretches of the tables in the others."""
    program = tl.program_id(0).to(tl.int64)
    if program < PARTS:
        plan.lay_out(
            program,
            cu_seqlens_q_ptr,
            seqused_k_ptr,
            block_sequence_ptr,
            block_index_ptr,
            tile_start_ptr,
            first_block_ptr,
            active_ptr,
            spec,
            L,
        )
    else:
        write_stretch(
            program - PARTS,
            lengths_ptr,
            slots_ptr,
            starts_ptr,
            full_to_swa_ptr,
            table_ptr,
            window_table_ptr,
            C,
        )
