"""Token rows of a batch as [sequence, step], the shape that a recurrence needs, and back."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int64, Num

from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class SequenceRows:
    """Where the query rows of each sequence lie in the token buffer.

    Attributes:
        start: `[S]`, the first row of each sequence.
        count: `[S]`, its rows in this call; 0 for padding sequences.
        fresh: `[S]`, whether the call starts the sequence.
        max_count: upper bound of `count` (static).
    """

    start: Int64[Array, "S"]
    count: Int64[Array, "S"]
    fresh: Bool[Array, "S"]
    max_count: int = dataclasses.field(metadata={"static": True})

    @index64
    def live(self, first: Int64[Array, ""], size: int) -> Bool[Array, "S size"]:
        """Whether each sequence has each of the steps `first`, `first + 1`, ..."""
        return self._step(first, size) < self.count[:, None]

    @index64
    def gather(
        self, rows: Num[Array, "T ..."], first: Int64[Array, ""], size: int
    ) -> Num[Array, "S size ..."]:
        """The rows of those steps; zeros, whatever the buffer holds, where a sequence has no such step."""
        taken = rows.at[self._source(first, size)].get(mode="fill", fill_value=0)
        live = self.live(first, size)
        return jnp.where(live.reshape(*live.shape, *[1] * (rows.ndim - 1)), taken, jnp.zeros((), rows.dtype))

    @index64
    def scatter(
        self, rows: Num[Array, "T ..."], steps: Num[Array, "S size ..."], first: Int64[Array, ""]
    ) -> Num[Array, "T ..."]:
        """Put steps into their rows of the buffer; those that a sequence has not are dropped."""
        size = steps.shape[1]
        target = jnp.where(self.live(first, size), self._source(first, size), rows.shape[0])
        return rows.at[target].set(steps, mode="drop", unique_indices=False)

    def _step(self, first, size):
        return first + jnp.arange(size, dtype=jnp.int64)

    def _source(self, first, size):
        return self.start[:, None] + self._step(first, size)


@index64
def sequence_rows(metadata: AttentionMetadata) -> SequenceRows:
    """Locate the rows of each sequence of a batch.

    Example:
        >>> import numpy as np, jax.numpy as jnp
        >>> from jaxattn.metadata import extend_metadata
        >>> from jaxattn.models.sequence_rows import sequence_rows
        >>> batch = extend_metadata(
        ...     seqused_k=[2, 4], cu_seqlens_q=[0, 2, 3], max_seqlen_q=2, page_size=4, max_pages=1,
        ...     kv_indptr=[0, 2, 6], kv_indices=[0, 1, 4, 5, 6, 7],
        ... )
        >>> rows = sequence_rows(batch)
        >>> rows.gather(jnp.array([5.0, 6.0, 7.0]), 0, 2).tolist(), rows.fresh.tolist()
        ([[5.0, 6.0], [7.0, 0.0]], [True, False])
    """
    start = metadata.cu_seqlens_q[:-1]
    count = jnp.where(metadata.seqused_k > 0, metadata.cu_seqlens_q[1:] - start, 0)
    fresh = (count > 0) & (metadata.seqused_k == count)
    return SequenceRows(start, count, fresh, metadata.max_seqlen_q)
