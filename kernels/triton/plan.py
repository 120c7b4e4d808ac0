"""The schedule of `jaxattn.plan` in one small kernel, where a step's latency counts."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Int64

from jaxattn import plan
from jaxattn.index64 import cdiv
from jaxattn.kernels._constants import padded
from jaxattn.kernels.triton.launch import launch
from jaxattn.plan import Schedule, ScheduleSpec

# One program holds the lengths of all sequences in registers.
LARGEST_BATCH = 1024
# Ends of sequences that a program compares at once, to find where runs begin.
_COMPARED = 512
_LARGEST_INT32 = 2**31 - 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class ScheduleConstants:
    """How the programs of a launch lay out a schedule."""

    # Lanes, one for each sequence.
    sequences: int
    # Runs whose first block one program finds.
    search_rows: int
    # Type of places on the line: int32 where the longest line fits.
    index: Any


def constants_of(spec: ScheduleSpec) -> ScheduleConstants:
    """Choose the lanes and the types for a schedule."""
    sequences = padded(spec.num_sequences)
    largest = max(spec.longest_line, spec.runs**2, spec.capacity + spec.step)
    return ScheduleConstants(
        sequences=sequences,
        search_rows=max(1, _COMPARED // sequences),
        index=tl.int32 if largest <= _LARGEST_INT32 else tl.int64,
    )


def refuse(spec: ScheduleSpec) -> str | None:
    """Return why the kernel cannot lay out a schedule, or None."""
    if spec.blocks_in_sequence > 1:
        return f"up to {spec.blocks_in_sequence} blocks of a sequence; the kernel lays out one"
    if spec.num_sequences > LARGEST_BATCH:
        return f"{spec.num_sequences} sequences; the kernel holds up to {LARGEST_BATCH}"
    return None


def programs_of(spec: ScheduleSpec) -> int:
    """Programs that lay out a schedule."""
    return cdiv(spec.runs, constants_of(spec).search_rows)


def shapes_of(spec: ScheduleSpec) -> tuple[jax.ShapeDtypeStruct, ...]:
    """The arrays of a `Schedule`, in order."""
    blocks = spec.num_blocks
    lengths = (blocks, blocks, blocks + 1, spec.runs, 1)
    return tuple(jax.ShapeDtypeStruct((n,), jnp.int64) for n in lengths)


def schedule_of(spec: ScheduleSpec, arrays: Sequence[jax.Array]) -> Schedule:
    """Name the results of a launch."""
    block_sequence, block_index, tile_start, first_block, active = arrays
    return Schedule(
        block_sequence=block_sequence,
        block_index=block_index,
        tile_start=tile_start,
        first_block=first_block,
        active=active,
        spec=spec,
    )


def build_schedule(
    spec: ScheduleSpec, cu_seqlens_q: Int64[Array, "S+1"], seqused_k: Int64[Array, "S"]
) -> Schedule:
    """Lay out the line of work of `spec`: by one kernel where each sequence has at most one block."""
    if refuse(spec) is not None:
        return plan.build_schedule(spec, cu_seqlens_q, seqused_k)
    arrays = launch(
        schedule_kernel,
        (cu_seqlens_q, seqused_k),
        shapes_of(spec),
        grid=programs_of(spec),
        num_warps=4 if spec.num_sequences > 256 else 2,
        spec=spec,
        L=constants_of(spec),
    )
    return schedule_of(spec, arrays)


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
    L: tl.constexpr,
):
    """Lay out a schedule."""
    sequence = tl.arange(0, L.sequences)  # [S]
    real = sequence < spec.num_sequences
    lay_out(
        tl.program_id(0).to(tl.int64),
        rows_of(cu_seqlens_q_ptr, sequence, real),
        tl.load(seqused_k_ptr + sequence, mask=real, other=0),
        block_sequence_ptr,
        block_index_ptr,
        tile_start_ptr,
        first_block_ptr,
        active_ptr,
        spec,
        L,
    )


@triton.jit
def rows_of(cu_seqlens_q_ptr, sequence, real):
    """Query rows of each sequence."""
    begin = tl.load(cu_seqlens_q_ptr + sequence, mask=real, other=0)
    return tl.load(cu_seqlens_q_ptr + sequence + 1, mask=real, other=0) - begin


@triton.jit
def lay_out(
    part,
    q_len,
    used,
    block_sequence_ptr,
    block_index_ptr,
    tile_start_ptr,
    first_block_ptr,
    active_ptr,
    spec: tl.constexpr,
    L: tl.constexpr,
):
    """Count, sum and compact the blocks in every part; part 0 stores them, each finds some first blocks.

    Sequences have `q_len` query rows and `used` keys, both [S]; lanes behind the last one have no rows.
    """
    sequence = tl.arange(0, L.sequences)  # [S]
    live = (q_len >= tl.maximum(spec.min_q_len, 1)) & (q_len <= spec.max_q_len)
    block = tl.cumsum(live.to(L.index), 0) - 1  # [S]
    if spec.num_blocks < spec.num_sequences:
        # Rows that are more than the tokens have no block.
        live = live & (block < spec.num_blocks)
    blocks = tl.sum(live.to(L.index), 0)

    stop = tl.maximum(tl.minimum(used, spec.capacity), 0)
    places = (stop.to(L.index) + spec.step - 1) // spec.step
    if spec.sliding_window is not None:
        start = tl.minimum(tl.maximum(used - q_len - spec.sliding_window + 1, 0), stop)
        places -= start.to(L.index) // spec.step
    places = tl.where(live, tl.maximum(places, 1) * spec.heads_in_line, 0)
    end = tl.cumsum(places, 0)  # [S]
    work = tl.sum(places, 0)

    if part == 0:
        tl.store(block_sequence_ptr + block, sequence.to(tl.int64), mask=live)
        tl.store(tile_start_ptr + block + 1, end.to(tl.int64), mask=live)
        # A sequence has at most one block, so there are no more blocks than lanes.
        behind = (sequence >= blocks) & (sequence < spec.num_blocks)
        nothing = sequence.to(tl.int64) * 0
        tl.store(block_sequence_ptr + sequence, nothing, mask=behind)
        tl.store(tile_start_ptr + sequence + 1, nothing + work, mask=behind)
        tl.store(block_index_ptr + sequence, nothing, mask=sequence < spec.num_blocks)
        tl.store(tile_start_ptr, 0)

    # As `jaxattn.plan` chooses it.
    active = tl.minimum(work, spec.runs)
    if spec.chunk == 0:
        units = tl.maximum(blocks, 1) * spec.heads_in_line
        units_in_run = (units + spec.runs - 1) // spec.runs
        even = tl.where(units % units_in_run == 0, units // units_in_run, 0)
        even = tl.where(units <= spec.runs, spec.runs // units * units, even)
        alike = blocks * tl.max(places, 0) == work
        active = tl.where(alike & (even >= spec.enough_runs), tl.minimum(even, work), active)
    if part == 0:
        tl.store(active_ptr, active.to(tl.int64))
    active = tl.maximum(active, 1)
    run = part * L.search_rows + tl.arange(0, L.search_rows)  # [SEARCH_ROWS] int64
    begun = tl.minimum(run.to(L.index), active - 1)
    # begun * work // active, without a product longer than the line
    place = begun * (work // active) + begun * (work % active) // active
    passed = live[None, :] & (end[None, :] <= place[:, None])
    found = tl.sum(passed.to(L.index), 1)
    # Without work every place has been passed.
    found = tl.where(work > 0, found, spec.num_blocks - 1)
    tl.store(first_block_ptr + run, found.to(tl.int64), mask=run < spec.runs)
