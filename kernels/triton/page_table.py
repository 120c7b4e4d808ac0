"""Page tables in one launch, equal to `jaxattn.page_table.build_page_table` bit for bit."""

import functools

import triton
import triton.language as tl

from jaxattn.kernels import _tables
from jaxattn.kernels.triton.launch import launch


@triton.jit
def _listed_slots(slots_ptr, start, listed, position, C: tl.constexpr):
    """Slot of each position of a sequence, -1 where none is listed."""
    inside = (position >= 0) & (position < listed)
    if C.ragged:
        at = start + position
        inside = inside & (at >= 0) & (at < C.slot_columns)
    else:
        at = start * C.slot_columns + position
        inside = inside & (start >= 0) & (start < C.slot_rows)
    return tl.load(slots_ptr + at, mask=inside, other=-1).to(tl.int64)


@triton.jit
def _window_slots(full_to_swa_ptr, slot, C: tl.constexpr):
    """Window-pool slot of each full-pool slot, -1 where there is none."""
    mapped = (slot >= 0) & (slot < C.full_slots)
    return tl.maximum(tl.load(full_to_swa_ptr + slot, mask=mapped, other=-1).to(tl.int64), -1)


@triton.jit
def _entries(first_slot, last_slot, first, last, length, C: tl.constexpr):
    """Table entries from the slots at both ends of each page."""
    page = tl.where(first_slot < 0, -1, first_slot // C.page_size)
    if C.page_size > 1:
        in_order = (last_slot < 0) | (last_slot - first_slot == last - first)
        page = tl.where((first_slot >= 0) & (first_slot % C.page_size == 0) & in_order, page, -1)
    pages = (tl.maximum(length, 0) + C.page_size - 1) // C.page_size
    page = tl.where(pages <= C.max_pages, page, -1)
    return tl.where(first < length, page, 0)


@triton.jit
def page_table_kernel(
    lengths_ptr, slots_ptr, starts_ptr, full_to_swa_ptr, table_ptr, window_table_ptr, C: tl.constexpr
):
    """Build the tables, a stretch of a row in each program."""
    sequence, first_column = stretch_of(tl.program_id(0).to(tl.int64), C)
    start, listed = row_of(starts_ptr, sequence, C)
    length = tl.load(lengths_ptr + sequence)
    write_stretch(
        sequence,
        first_column,
        length,
        start,
        listed,
        slots_ptr,
        full_to_swa_ptr,
        table_ptr,
        window_table_ptr,
        C,
    )


@triton.jit
def stretch_of(program, C: tl.constexpr):
    """The sequence and the first column of a program's stretch."""
    stretches: tl.constexpr = (C.max_pages + C.columns - 1) // C.columns
    return program // stretches, program % stretches * C.columns


@triton.jit
def row_of(starts_ptr, sequence, C: tl.constexpr):
    """Where the slots of a sequence begin in the list, or its row of the pool; and how many slots it lists."""
    start = tl.load(starts_ptr + sequence)
    if C.ragged:
        listed = tl.maximum(tl.load(starts_ptr + sequence + 1) - start, 0)
    else:
        listed = tl.full([], C.slot_columns, tl.int64)
    return start, listed


@triton.jit
def write_stretch(
    sequence,
    first_column,
    length,
    start,
    listed,
    slots_ptr,
    full_to_swa_ptr,
    table_ptr,
    window_table_ptr,
    C: tl.constexpr,
):
    """Write one stretch of one row of the table, and of the window table."""
    column = first_column + tl.arange(0, C.columns)  # [COLUMNS] int64
    first = column * C.page_size
    last = tl.minimum(first + C.page_size, length) - 1
    needed = (first < length) & (column < C.max_pages)
    # Positions that no entry needs are -1, which nothing is loaded for.
    first_slot = _listed_slots(slots_ptr, start, listed, tl.where(needed, first, -1), C)
    last_slot = first_slot
    if C.page_size > 1:
        last_slot = _listed_slots(slots_ptr, start, listed, tl.where(needed, last, -1), C)
    at = sequence * C.max_pages + column
    tl.store(
        table_ptr + at, _entries(first_slot, last_slot, first, last, length, C), mask=column < C.max_pages
    )
    if C.full_slots > 0:
        first_slot = _window_slots(full_to_swa_ptr, first_slot, C)
        last_slot = _window_slots(full_to_swa_ptr, last_slot, C)
        tl.store(
            window_table_ptr + at,
            _entries(first_slot, last_slot, first, last, length, C),
            mask=column < C.max_pages,
        )


# As `_tables.build_page_tables`, without the last two arguments.
build_page_tables = functools.partial(_tables.build_page_tables, kernel=page_table_kernel, launch=launch)
