"""From slot lists to one launch of a page-table kernel, whatever language it is in."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int64, Integer

from jaxattn.index64 import IndexArray, cdiv
from jaxattn.kernels._constants import padded
from jaxattn.page_table import xla_page_tables
from jaxattn.slot_rows import RaggedRows, SlotRows

NUM_WARPS = 4
_COLUMNS = 128


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableConstants:
    """Static facts of one launch."""

    num_sequences: int
    max_pages: int
    page_size: int
    ragged: bool
    # Rows and columns of the pool, or 1 and the length of the list of slots.
    slot_rows: int
    slot_columns: int
    # Length of `full_to_swa`, 0 without a window table.
    full_slots: int
    columns: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableLaunch:
    """One launch of a page-table kernel: lengths, slots, starts, `full_to_swa`, then both tables."""

    inputs: tuple[IndexArray | None, ...]
    outputs: tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]
    grid: int
    constants: TableConstants

    def tables(self, results: Sequence[jax.Array]) -> tuple[Int64[Array, "S M"], Int64[Array, "S M"] | None]:
        """Return the table and the window table, None where there is none, from the launch's outputs."""
        return results[0], results[1] if self.constants.full_slots else None


def table_launch(
    rows: SlotRows,
    lengths: Int64[Array, "S"],
    page_size: int,
    max_pages: int,
    full_to_swa: Integer[Array, "full_slots"] | None,
) -> TableLaunch | None:
    """Describe the launch that builds tables as `build_page_tables` does, None where there is nothing to read."""
    num_sequences = rows.num_seqs
    if isinstance(rows, RaggedRows):
        slots, starts = rows.kv_indices, rows.kv_indptr
    else:
        slots, starts = rows.req_to_token, rows.req_pool_indices
    shape = jax.ShapeDtypeStruct((num_sequences, max_pages), jnp.int64)
    full_slots = 0 if full_to_swa is None else full_to_swa.shape[0]
    if 0 in shape.shape or slots.size == 0 or (full_to_swa is not None and full_slots == 0):
        return None
    constants = TableConstants(
        num_sequences=num_sequences,
        max_pages=max_pages,
        page_size=page_size,
        ragged=isinstance(rows, RaggedRows),
        slot_rows=1 if slots.ndim == 1 else slots.shape[0],
        slot_columns=slots.shape[-1],
        full_slots=full_slots,
        columns=min(_COLUMNS, padded(max_pages)),
    )
    return TableLaunch(
        inputs=(lengths, slots, starts, full_to_swa),
        outputs=(shape, shape if full_slots else jax.ShapeDtypeStruct((1,), jnp.int64)),
        grid=num_sequences * cdiv(max_pages, constants.columns),
        constants=constants,
    )


def build_page_tables(
    rows: SlotRows,
    lengths: Int64[Array, "S"],
    page_size: int,
    max_pages: int,
    full_to_swa: Integer[Array, "full_slots"] | None = None,
    *,
    kernel: Any,
    launch: Callable[..., list[jax.Array]],
) -> tuple[Int64[Array, "S M"], Int64[Array, "S M"] | None]:
    """Build the table of checked `rows` for their first `lengths` positions, and the one of the window pool.

    Call it inside an `index64` scope. Entries are those that the module `jaxattn.page_table` describes.

    Args:
        rows: slots of each sequence.
        lengths: `[S]`, positions that the table covers.
        page_size: tokens in a page.
        max_pages: columns M of the tables.
        full_to_swa: window-pool slot of each full-pool slot; None builds no window table.
        kernel: takes lengths, slots, starts, `full_to_swa`, both tables and the constants C.
        launch: runs it.
    """
    table = table_launch(rows, lengths, page_size, max_pages, full_to_swa)
    if table is None:
        return xla_page_tables(rows, lengths, page_size, max_pages, full_to_swa)
    results = launch(
        kernel, table.inputs, table.outputs, grid=table.grid, num_warps=NUM_WARPS, C=table.constants
    )
    return table.tables(results)
