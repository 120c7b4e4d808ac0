"""Where the slots of each sequence are listed: a ragged index list, or a request pool."""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int64, Integer

from jaxattn.index64 import IndexArray, as_index, as_integer, take_or_padding


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class RaggedRows:
    """Slots of sequence `s` at `kv_indices[kv_indptr[s] : kv_indptr[s + 1]]`; entries after the last are slack."""

    kv_indptr: Int64[Array, "S_plus_1"]
    kv_indices: Integer[IndexArray, "nnz"]

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return self.kv_indptr.shape[0] - 1

    @property
    def marked_live(self) -> Bool[Array, "S"]:
        """Sequences that the rows do not mark as padding; a ragged list marks none."""
        return jnp.ones(self.num_seqs, dtype=jnp.bool_)

    @property
    def lengths(self) -> Int64[Array, "S"]:
        """Slots listed for each sequence."""
        return jnp.maximum(self.kv_indptr[1:] - self.kv_indptr[:-1], 0)

    def slots(self, position: Int64[Array, "S X"]) -> Int64[Array, "S X"]:
        """Slot of each position of each sequence, -1 where none is listed."""
        start = self.kv_indptr[:-1, None]
        listed = (position >= 0) & (position < self.lengths[:, None])
        return take_or_padding(self.kv_indices, jnp.where(listed, start + position, -1))

    def reach(self, lengths: Int64[Array, "S"], lookahead: Int64[Array, ""]) -> Int64[Array, "S"]:
        """All listed positions: a ragged row says itself how far it goes."""
        return self.lengths

    def holds(self, lengths: Int64[Array, "S"]) -> Bool[Array, "S"]:
        """Whether the rows list `lengths` slots, within `kv_indices`."""
        start, stop = self.kv_indptr[:-1], self.kv_indptr[1:]
        return (start >= 0) & (start <= stop) & (stop <= self.kv_indices.shape[0]) & (lengths <= self.lengths)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PooledRows:
    """Slots of sequence `s` at `req_to_token[req_pool_indices[s], :]`; a pool index of -1 is a padding sequence."""

    req_to_token: Integer[IndexArray, "R C"]
    req_pool_indices: Int64[Array, "S"]

    @property
    def num_seqs(self) -> int:
        """Number of sequences."""
        return self.req_pool_indices.shape[0]

    @property
    def marked_live(self) -> Bool[Array, "S"]:
        """Sequences that the rows do not mark as padding by a negative pool index."""
        return self.req_pool_indices >= 0

    def slots(self, position: Int64[Array, "S X"]) -> Int64[Array, "S X"]:
        """Slot of each position of each sequence, -1 outside the pool."""
        return take_or_padding(self.req_to_token, self.req_pool_indices[:, None], position)

    def reach(self, lengths: Int64[Array, "S"], lookahead: Int64[Array, ""]) -> Int64[Array, "S"]:
        """`lengths + lookahead`, as far as a pool row goes."""
        return jnp.minimum(lengths + lookahead, self.req_to_token.shape[1])

    def holds(self, lengths: Int64[Array, "S"]) -> Bool[Array, "S"]:
        """Whether the pool has the row and its width holds `lengths` slots."""
        pool_rows, width = self.req_to_token.shape
        return (lengths <= 0) | ((self.req_pool_indices < pool_rows) & (lengths <= width))


SlotRows = RaggedRows | PooledRows


def ragged_rows(kv_indptr, kv_indices) -> RaggedRows:
    """Check ragged slot lists and wrap them; call it inside an `index64` scope.

    Raises:
        ValueError: an array has the wrong number of axes.
        TypeError: an array is not of an integer dtype.
    """
    indptr, indices = as_index(kv_indptr, "kv_indptr"), as_integer(kv_indices, "kv_indices")
    if indptr.ndim != 1 or indptr.shape[0] < 1:
        raise ValueError(f"kv_indptr: expected shape [S+1], got {list(indptr.shape)}")
    if indices.ndim != 1:
        raise ValueError(f"kv_indices: expected shape [nnz], got {list(indices.shape)}")
    return RaggedRows(indptr, indices)


def pooled_rows(req_to_token, req_pool_indices) -> PooledRows:
    """Check the rows of a request pool and wrap them; call it inside an `index64` scope.

    Raises:
        ValueError: an array has the wrong number of axes.
        TypeError: an array is not of an integer dtype.
    """
    pool, rows = as_integer(req_to_token, "req_to_token"), as_index(req_pool_indices, "req_pool_indices")
    if pool.ndim != 2:
        raise ValueError(f"req_to_token: expected shape [R, C], got {list(pool.shape)}")
    if rows.ndim != 1:
        raise ValueError(f"req_pool_indices: expected shape [S], got {list(rows.shape)}")
    return PooledRows(pool, rows)


def slot_rows(*, kv_indptr=None, kv_indices=None, req_to_token=None, req_pool_indices=None) -> SlotRows:
    """Check whichever form of slot lists is given and wrap it; call it inside an `index64` scope.

    Raises:
        ValueError: not exactly one form is complete, or an array has the wrong number of axes.
        TypeError: an array is not of an integer dtype.
    """
    given = {
        "kv_indptr": kv_indptr,
        "kv_indices": kv_indices,
        "req_to_token": req_to_token,
        "req_pool_indices": req_pool_indices,
    }
    names = [name for name, value in given.items() if value is not None]
    if names == ["kv_indptr", "kv_indices"]:
        return ragged_rows(kv_indptr, kv_indices)
    if names == ["req_to_token", "req_pool_indices"]:
        return pooled_rows(req_to_token, req_pool_indices)
    raise ValueError(
        "expected either kv_indptr and kv_indices, or req_to_token and req_pool_indices; "
        f"got {', '.join(names) or 'none of them'}"
    )
