"""What every metadata builder takes for its page tables, and the one jitted assembly behind them all."""

import functools
import importlib
from typing import TYPE_CHECKING, Any, Required, TypedDict

import jax
import jax.numpy as jnp
from jaxtyping import Bool, Integer

from jaxattn import query_rows
from jaxattn.index64 import IndexArray, as_index, as_integer
from jaxattn.kernels import bookkeeping
from jaxattn.page_table import (
    build_page_tables,
    check_destination,
    debug_check_rows,
    table_width,
)
from jaxattn.plan import AttentionLayers, ScheduleSpec, build_schedules, schedule_specs
from jaxattn.slot_rows import RaggedRows, SlotRows, slot_rows
from jaxattn.window_pool import WindowRows

if TYPE_CHECKING:
    from jaxattn.metadata import AttentionMetadata


class TableInputs(TypedDict, total=False):
    """What every builder takes for its page tables, by keyword.

    Either `kv_indptr` and `kv_indices`, or `req_to_token` and `req_pool_indices`. A row must list the slots of
    `seqused_k` tokens, this call's own tokens with them.

    Attributes:
        page_size: tokens in a page. With 1 the table holds slots, which expresses any row, page-aligned or not
            (see `jaxattn.page_table`).
        max_pages: columns M of the table. Needed with ragged rows; with a pool, `ceil(C / page_size)` by default.
        kv_indptr: int `[S+1]`, start of each sequence's slots in `kv_indices`.
        kv_indices: int `[nnz]`, slots; entries behind `kv_indptr[S]` are slack.
        req_to_token: int `[R, C]`, slots of each row of the request pool.
        req_pool_indices: int `[S]`, the pool row of each sequence, -1 for a padding sequence.
        full_to_swa: int `[slots+1]`, window-pool slot of each full-pool slot, negative where unmapped; given,
            the metadata also gets `swa_page_table`.
        live: bool `[S]`, false for padding sequences; all are live by default.
        lookahead: with a pool, tokens that the tables cover beyond `seqused_k`, as far as they go, so that
            `advance` finds their pages; the pool must list their slots. Ragged rows are covered as far as
            they are listed.
        out: metadata of the same S and M whose tables are donated; the result's tables take their memory.
        plan_for: the attention layers to plan the step for; the metadata gets the `plan` that they share. On a GPU
            one launch makes it along with the tables, where no sequence has more query rows than a block.

    Example:
        >>> import jax, jax.numpy as jnp
        >>> from jaxattn.metadata import decode_metadata
        >>> from jaxattn.plan import AttentionLayers
        >>> layers = AttentionLayers(
        ...     q=jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16),
        ...     k_cache=jax.ShapeDtypeStruct((32, 4, 2, 64), jnp.bfloat16),
        ... )
        >>> step = decode_metadata(
        ...     seqused_k=[5, 2], page_size=4, max_pages=2, kv_indptr=[0, 5, 7],
        ...     kv_indices=[12, 13, 14, 15, 4, 8, 9], plan_for=layers,
        ... )
        >>> step.plan.schedules[0].block_sequence.tolist()
        [0, 1]
    """

    page_size: Required[int]
    max_pages: int | None
    kv_indptr: Integer[IndexArray, "S+1"]
    kv_indices: Integer[IndexArray, "nnz"]
    req_to_token: Integer[IndexArray, "R C"]
    req_pool_indices: Integer[IndexArray, "S"]
    full_to_swa: Integer[IndexArray, "full_slots"] | None
    live: Bool[IndexArray, "S"] | None
    lookahead: int | Integer[IndexArray, ""]
    out: "AttentionMetadata | None"
    plan_for: AttentionLayers | None


def table_options(
    *, page_size, max_pages=None, full_to_swa=None, live=None, lookahead=0, out=None, **slot_lists
) -> tuple[SlotRows, dict[str, Any]]:
    """Check `TableInputs` other than `plan_for` and return the rows with arguments of `assemble`.

    Raises:
        ValueError: an argument has a wrong shape or is out of range, or neither form of slot lists is complete.
        TypeError: an index array is not of an integer dtype, `live` is not bool, or `out` is not int64.
    """
    rows = slot_rows(**slot_lists)
    max_pages = table_width(rows, page_size, max_pages)
    if live is not None:
        live = jnp.asarray(live)
        if live.dtype != jnp.bool_:
            raise TypeError(f"live: expected a bool array, got {live.dtype}")
        if live.shape != (rows.num_seqs,):
            raise ValueError(f"live: expected shape [S] = [{rows.num_seqs}], got {list(live.shape)}")
    if isinstance(lookahead, int) and lookahead < 0:
        raise ValueError(f"lookahead: expected at least 0, got {lookahead}")
    if isinstance(rows, RaggedRows) and not (isinstance(lookahead, int) and lookahead == 0):
        raise ValueError(
            "lookahead: expected none with kv_indptr; list the slots of the tokens to come instead"
        )
    donated = []
    if out is not None:
        donated = [out.page_table] if full_to_swa is None else [out.page_table, out.swa_page_table]
        for destination in donated:
            check_destination(destination, rows.num_seqs, max_pages, "out")
    return rows, {
        "live": live,
        "lookahead": as_index(lookahead, "lookahead"),
        "full_to_swa": None if full_to_swa is None else as_integer(full_to_swa, "full_to_swa"),
        "out": donated,
        "page_size": page_size,
        "max_pages": max_pages,
    }


