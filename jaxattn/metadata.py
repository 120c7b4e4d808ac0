"""AttentionMetadata, what one attention call must know of its batch, and one builder per forward mode."""

import dataclasses
from typing import Any, Unpack

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int64, Integer, UInt64

from jaxattn import query_rows
from jaxattn.index64 import IndexArray, as_index, cdiv, index64
from jaxattn.plan import Plan
from jaxattn.table_inputs import TableInputs, assemble, planned_schedules, table_options


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionMetadata:
    """The sequences of one attention call: page tables, query rows and lengths, all int64.

    A padding sequence has `seqused_k == 0`: no key is read, nothing is written for it, and its query rows get
    `out = 0`. Behind the last live sequence padding sequences have no query rows either; one that lies between
    live ones keeps its rows where every sequence has the same number of rows, so that rows stay where they are.

    Attributes:
        page_table: `[S, M]`, physical page of each logical page; -1 where a live page has no id, 0 behind
            the live pages.
        cu_seqlens_q: `[S+1]`, start of each sequence's query rows.
        seqused_k: `[S]`, keys in the cache, with this call's own tokens.
        ancestors: `[T, W]`, bit j of row i is set iff row j of the sequence is i or an ancestor of i.
        swa_page_table: `[S, M]`, the table of the sliding-window pool.
        plan: a `jaxattn.plan.Plan` for these lengths, shared by all layers; a builder makes it where it is given
            `plan_for`.
        max_seqlen_q: upper bound of the query rows of a sequence (static).
        page_size: tokens in a page of the tables (static); the cache must be viewed with the same page size.
        mode: the forward mode that the metadata was built for (static).

    Example:
        >>> import numpy as np
        >>> from jaxattn.metadata import decode_metadata
        >>> pool = np.array([[4, 5, 6, 7, 2, 3]])
        >>> step = decode_metadata(seqused_k=[4], page_size=2, lookahead=2, req_to_token=pool, req_pool_indices=[0])
        >>> [step.slots(1).tolist(), step.advance(1).slots(1).tolist(), step.advance(2).slots(1).tolist()]
        [[7], [2], [3]]
    """

    page_table: Int64[Array, "S M"]
    cu_seqlens_q: Int64[Array, "S+1"]
    seqused_k: Int64[Array, "S"]
    ancestors: UInt64[Array, "T W"] | None = None
    swa_page_table: Int64[Array, "S M"] | None = None
    plan: Any = None
    max_seqlen_q: int = dataclasses.field(metadata={"static": True})
    page_size: int = dataclasses.field(metadata={"static": True})
    mode: str = dataclasses.field(metadata={"static": True})

    @property
    def num_seqs(self) -> int:
        """Number of sequences S, padding sequences included."""
        return self.seqused_k.shape[0]

    def for_window_pool(self) -> "AttentionMetadata":
        """Return the metadata of the layers whose pages live in the window pool.

        Raises:
            ValueError: the metadata was built without `full_to_swa`.
        """
        if self.swa_page_table is None:
            raise ValueError(
                "swa_page_table: expected a table for the window pool, got None; pass full_to_swa to the builder"
            )
        return dataclasses.replace(self, page_table=self.swa_page_table, swa_page_table=None)

    @index64
    def advance(self, n: int | Integer[IndexArray, ""] | Integer[IndexArray, "S"]) -> "AttentionMetadata":
        """Return the metadata with `n` more keys in each live sequence; padding sequences stay neutral.

        The tables stay as they are, so they must cover the new tokens: build with `lookahead`. The plan
        belongs to the old lengths and is dropped.

        Args:
            n: tokens to add, one number or `[S]`.

        Raises:
            ValueError: `n` is neither a scalar nor of shape `[S]`.
            TypeError: `n` is not of an integer dtype.
        """
        n = as_index(n, "n")
        if n.shape not in ((), (self.num_seqs,)):
            raise ValueError(f"n: expected a scalar or shape [S] = [{self.num_seqs}], got {list(n.shape)}")
        seqused_k = query_rows.advance(self.seqused_k, self.cu_seqlens_q, n)
        return dataclasses.replace(self, seqused_k=seqused_k, plan=None)

    @index64
    def with_lengths(
        self, seqused_k: Integer[IndexArray, "S"], cu_seqlens_q: Integer[IndexArray, "S+1"] | None = None
    ) -> "AttentionMetadata":
        """Return the metadata with other lengths, of any integer dtype; the plan is dropped.

        A sequence without query rows becomes neutral (`seqused_k = 0`). The tables stay as they are.

        Args:
            seqused_k: `[S]`, keys in the cache, with this call's own tokens.
            cu_seqlens_q: `[S+1]`, start of each sequence's query rows; None keeps them. No sequence may have
                more than `max_seqlen_q` rows.

        Raises:
            ValueError: a shape does not fit S.
            TypeError: an array is not of an integer dtype.
        """
        seqused_k = as_index(seqused_k, "seqused_k")
        cu_seqlens_q = self.cu_seqlens_q if cu_seqlens_q is None else as_index(cu_seqlens_q, "cu_seqlens_q")
        query_rows.check_lengths(self.num_seqs, seqused_k, cu_seqlens_q)
        return dataclasses.replace(
            self,
            cu_seqlens_q=cu_seqlens_q,
            seqused_k=query_rows.neutralise(seqused_k, cu_seqlens_q),
            plan=None,
        )

    @index64
    def pad_to(self, num_seqs: int, num_tokens: int | None = None) -> "AttentionMetadata":
        """Return the metadata with neutral sequences appended, `q_len = seqused_k = 0`; the plan is dropped.

        Args:
            num_seqs: sequences of the result, at least S.
            num_tokens: rows of the padded token buffer; needed to pad a tree, whose new rows have no bits.

        Raises:
            ValueError: `num_seqs` or `num_tokens` is less than what is there.
        """
        more = num_seqs - self.num_seqs
        if more < 0:
            raise ValueError(
                f"num_seqs: expected at least the {self.num_seqs} that are there, got {num_seqs}"
            )
        ancestors = self.ancestors
        if ancestors is not None and num_tokens is not None:
            if num_tokens < ancestors.shape[0]:
                raise ValueError(
                    f"num_tokens: expected at least the {ancestors.shape[0]} rows of ancestors, got {num_tokens}"
                )
            ancestors = jnp.pad(ancestors, ((0, num_tokens - ancestors.shape[0]), (0, 0)))

        def pad_table(table):
            return None if table is None else jnp.pad(table, ((0, more), (0, 0)))

        return dataclasses.replace(
            self,
            page_table=pad_table(self.page_table),
            swa_page_table=pad_table(self.swa_page_table),
            cu_seqlens_q=jnp.pad(self.cu_seqlens_q, (0, more), mode="edge"),
            seqused_k=jnp.pad(self.seqused_k, (0, more)),
            ancestors=ancestors,
            plan=None,
        )

    @index64
    def sequence_ids(self, num_tokens: int) -> Int64[Array, "T"]:
        """Return the sequence of each query row; -1 for the rows of padding and behind the last sequence."""
        return query_rows.sequence_ids(self.seqused_k, self.cu_seqlens_q, num_tokens)

    @index64
    def positions(self, num_tokens: int) -> Int64[Array, "T"]:
        """Return the position of each query row, what rotary embeddings and windows measure by.

        Row i of a sequence sits at `seqused_k - q_len + i`, or at `seqused_k - q_len + depth` with a tree; 0 for
        the rows of padding.
        """
        self._check_num_tokens(num_tokens)
        return query_rows.positions(self.seqused_k, self.cu_seqlens_q, self.ancestors, num_tokens)

    @index64
    def slots(self, num_tokens: int) -> Int64[Array, "T"]:
        """Return the slot of each query row's own key, where the cache must hold it before attention reads it.

        -1, nothing to write, for the rows of padding and for a key that the page table has no page for.
        """
        return query_rows.slots(
            self.page_table,
            self.seqused_k,
            self.cu_seqlens_q,
            num_tokens=num_tokens,
            page_size=self.page_size,
        )

    def _check_num_tokens(self, num_tokens):
        if self.ancestors is not None and self.ancestors.shape[0] != num_tokens:
            raise ValueError(
                f"num_tokens: expected the {self.ancestors.shape[0]} rows of ancestors, got {num_tokens}; "
                "pad the tree with pad_to(num_seqs, num_tokens)"
            )


