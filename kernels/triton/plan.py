"""The schedule of `jaxattn.plan` in one small kernel, where a step's latency counts."""

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int64

from jaxattn import plan
from jaxattn.kernels.triton.launch import launch
from jaxattn.plan import Schedule, ScheduleSpec

# One program holds the lengths of all sequences in registers.
LARGEST_BATCH = 1024
SEARCH_ROWS = 16


def build_schedule(
    spec: ScheduleSpec, cu_seqlens_q: Int64[Array, "S+1"], seqused_k: Int64[Array, "S"]
) -> Schedule:
    """Lay out the line of work of `spec`: by one kernel where each sequence has at most one block."""
    if spec.blocks_in_sequence > 1 or spec.num_sequences > LARGEST_BATCH:
        return plan.build_schedule(spec, cu_seqlens_q, seqused_k)
    blocks = spec.num_blocks
    shapes = [jax.ShapeDtypeStruct((n,), jnp.int64) for n in (blocks, blocks, blocks + 1, spec.programs, 1)]
    arrays = launch(
        schedule_kernel,
        (cu_seqlens_q, seqused_k),
        shapes,
        grid=-(-spec.programs // SEARCH_ROWS),
        num_warps=4 if spec.num_sequences > 256 else 2,
        spec=spec,
        SEQUENCES=max(16, triton.next_power_of_2(spec.num_sequences)),
        SEARCH_ROWS=SEARCH_ROWS,
    )
    return Schedule(
        block_sequence=arrays[0],
        block_index=arrays[1],
        tile_start=arrays[2],
        first_block=arrays[3],
        active=arrays[4],
        spec=spec,
    )


@triton.jit
def schedule_kernel(
    cu_seqlens_q_ptr,
    seqused_k_ptr,
    block_sequence_ptr,
    block_index_ptr,
    tile_start_ptr,
    first_block_ptr,
    active_ptr,
    spec: tl.constexpr,
    SEQUENCES: tl.constexpr,
    SEARCH_ROWS: tl.constexpr,
):
    """Count, sum and compact the blocks in every program; program 0 stores them, each finds some first blocks."""
    part = tl.program_id(0).to(tl.int64)
    sequence = tl.arange(0, SEQUENCES)  # [S]
    real = sequence < spec.num_sequences
    q_start = tl.load(cu_seqlens_q_ptr + sequence, mask=real, other=0)
    q_len = tl.load(cu_seqlens_q_ptr + sequence + 1, mask=real, other=0) - q_start
    used = tl.load(seqused_k_ptr + sequence, mask=real, other=0)
    live = real & (q_len >= tl.maximum(spec.min_q_len, 1)) & (q_len <= spec.max_q_len)

    stop = tl.maximum(tl.minimum(used, spec.capacity), 0)
    start = stop * 0
    if spec.sliding_window is not None:
        start = tl.minimum(tl.maximum(used - q_len - spec.sliding_window + 1, 0), stop)
    places = tl.maximum((stop + spec.step - 1) // spec.step - start // spec.step, 1)
    places = tl.where(live, places, 0) * spec.num_kv_heads
    end = tl.cumsum(places, 0)  # [S]
    work = tl.sum(places, 0)
    block = tl.cumsum(live.to(tl.int64), 0) - 1  # [S]
    blocks = tl.sum(live.to(tl.int64), 0)

    if part == 0:
        tl.store(block_sequence_ptr + block, sequence.to(tl.int64), mask=live)
        tl.store(tile_start_ptr + block + 1, end, mask=live)
        for first in range(0, spec.num_blocks, SEQUENCES):
            lane = first + sequence
            behind = (lane >= blocks) & (lane < spec.num_blocks)
            tl.store(block_sequence_ptr + lane, tl.zeros_like(end), mask=behind)
            tl.store(tile_start_ptr + lane + 1, tl.zeros_like(end) + work, mask=behind)
            tl.store(block_index_ptr + lane, tl.zeros_like(end), mask=lane < spec.num_blocks)
        tl.store(tile_start_ptr, work * 0)

    # As `jaxattn.plan` chooses it.
    active = tl.minimum(work, spec.programs)
    if spec.chunk == 0:
        units = tl.maximum(blocks, 1) * spec.num_kv_heads
        units_in_run = (units + spec.programs - 1) // spec.programs
        even = tl.where(units % units_in_run == 0, units // units_in_run, 0)
        even = tl.where(units <= spec.programs, spec.programs // units * units, even)
        alike = tl.min(tl.where(live, places, work), 0) == tl.max(places, 0)
        active = tl.where(alike & (even >= spec.enough_programs), tl.minimum(even, work), active)
    if part == 0:
        tl.store(active_ptr, active)
    active = tl.maximum(active, 1)
    program = part * SEARCH_ROWS + tl.arange(0, SEARCH_ROWS)  # [SEARCH_ROWS]
    place = tl.minimum(program, active - 1) * work // active
    passed = live[None, :] & (end[None, :] <= place[:, None])
    found = tl.sum(passed.to(tl.int64), 1)
    found = tl.minimum(found, spec.num_blocks - 1)
    tl.store(first_block_ptr + program, found, mask=program < spec.programs)