def planned_schedules(layers, num_seqs, options, q_len, ancestors) -> tuple[ScheduleSpec, ...]:
    """Check `plan_for` and list the schedules that its layers ask for; none where it is None.

    Raises:
        ValueError: the layers have pages of another size than the tables, or fewer or more rows than the tree.
        TypeError: `layers` is no `AttentionLayers`.
    """
    if layers is None:
        return ()
    if not isinstance(layers, AttentionLayers):
        raise TypeError(
            f"plan_for: expected a jaxattn.plan.AttentionLayers, got {type(layers).__name__}; "
            "describe the layers by AttentionLayers(q=..., k_cache=...)"
        )
    if ancestors is not None and layers.q.shape[0] != ancestors.shape[0]:
        raise ValueError(
            f"plan_for: expected the {ancestors.shape[0]} rows of ancestors in q, got {layers.q.shape[0]}"
        )
    return schedule_specs(
        layers,
        num_sequences=num_seqs,
        max_pages=options["max_pages"],
        page_size=options["page_size"],
        max_seqlen_q=q_len,
        tree_words=0 if ancestors is None else ancestors.shape[1],
    )


# keep_unused: the content of a donated table is never read, only its memory is taken.
@functools.partial(
    jax.jit,
    static_argnames=("q_len", "page_size", "max_pages", "specs"),
    donate_argnames=("out",),
    keep_unused=True,
)
def assemble(
    rows,
    lengths,
    added,
    cu_seqlens_q,
    *,
    live,
    lookahead,
    full_to_swa,
    out,
    q_len,
    page_size,
    max_pages,
    specs,
):
    """Compute `((page_table, swa_page_table), cu_seqlens_q, seqused_k, schedules)`, `seqused_k = lengths + added`.

    `cu_seqlens_q` is given, or None for `q_len` rows in every sequence. There is a schedule for each of `specs`.
    """
    starts, seqused_k, covered = _lengths(
        rows, lengths, added, cu_seqlens_q, live, lookahead, q_len, max_pages * page_size
    )
    debug_check_rows(rows, covered, page_size, max_pages)
    if full_to_swa is not None:
        debug_check_rows(WindowRows(rows, full_to_swa), covered, page_size, max_pages)
    step = None
    if specs and bookkeeping() == "triton":
        # Its launch computes the lengths too, so that what is above is left to the checks.
        step = importlib.import_module("jaxattn.kernels.triton.step").assemble(
            rows,
            lengths,
            added,
            cu_seqlens_q,
            live=live,
            lookahead=lookahead,
            full_to_swa=full_to_swa,
            q_len=q_len,
            page_size=page_size,
            max_pages=max_pages,
            specs=specs,
        )
    if step is None:
        tables = build_page_tables(rows, covered, page_size, max_pages, full_to_swa)
        step = tables, starts, seqused_k, build_schedules(specs, starts, seqused_k)
    return step


def _lengths(rows, lengths, added, cu_seqlens_q, live, lookahead, q_len, capacity):
    """Compute `cu_seqlens_q`, `seqused_k` and the positions that the tables cover."""
    alive = jnp.ones(rows.num_seqs, bool) if live is None else live
    alive &= rows.marked_live
    seqused_k = lengths + added
    if cu_seqlens_q is None:
        alive &= (lengths >= 0) & (seqused_k >= q_len)
        cu_seqlens_q = query_rows.constant_cu_seqlens(alive, q_len)
    seqused_k = query_rows.neutralise(jnp.where(alive, seqused_k, 0), cu_seqlens_q)
    # Beyond the table `advance` finds no page, so the lookahead may end with it; the sequence itself may not.
    covered = jnp.minimum(rows.reach(seqused_k, lookahead), capacity)
    covered = jnp.where(seqused_k > 0, jnp.maximum(seqused_k, covered), 0)
    return cu_seqlens_q, seqused_k, covered