@index64
def extend_metadata(
    *,
    seqused_k: Integer[IndexArray, "S"],
    cu_seqlens_q: Integer[IndexArray, "S+1"],
    max_seqlen_q: int,
    **table: Unpack[TableInputs],
) -> AttentionMetadata:
    """Build the metadata of a prefill or a chunk of one: ragged query rows over a cached prefix.

    `seqused_k = prefix + new`, where `new = q_len` tokens come with this call. A sequence without query rows
    becomes neutral.

    Args:
        seqused_k: `[S]`, prefix + new tokens.
        cu_seqlens_q: `[S+1]`, start of each sequence's query rows.
        max_seqlen_q: upper bound of the new tokens of a sequence (static).
        **table: see `jaxattn.table_inputs.TableInputs`.

    Raises:
        ValueError: an argument has a wrong shape or is out of range, or neither form of slot lists is complete.
        TypeError: an index array is not of an integer dtype, `live` is not bool, or `out` is not int64.

    Example:
        >>> import numpy as np
        >>> from jaxattn.metadata import extend_metadata
        >>> chunk = extend_metadata(
        ...     seqused_k=[5, 2], cu_seqlens_q=[0, 3, 5], max_seqlen_q=3, page_size=4, max_pages=2,
        ...     kv_indptr=[0, 5, 7], kv_indices=[12, 13, 14, 15, 4, 8, 9],
        ... )
        >>> chunk.page_table.tolist(), chunk.positions(5).tolist(), chunk.slots(5).tolist()
        ([[3, 1], [2, 0]], [2, 3, 4, 0, 1], [14, 15, 4, 8, 9])
    """
    if max_seqlen_q < 0:
        raise ValueError(f"max_seqlen_q: expected at least 0, got {max_seqlen_q}")
    lengths, indptr = as_index(seqused_k, "seqused_k"), as_index(cu_seqlens_q, "cu_seqlens_q")
    return _build("extend", lengths, 0, max_seqlen_q, table, cu_seqlens_q=indptr)


