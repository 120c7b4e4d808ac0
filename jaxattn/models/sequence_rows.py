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
        source: `[S, L]`, the row of each step; any row where the sequence has no such step.
        live: `[S, L]`, whether the sequence has the step.
        sequence: `[T]`, the sequence of each row, -1 for rows of padding.
        step: `[T]`, the step of each row in its sequence.
        count: `[S]`, steps of each sequence in this call.
        fresh: `[S]`, whether the call starts the sequence.
    """

    source: Int64[Array, "S L"]
    live: Bool[Array, "S L"]
    sequence: Int64[Array, "T"]
    step: Int64[Array, "T"]
    count: Int64[Array, "S"]
    fresh: Bool[Array, "S"]

    @index64
    def by_sequence(self, rows: Num[Array, "T ..."]) -> Num[Array, "S L ..."]:
        """Rows by sequence and step, zeros where there is no such step."""
        taken = rows.at[self.source].get(mode="promise_in_bounds")
        return jnp.where(_expand(self.live, taken), taken, jnp.zeros((), taken.dtype))

    @index64
    def by_token(self, steps: Num[Array, "S L ..."]) -> Num[Array, "T ..."]:
        """The inverse of `by_sequence`: rows of the token buffer, zeros for padding."""
        live = self.sequence >= 0
        taken = steps.at[jnp.maximum(self.sequence, 0), self.step].get(mode="promise_in_bounds")
        return jnp.where(_expand(live, taken), taken, jnp.zeros((), taken.dtype))


@index64
def sequence_rows(metadata: AttentionMetadata, num_tokens: int) -> SequenceRows:
    """Locate the rows of each sequence of a batch.

    Args:
        metadata: the batch; `max_seqlen_q` gives the number of steps L.
        num_tokens: rows of the token buffer.

    Example:
        >>> import numpy as np, jax.numpy as jnp
        >>> from jaxattn.metadata import extend_metadata
        >>> from jaxattn.models.sequence_rows import sequence_rows
        >>> batch = extend_metadata(
        ...     seqused_k=[2, 4], cu_seqlens_q=[0, 2, 3], max_seqlen_q=2, page_size=4, max_pages=1,
        ...     kv_indptr=[0, 2, 6], kv_indices=[0, 1, 4, 5, 6, 7],
        ... )
        >>> rows = sequence_rows(batch, 3)
        >>> rows.by_sequence(jnp.array([5.0, 6.0, 7.0])).tolist(), rows.fresh.tolist()
        ([[5.0, 6.0], [7.0, 0.0]], [True, False])
    """
    start = metadata.cu_seqlens_q[:-1]
    count = jnp.where(metadata.seqused_k > 0, metadata.cu_seqlens_q[1:] - start, 0)
    steps = jnp.arange(metadata.max_seqlen_q, dtype=jnp.int64)
    sequence = metadata.sequence_ids(num_tokens)
    first = start.at[jnp.maximum(sequence, 0)].get(mode="promise_in_bounds")
    step = jnp.clip(jnp.arange(num_tokens, dtype=jnp.int64) - first, 0, metadata.max_seqlen_q - 1)
    return SequenceRows(
        source=jnp.clip(start[:, None] + steps, 0, num_tokens - 1),
        live=steps < count[:, None],
        sequence=sequence,
        step=step,
        count=count,
        fresh=(count > 0) & (metadata.seqused_k == count),
    )


def _expand(mask: Bool[Array, "..."], like: Array) -> Bool[Array, "..."]:
    return mask.reshape(*mask.shape, *[1] * (like.ndim - mask.ndim))
