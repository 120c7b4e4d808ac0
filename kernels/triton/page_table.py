"""Page tables in one launch, equal to `jaxattn.page_table.build_page_table` bit for bit."""

import functools

import triton
import triton.language as tl

from jaxattn.kernels import _tables
from jaxattn.kernels.triton.launch import launch


@triton.jit
def _listed_slots(slots_ptr, start, row, listed, position, C: tl.constexpr):
    """Slot of each position of a sequence, -1 where none is listed."""
    if C.ragged:
        inside = (position < listed) & (start + position >= 0) & (start + position < C.slot_columns)
        at = start + position
    else:
        inside = (row >= 0) & (row < C.slot_rows) & (position < C.slot_columns)
        at = row * C.slot_columns + position
    return tl.load(slots_ptr + at, mask=inside & (position >= 0), other=-1).to(tl.int64)


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
    program = tl.program_id(0).to(tl.int64)
    write_stretch(
        program, lengths_ptr, slots_ptr, starts_ptr, full_to_swa_ptr, table_ptr, window_table_ptr, C
    )


@triton.jit
def write_stretch(
    program, lengths_ptr, slots_ptr, starts_ptr, full_to_swa_ptr, table_ptr, window_table_ptr, C: tl.constexpr
):
    """Write one stretch of one row of the table, and of the window table."""
    stretches: tl.constexpr = (C.max_pages + C.columns - 1) // C.columns
    sequence = program // stretches
    column = program % stretches * C.columns + tl.arange(0, C.columns)  # [COLUMNS] int64
    length = tl.load(lengths_ptr + sequence)
    first = column * C.page_size
    last = tl.minimum(first + C.page_size, length) - 1
    start = tl.load(starts_ptr + sequence)
    row = start
    listed = length
    if C.ragged:
        listed = tl.maximum(tl.load(starts_ptr + sequence + 1) - start, 0)
    needed = (first < length) & (column < C.max_pages)
    # Positions that no entry needs are -1, which nothing is loaded for.
    first_slot = _listed_slots(slots_ptr, start, row, listed, tl.where(needed, first, -1), C)
    last_slot = first_slot
    if C.page_size > 1:
        last_slot = _listed_slots(slots_ptr, start, row, listed, tl.where(needed, last, -1), C)
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