@index64
def decode_metadata(
    *, seqused_k: Integer[IndexArray, "S"], **table: Unpack[TableInputs]
) -> AttentionMetadata:
    """Build the metadata of a decode step: one query row per sequence, row s for sequence s.

    `seqused_k` includes the token being decoded. A sequence of length 0 is padding.

    Args:
        seqused_k: `[S]`, tokens in the cache with the one being decoded.
        **table: see `jaxattn.table_inputs.TableInputs`.

    Raises:
        ValueError: an argument has a wrong shape or is out of range, or neither form of slot lists is complete.
        TypeError: an index array is not of an integer dtype, `live` is not bool, or `out` is not int64.

    Example:
        >>> import numpy as np
        >>> from jaxattn.metadata import decode_metadata
        >>> pool = np.array([[4, 5, 6, 7], [2, 3, 0, 0]])
        >>> step = decode_metadata(seqused_k=[3, 1, 0], page_size=2, req_to_token=pool, req_pool_indices=[0, 1, -1])
        >>> step.page_table.tolist(), step.cu_seqlens_q.tolist(), step.slots(3).tolist()
        ([[2, 3], [1, 0], [0, 0]], [0, 1, 2, 2], [6, 2, -1])
    """
    return _build("decode", as_index(seqused_k, "seqused_k"), 0, 1, table)


