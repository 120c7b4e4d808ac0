"""Draft trees: their record, and how they grow from rows of draft logits.

Node 0 is the last verified token, whose parent is -1; every other parent comes before its children.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int32, Key

from jaxattn.speculative.sampling import usable_logits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DraftTree:
    """One tree of n nodes per sequence. A token of -1 marks a node that drafts nothing."""

    tokens: Int32[Array, "S n"]
    parents: Int32[Array, "S n"]

    @classmethod
    def chain(cls, tokens: Int32[Array, "S n"]) -> "DraftTree":
        """A tree in which each node's parent is the node before it; `tokens[:, 0]` is the verified token."""
        return cls(tokens=tokens, parents=jnp.broadcast_to(branch_parents(tokens.shape[1], 1), tokens.shape))


def branch_parents(num_draft_tokens: int, topk: int) -> Int32[Array, "n"]:
    """Parents of a tree of `topk` branches from the root, level by level, truncated to n nodes.

    Example:
        >>> from jaxattn.speculative import branch_parents
        >>> branch_parents(6, 2).tolist()
        [-1, 0, 0, 1, 2, 3]
    """
    node = jnp.arange(num_draft_tokens, dtype=jnp.int32)
    return jnp.where(node == 0, -1, jnp.maximum(node - topk, 0))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Candidates:
    """Nodes that a draft model proposes: token, parent (-1: the root), summed log-probability."""

    tokens: Int32[Array, "S C"]
    parents: Int32[Array, "S C"]
    scores: Float32[Array, "S C"]

    def extend(self, more: "Candidates") -> "Candidates":
        """These candidates, then `more`."""
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], axis=1), self, more)


def expand(
    logits: Float[Array, "S B V"], scores: Float32[Array, "S B"], nodes: Int32[Array, "S B"], topk: int
) -> Candidates:
    """The `topk` best children of each of B nodes.

    Args:
        logits: the draft model's logits at each node.
        scores: summed log-probability of each node; 0 for the root.
        nodes: index of each node among the candidates so far; -1 for the root.
        topk: children per node.
    """
    logits, _ = usable_logits(logits)
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    best, tokens = jax.lax.top_k(log_probs, topk)
    scores = scores[:, :, None] + best
    tokens = jnp.where(scores > -jnp.inf, tokens.astype(jnp.int32), -1)
    parents = jnp.broadcast_to(nodes[:, :, None], tokens.shape)
    rows = tokens.shape[0]
    return Candidates(
        tokens=tokens.reshape(rows, -1), parents=parents.reshape(rows, -1), scores=scores.reshape(rows, -1)
    )


def keep_best(level: Candidates, count: int) -> Int32[Array, "S count"]:
    """Index within `level` of its `count` best candidates, best first."""
    return jax.lax.top_k(level.scores, count)[1].astype(jnp.int32)


def select_tree(root: Int32[Array, "S"], candidates: Candidates, num_draft_tokens: int) -> DraftTree:
    """The n - 1 best candidates, sorted by index, below the root.

    A child scores no more than its parent and comes after it, so the parent of a chosen node is chosen.

    Args:
        root: the last verified token.
        candidates: at least n - 1 of them.
        num_draft_tokens: n, the nodes of the tree with its root.

    Raises:
        ValueError: there are fewer candidates than nodes to fill.
    """
    wanted, found = num_draft_tokens - 1, candidates.tokens.shape[1]
    if wanted > found:
        raise ValueError(
            f"num_draft_tokens: expected at most {found + 1}, one more than the candidates, got {num_draft_tokens}; "
            "draft more steps or raise topk"
        )
    chosen = jnp.sort(jax.lax.top_k(candidates.scores, wanted)[1].astype(jnp.int32), axis=1)
    parents = jnp.take_along_axis(candidates.parents, chosen, axis=1)
    place = jax.vmap(lambda order, parent: jnp.searchsorted(order, parent))(chosen, parents)
    parents = jnp.where(parents < 0, 0, place.astype(jnp.int32) + 1)
    column = root[:, None].astype(jnp.int32)
    return DraftTree(
        tokens=jnp.concatenate([column, jnp.take_along_axis(candidates.tokens, chosen, axis=1)], axis=1),
        parents=jnp.concatenate([jnp.full_like(column, -1), parents], axis=1),
    )


def draw_children(keys: Key[Array, "S"], probs: Float32[Array, "S V"], topk: int) -> Int32[Array, "S topk"]:
    """`topk` successive draws without replacement from each row; -1 once a row has no mass left.

    The largest of log-probabilities plus Gumbel noise, in order (Vieira 2014; Kool et al. 2019, arXiv:1903.06059).
    """

    def one(key, row):
        noise = jax.random.gumbel(key, row.shape, jnp.float32)
        values, tokens = jax.lax.top_k(jnp.where(row > 0, jnp.log(row) + noise, -jnp.inf), topk)
        return jnp.where(values > -jnp.inf, tokens.astype(jnp.int32), -1)

    return jax.vmap(one)(keys, probs)
