"""Prompt-lookup drafting: what followed the last occurrences of the text's own ending."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, Int32

from jaxattn.index64 import index64
from jaxattn.speculative.drafting import DraftTree, branch_parents


@index64
def propose(
    history: Int32[Array, "S C"],
    lengths: Int[Array, "S"],
    *,
    num_draft_tokens: int,
    topk: int = 1,
    max_ngram: int = 3,
    min_ngram: int = 1,
) -> DraftTree:
    """Draft the continuations of earlier occurrences of the ending of each sequence.

    The occurrence that agrees with the most of the last `max_ngram` tokens comes first, of equals the latest.
    A continuation that reaches the end of the text goes on from its own start. Each of `topk`
    branches follows one occurrence; a node that repeats one of an earlier branch drafts nothing, and its
    children hang below the earlier one.

    Args:
        history: token ids; only the first `lengths` of a row count.
        lengths: tokens in each row, the last of which is the root of the tree; 0 drafts nothing.
        num_draft_tokens: n, the nodes of a tree with its root.
        topk: branches from the root.
        max_ngram: tokens of the ending that are compared.
        min_ngram: tokens that an occurrence must agree with.

    Raises:
        ValueError: not 1 <= min_ngram <= max_ngram, or `topk` or `num_draft_tokens` below 1.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.speculative import propose
        >>> history = jnp.array([[7, 8, 9, 1, 7, 8, 0, 0]], dtype=jnp.int32)
        >>> propose(history, jnp.array([6]), num_draft_tokens=3).tokens.tolist()
        [[8, 9, 1]]
    """
    if not 1 <= min_ngram <= max_ngram:
        raise ValueError(
            f"expected 1 <= min_ngram <= max_ngram, got min_ngram={min_ngram}, max_ngram={max_ngram}"
        )
    if topk < 1 or num_draft_tokens < 1:
        raise ValueError(
            f"expected topk and num_draft_tokens of at least 1, got {topk} and {num_draft_tokens}"
        )
    depth = -(-(num_draft_tokens - 1) // topk)

    def one(history, length):
        last = length - 1
        starts, lookup = _occurrences(history, last, topk, max_ngram, min_ngram)
        step = jnp.arange(depth, dtype=jnp.int64)
        period = jnp.maximum(last - starts, 1)[:, None]
        source = starts[:, None] + 1 + step % period
        paths = jnp.where(lookup[:, None], history.at[source].get(mode="clip"), -1)  # [topk, depth]
        same = jnp.cumprod(paths[:, None] == paths[None, :], axis=2).astype(bool)
        first = jax.lax.argmax(same, 1, jnp.int32)  # [topk, depth]: the first branch with this prefix
        branch = jnp.arange(topk, dtype=jnp.int32)[:, None]
        tokens = jnp.where(first == branch, paths, -1)
        parents = first + 1 + jnp.arange(depth, dtype=jnp.int32) * topk
        return (
            tokens.T.reshape(-1),
            parents.T.reshape(-1),
            jnp.where(length > 0, history[jnp.maximum(last, 0)], -1),
        )

    tokens, above, root = jax.vmap(one)(history, jnp.asarray(lengths, jnp.int64))
    levels = jnp.broadcast_to(branch_parents(num_draft_tokens, topk), (history.shape[0], num_draft_tokens))
    deeper = above[:, : max(num_draft_tokens - 1 - topk, 0)]
    return DraftTree(
        tokens=jnp.concatenate([root[:, None], tokens[:, : num_draft_tokens - 1]], axis=1),
        parents=levels.at[:, 1 + topk :].set(deeper),
    )


def _occurrences(history, last, count, max_ngram, min_ngram):
    """The best `count` positions before `last` at which the ending of the text occurs, and which are real."""
    position = jnp.arange(history.shape[0], dtype=jnp.int64)
    agreed = jnp.zeros(history.shape, jnp.int64)
    unbroken = position < last
    for back in range(max_ngram):
        inside = (position >= back) & (last >= back)
        unbroken &= inside & (jnp.roll(history, back) == history[jnp.maximum(last - back, 0)])
        agreed += unbroken
    rank = jnp.where(agreed >= min_ngram, agreed * history.shape[0] + position, -1)
    if count > history.shape[0]:
        rank = jnp.pad(rank, (0, count - history.shape[0]), constant_values=-1)
    value, start = jax.lax.top_k(rank, count)
    return jnp.where(value >= 0, start.astype(jnp.int64), 0), value >= 0