@index64
def target_verify_metadata(
    *,
    prefix_lens: Integer[IndexArray, "S"],
    num_draft_tokens: int,
    ancestors: UInt64[Array, "T W"] | None = None,
    **table: Unpack[TableInputs],
) -> AttentionMetadata:
    """Build the metadata of a verify step: n draft tokens per sequence behind its committed prefix.

    `seqused_k = prefix + n`; rows `s * n` to `s * n + n - 1` belong to sequence s. A negative prefix is padding;
    a prefix of 0 is not.

    Args:
        prefix_lens: `[S]`, committed tokens, without the draft tokens.
        num_draft_tokens: n, query rows per sequence (static).
        ancestors: `[S * n, W]`, the draft tree of each sequence; None for a chain.
        **table: see `jaxattn.table_inputs.TableInputs`.

    Raises:
        ValueError: an argument has a wrong shape or is out of range, neither form of slot lists is complete, or
            the table is too narrow for the draft tokens alone.
        TypeError: an index array is not of an integer dtype, `ancestors` is not uint64, `live` is not bool, or
            `out` is not int64.

    Example:
        >>> import numpy as np
        >>> from jaxattn.metadata import target_verify_metadata
        >>> pool = np.array([[4, 5, 6, 7, 2, 3]])
        >>> verify = target_verify_metadata(
        ...     prefix_lens=[3], num_draft_tokens=2, page_size=2, req_to_token=pool, req_pool_indices=[0]
        ... )
        >>> verify.seqused_k.tolist(), verify.positions(2).tolist(), verify.slots(2).tolist()
        ([5], [3, 4], [7, 2])
    """
    prefix_lens = as_index(prefix_lens, "prefix_lens")
    return _build(
        "target_verify", prefix_lens, num_draft_tokens, num_draft_tokens, table, ancestors=ancestors
    )


@index64
def draft_decode_metadata(
    *,
    prefix_lens: Integer[IndexArray, "S"],
    step: int | Integer[IndexArray, ""],
    **table: Unpack[TableInputs],
) -> AttentionMetadata:
    """Build the metadata of draft decode step i: one query row per sequence, which sees its earlier drafts.

    `seqused_k = prefix + i + 1`. A negative prefix is padding. With `lookahead` the following steps are
    `advance(1)` of this one. Branches (topk > 1) are sequences of their own; where they share a partly filled
    page, list their slots and build with `page_size=1`.

    Args:
        prefix_lens: `[S]`, committed tokens, without any draft token.
        step: i, counted from 0; may be traced.
        **table: see `jaxattn.table_inputs.TableInputs`.

    Raises:
        ValueError: an argument has a wrong shape or is out of range, or neither form of slot lists is complete.
        TypeError: an index array is not of an integer dtype, `live` is not bool, or `out` is not int64.

    Example:
        >>> import numpy as np
        >>> from jaxattn.metadata import draft_decode_metadata
        >>> pool = np.array([[4, 5, 6, 7, 2, 3]])
        >>> draft = draft_decode_metadata(
        ...     prefix_lens=[3], step=1, page_size=2, req_to_token=pool, req_pool_indices=[0]
        ... )
        >>> draft.seqused_k.tolist(), draft.positions(1).tolist(), draft.slots(1).tolist()
        ([5], [4], [2])
    """
    if isinstance(step, int) and step < 0:
        raise ValueError(f"step: expected at least 0, got {step}")
    added = as_index(step, "step") + 1
    if added.ndim:
        raise ValueError(f"step: expected a scalar, got shape {list(added.shape)}")
    return _build("draft_decode", as_index(prefix_lens, "prefix_lens"), added, 1, table)


