"""DecoderState: everything that a batch of sequences carries from one cycle to the next, on the device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int32, Int64, UInt64

from jaxattn import query_rows
from jaxattn.index64 import cdiv, index64
from jaxattn.metadata import AttentionMetadata
from jaxattn.speculative.sampling import SamplingParams


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderState:
    """Sequences, their tables and caches. A row is free, filling (its prompt), live, or ended.

    Attributes:
        history: token ids of prompt and generated text; entries from `lengths` on are meaningless.
        lengths: tokens in `history`.
        cached: tokens whose keys the target's cache holds; of a live row all but the last.
        limits: length at which a row ends.
        capacity: tokens that the pages of a row hold; a live row waits where the next cycle would not fit.
        filling: rows with a prompt that is not in the cache yet.
        live: rows that decode.
        sound: False once the logits that decided a token held NaN or +inf; such a row ends.
        passes: verify steps that a row took part in.
        stop_tokens: ids that end a row, padded with -1.
        sampling: how each row picks its tokens.
        page_table: physical page of each logical page; page 0 belongs to nobody.
        swa_page_table: the same in the window pool.
        cache: the target's cache.
        draft: the drafter's state.
        page_size: tokens in a page (static).
    """

    history: Int32[Array, "S C"]
    lengths: Int64[Array, "S"]
    cached: Int64[Array, "S"]
    limits: Int64[Array, "S"]
    capacity: Int64[Array, "S"]
    filling: Bool[Array, "S"]
    live: Bool[Array, "S"]
    sound: Bool[Array, "S"]
    passes: Int64[Array, "S"]
    stop_tokens: Int32[Array, "S stops"]
    sampling: SamplingParams
    page_table: Int64[Array, "S M"]
    swa_page_table: Int64[Array, "S M"] | None
    cache: Any
    draft: Any
    page_size: int = dataclasses.field(metadata={"static": True})

    @property
    def num_seqs(self) -> int:
        """Rows S of the batch."""
        return self.lengths.shape[0]

    @index64
    def metadata(
        self,
        mode: str,
        prefix_lens: Int64[Array, "S"],
        rows: int,
        active: Bool[Array, "S"],
        ancestors: UInt64[Array, "T W"] | None = None,
    ) -> AttentionMetadata:
        """Metadata of `rows` query rows per sequence behind a prefix; rows that are not active are neutral."""
        return AttentionMetadata(
            page_table=self.page_table,
            swa_page_table=self.swa_page_table,
            cu_seqlens_q=query_rows.constant_cu_seqlens(active, rows),
            seqused_k=jnp.where(active, prefix_lens + rows, 0),
            ancestors=ancestors,
            max_seqlen_q=rows,
            page_size=self.page_size,
            mode=mode,
        )

    def append(self, tokens: Int32[Array, "S n"], count: Int64[Array, "S"]) -> "DecoderState":
        """Add the first `count` of `tokens` to each row, up to its limit and its first stop token.

        A row that meets one of these is live no more.
        """
        column = jnp.arange(tokens.shape[1], dtype=jnp.int64)
        stops = jnp.any(tokens[:, :, None] == self.stop_tokens[:, None, :], axis=-1) & (tokens >= 0)
        through_stop = jnp.min(jnp.where(stops, column + 1, tokens.shape[1]), axis=1)
        count = jnp.minimum(jnp.minimum(count, through_stop), jnp.maximum(self.limits - self.lengths, 0))
        written = column < count[:, None]
        place = jnp.where(written, self.lengths[:, None] + column, self.history.shape[1])
        row = jnp.arange(self.num_seqs, dtype=jnp.int64)[:, None]
        lengths = self.lengths + count
        ended = jnp.any(stops & written, axis=1) | (lengths >= self.limits)
        return dataclasses.replace(
            self,
            history=self.history.at[row, place].set(tokens, mode="drop"),
            lengths=lengths,
            live=self.live & ~ended,
        )


@index64
def empty_state(
    *,
    num_seqs: int,
    max_context_len: int,
    lookahead: int,
    cache: Any,
    draft: Any,
    page_size: int,
    window_pool: bool = False,
    max_stop_tokens: int = 8,
) -> DecoderState:
    """A state of free rows.

    Args:
        num_seqs: rows S of the batch.
        max_context_len: the most tokens of prompt and generated text together.
        lookahead: see `SpeculativeDecoder.lookahead`; a table row gets `ceil((max_context_len + lookahead) / P)` pages.
        cache: the target's cache.
        draft: the drafter's state.
        page_size: tokens in a page of the caches.
        window_pool: whether the target's cache has a window pool.
        max_stop_tokens: stop tokens that a row can have.

    Raises:
        ValueError: a number is below 1.
    """
    numbers = {
        "num_seqs": num_seqs,
        "max_context_len": max_context_len,
        "lookahead": lookahead,
        "page_size": page_size,
        "max_stop_tokens": max_stop_tokens,
    }
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name}: expected at least 1, got {number}")
    zeros = np.zeros(num_seqs, np.int64)
    table = np.zeros((num_seqs, cdiv(max_context_len + lookahead, page_size)), np.int64)
    return DecoderState(
        history=jnp.zeros((num_seqs, max_context_len), jnp.int32),
        lengths=jnp.array(zeros),
        cached=jnp.array(zeros),
        limits=jnp.array(zeros),
        capacity=jnp.array(zeros),
        filling=jnp.zeros(num_seqs, bool),
        live=jnp.zeros(num_seqs, bool),
        sound=jnp.ones(num_seqs, bool),
        passes=jnp.array(zeros),
        stop_tokens=jnp.full((num_seqs, max_stop_tokens), -1, jnp.int32),
        sampling=SamplingParams.create(num_seqs),
        page_table=jnp.array(table),
        swa_page_table=jnp.array(table) if window_pool else None,
        cache=cache,
        draft=draft,
        page_size=page_size,
    )
