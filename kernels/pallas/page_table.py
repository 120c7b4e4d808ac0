"""Page tables in one launch, equal to `jaxattn.page_table.build_page_table` bit for bit."""

import functools

import jax.numpy as jnp
from jax.experimental import pallas as pl

from jaxattn.index64 import cdiv
from jaxattn.kernels import _tables
from jaxattn.kernels._tables import TableConstants
from jaxattn.kernels.pallas.arithmetic import quotient, remainder
from jaxattn.kernels.pallas.launch import launch
from jaxattn.kernels.pallas.memory import load, store
from jaxattn.page_table import table_entries


def page_table_kernel(lengths, slots, starts, full_to_swa, table, window_table, *, C: TableConstants):
    """Write one stretch of one row of the table, and of the window table."""
    program = pl.program_id(0).astype(jnp.int64)
    stretches = cdiv(C.max_pages, C.columns)
    sequence = quotient(program, stretches)
    column = remainder(program, stretches) * C.columns + jnp.arange(C.columns, dtype=jnp.int64)  # [COLUMNS]
    length = load(lengths, sequence)
    first = column * C.page_size
    last = jnp.minimum(first + C.page_size, length) - 1
    needed = (first < length) & (column < C.max_pages)
    start = load(starts, sequence)
    listed = jnp.maximum(load(starts, sequence + 1) - start, 0) if C.ragged else C.slot_columns

    def slots_at(position):
        # Positions that no entry needs are -1, which nothing is loaded for.
        position = jnp.where(needed, position, -1)
        inside = (position >= 0) & (position < listed)
        if C.ragged:
            at = start + position
            inside = inside & (at >= 0) & (at < C.slot_columns)
        else:
            at = start * C.slot_columns + position
            inside = inside & (start >= 0) & (start < C.slot_rows)
        return load(slots, jnp.where(inside, at, 0), inside, -1).astype(jnp.int64)

    def window_slots(slot):
        mapped = (slot >= 0) & (slot < C.full_slots)
        found = load(full_to_swa, jnp.where(mapped, slot, 0), mapped, -1)
        return jnp.maximum(found.astype(jnp.int64), -1)

    def write(ref, first_slot, last_slot):
        entries = table_entries(first_slot, last_slot, first, length, C.page_size, C.max_pages)
        store(ref, sequence * C.max_pages + column, entries, column < C.max_pages)

    first_slot = slots_at(first)
    last_slot = slots_at(last) if C.page_size > 1 else first_slot
    write(table, first_slot, last_slot)
    if C.full_slots > 0:
        write(window_table, window_slots(first_slot), window_slots(last_slot))


# As `_tables.build_page_tables`, without the last two arguments.
build_page_tables = functools.partial(_tables.build_page_tables, kernel=page_table_kernel, launch=launch)