@index64
def draft_extend_metadata(
    *, seqused_k: Integer[IndexArray, "S"], num_draft_tokens: int, **table: Unpack[TableInputs]
) -> AttentionMetadata:
    """Build the metadata of a draft extend: a constant n query rows per sequence, whatever was accepted.

    `seqused_k = committed before + n`; rows `s * n` to `s * n + n - 1` belong to sequence s, and its result is
    row `s * n + accept_len - 1`. A sequence shorter than n is padding.

    Args:
        seqused_k: `[S]`, tokens committed before this cycle + n.
        num_draft_tokens: n, query rows per sequence (static).
        **table: see `jaxattn.table_inputs.TableInputs`.

    Raises:
        ValueError: an argument has a wrong shape or is out of range, neither form of slot lists is complete, or
            the table is too narrow for the draft tokens alone.
        TypeError: an index array is not of an integer dtype, `live` is not bool, or `out` is not int64.

    Example:
        >>> import numpy as np
        >>> from jaxattn.metadata import draft_extend_metadata
        >>> pool = np.array([[4, 5, 6, 7, 2, 3]])
        >>> extend = draft_extend_metadata(
        ...     seqused_k=[5, 6], num_draft_tokens=3, page_size=2, req_to_token=pool, req_pool_indices=[0, 0]
        ... )
        >>> extend.cu_seqlens_q.tolist(), extend.positions(6).tolist()
        ([0, 3, 6], [2, 3, 4, 3, 4, 5])
    """
    return _build("draft_extend", as_index(seqused_k, "seqused_k"), 0, num_draft_tokens, table)


def _build(mode, lengths, added, q_len, table, cu_seqlens_q=None, ancestors=None):
    """Check the inputs of a builder and assemble its metadata; `seqused_k = lengths + added`."""
    layers = table.pop("plan_for", None)
    rows, options = table_options(**table)
    query_rows.check_lengths(rows.num_seqs, lengths, cu_seqlens_q)
    if ancestors is not None:
        _check_ancestors(ancestors, rows.num_seqs * q_len, q_len)
        # A numpy array would lose its upper words at the boundary of a caller's jit.
        ancestors = jnp.asarray(ancestors)
    page_size, max_pages = options["page_size"], options["max_pages"]
    if cu_seqlens_q is None and q_len < 1:
        raise ValueError(f"num_draft_tokens: expected at least 1, got {q_len}")
    if cu_seqlens_q is None and q_len > max(1, max_pages * page_size):
        raise ValueError(
            f"max_pages: expected at least {cdiv(q_len, page_size)} pages of {page_size} for the {q_len} draft "
            f"tokens of a sequence, got {max_pages}"
        )
    specs = planned_schedules(layers, rows.num_seqs, options, q_len, ancestors)
    (page_table, swa_page_table), cu_seqlens_q, seqused_k, schedules = assemble(
        rows,
        lengths,
        as_index(added, "added"),
        cu_seqlens_q,
        q_len=None if cu_seqlens_q is not None else q_len,
        specs=specs,
        **options,
    )
    return AttentionMetadata(
        page_table=page_table,
        swa_page_table=swa_page_table,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        ancestors=ancestors,
        plan=None if layers is None else Plan(schedules),
        max_seqlen_q=q_len,
        page_size=page_size,
        mode=mode,
    )


def _check_ancestors(ancestors, num_tokens, num_draft_tokens):
    words = cdiv(num_draft_tokens, 64)
    if ancestors.dtype != jnp.uint64:
        raise TypeError(f"ancestors: expected a uint64 array, got {ancestors.dtype}")
    if ancestors.ndim != 2 or ancestors.shape[0] != num_tokens or ancestors.shape[1] < words:
        raise ValueError(
            f"ancestors: expected shape [T, W] = [{num_tokens}, {words}] for {num_draft_tokens} draft tokens, "
            f"got {list(ancestors.shape)}"
        )
