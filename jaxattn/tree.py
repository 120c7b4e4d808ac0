"""Draft trees as bits: which nodes of a sequence's draft are ancestors of each of its query rows.

A tree of n nodes is given by its parents `[n]`: the index of each node's parent, smaller than the node's own,
or -1 for a node that follows the committed prefix directly. Node j is query row j of its sequence.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, Int32, Int64, UInt64

from jaxattn.index64 import as_index, cdiv, index64

ROOT = -1


@index64
def ancestor_bits(parents: Int[Array, "S n"]) -> UInt64[Array, "T W"]:
    """Compute the tree mask: bit j of row `s * n + i` is set iff node j of sequence s is i or an ancestor of i.

    Bit j lives in word `j // 64`, at `j % 64`; `W = ceil(n / 64)` and `T = S * n`.

    Args:
        parents: `[S, n]` of any integer dtype, -1 for a root. A parent that is neither -1 nor smaller than its
            node is taken as -1 in compiled code; `check_parents` reports it.

    Raises:
        ValueError: `parents` is not of two dimensions.
        TypeError: `parents` is not of an integer dtype.

    Example:
        >>> import numpy as np
        >>> from jaxattn.tree import ancestor_bits
        >>> [f"{int(row[0]):04b}" for row in ancestor_bits(np.array([[-1, 0, 0, 1]]))]
        ['0001', '0011', '0101', '1011']
    """
    return _ancestor_bits(_as_parents(parents))


@jax.jit
def _ancestor_bits(parents: Int64[Array, "S n"]) -> UInt64[Array, "T W"]:
    sequences, nodes = parents.shape
    node = jnp.arange(nodes, dtype=jnp.int64)
    word = jnp.arange(cdiv(nodes, 64), dtype=jnp.int64)
    own = jnp.where(node[:, None] // 64 == word, jnp.uint64(1) << (node % 64).astype(jnp.uint64)[:, None], 0)
    # Entry n stands for the prefix: no bits, and its own parent.
    bits = jnp.broadcast_to(
        jnp.pad(own.astype(jnp.uint64), ((0, 1), (0, 0))), (sequences, nodes + 1, len(word))
    )
    jump = jnp.pad(jnp.where(_is_parent(parents), parents, nodes), ((0, 0), (0, 1)), constant_values=nodes)
    # Each round doubles the distance that a jump spans.
    for _ in range(max(nodes - 1, 0).bit_length()):
        bits = bits | jnp.take_along_axis(bits, jump[..., None], axis=1)
        jump = jnp.take_along_axis(jump, jump, axis=1)
    return bits[:, :nodes].reshape(sequences * nodes, len(word))


@index64
def depths(ancestors: UInt64[Array, "T W"]) -> Int32[Array, "T"]:
    """Compute the depth of each row of a tree mask: its number of ancestors, 0 for a root or a row without bits.

    Example:
        >>> import numpy as np
        >>> from jaxattn.tree import ancestor_bits, depths
        >>> depths(ancestor_bits(np.array([[-1, 0, 0, 1, 1, 3]]))).tolist()
        [0, 1, 1, 2, 2, 3]
    """
    return _depths(ancestors)


@jax.jit
def _depths(ancestors: UInt64[Array, "T W"]) -> Int32[Array, "T"]:
    bits = jax.lax.population_count(ancestors).astype(jnp.int32)
    return jnp.maximum(bits.sum(axis=1, dtype=jnp.int32) - 1, 0)


@index64
def tree_positions(parents: Int[Array, "S n"], prefix_lens: Int[Array, "S"]) -> Int64[Array, "S n"]:
    """Compute the position of each node, `prefix + depth`: what rotary embeddings and windows measure by.

    Args:
        parents: `[S, n]`, as in `ancestor_bits`.
        prefix_lens: `[S]`, committed tokens of each sequence.

    Raises:
        ValueError: a shape does not fit.
        TypeError: an argument is not of an integer dtype.

    Example:
        >>> import numpy as np
        >>> from jaxattn.tree import tree_positions
        >>> tree_positions(np.array([[-1, 0, 0, 1]]), np.array([10])).tolist()
        [[10, 11, 11, 12]]
    """
    parents = _as_parents(parents)
    prefix_lens = as_index(prefix_lens, "prefix_lens")
    if prefix_lens.shape != parents.shape[:1]:
        raise ValueError(
            f"prefix_lens: expected shape {parents.shape[:1]}, one length for each tree, got {prefix_lens.shape}"
        )
    return _positions(parents, prefix_lens)


@jax.jit
def _positions(parents: Int64[Array, "S n"], prefix_lens: Int64[Array, "S"]) -> Int64[Array, "S n"]:
    depth = _depths(_ancestor_bits(parents)).reshape(parents.shape).astype(jnp.int64)
    return prefix_lens[:, None] + depth


@index64
def chain_parents(sequences: int, nodes: int) -> Int64[Array, "S n"]:
    """Return the parents of `sequences` chains, the tree of a draft without branches.

    Example:
        >>> from jaxattn.tree import chain_parents
        >>> chain_parents(1, 4).tolist()
        [[-1, 0, 1, 2]]
    """
    return jnp.broadcast_to(jnp.arange(-1, nodes - 1, dtype=jnp.int64), (sequences, nodes))


@index64
def is_tree(parents: Int[Array, "S n"]) -> Bool[Array, "S"]:
    """Say of each sequence whether every parent is -1 or a node before its child; works under `jit`."""
    return _is_parent(_as_parents(parents), allow_root=True).all(axis=1)


def check_parents(parents: Int[Array, "S n"]) -> None:
    """Check concrete parents.

    Raises:
        ValueError: a parent is neither -1 nor a node before its child; the first one is named.

    Example:
        >>> from jaxattn.tree import check_parents
        >>> check_parents([[-1, 0, 2]])
        Traceback (most recent call last):
        ...
        ValueError: parents: expected -1 or a node before its child, got parent 2 of node 2 in sequence 0
    """
    host = np.asarray(parents)
    if host.ndim != 2:
        raise ValueError(f"parents: expected [S, n], got shape {host.shape}")
    wrong = np.argwhere((host < ROOT) | (host >= np.arange(host.shape[1])))
    if len(wrong):
        sequence, node = wrong[0]
        raise ValueError(
            f"parents: expected -1 or a node before its child, got parent {host[sequence, node]} of node {node} "
            f"in sequence {sequence}"
        )


def _as_parents(parents) -> Int64[Array, "S n"]:
    parents = as_index(parents, "parents")
    if parents.ndim != 2:
        raise ValueError(f"parents: expected [S, n], got shape {parents.shape}")
    return parents


def _is_parent(parents: Int64[Array, "S n"], allow_root: bool = False) -> Bool[Array, "S n"]:
    node = jnp.arange(parents.shape[1], dtype=jnp.int64)
    return (parents >= (ROOT if allow_root else 0)) & (parents < node)
