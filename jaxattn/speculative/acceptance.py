"""Which nodes of a draft tree the target accepts, and the token that follows the last of them.

Node 0 of a tree is the last verified token; the target's row of logits at a node says what follows it.
Nodes are visited in index order, so a parent comes before its children and siblings are tried in
the order in which they were drawn.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, Int32

from jaxattn.speculative.drafting import DraftTree
from jaxattn.speculative.sampling import (
    BONUS_STREAM,
    COIN_STREAM,
    SamplingParams,
    draw,
    keys_at,
    probabilities,
    substream,
    usable_logits,
)
from jaxattn.tree import ancestor_bits, depths


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class Acceptance:
    """What one verify step emits, per sequence.

    `tokens` are the accepted draft tokens and then the target's own next token, `path` the accepted
    nodes from node 0 on; both hold `accept_len` entries and -1 after them. A sequence that is not live
    has `accept_len` 0. `sound` is False where a row of logits that decided something held NaN or +inf,
    or nothing above -inf.
    """

    tokens: Int32[Array, "S n"]
    path: Int32[Array, "S n"]
    accept_len: Int32[Array, "S"]
    sound: Bool[Array, "S"]


def accept_greedy(
    logits: Float[Array, "S n V"], tree: DraftTree, live: Bool[Array, "S"] | None = None
) -> Acceptance:
    """Follow the children whose token is the argmax of the target's row, then emit the argmax at the end.

    Args:
        logits: the target's logits at each node.
        tree: draft tokens and parents; a token outside the vocabulary, such as -1, is never accepted.
        live: sequences that take part; all by default.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.speculative import DraftTree, accept_greedy
        >>> tree = DraftTree.chain(jnp.array([[5, 1, 2]], dtype=jnp.int32))
        >>> logits = jnp.eye(4, dtype=jnp.float32)[jnp.array([[1, 3, 0]])]
        >>> accept_greedy(logits, tree).tokens.tolist()
        [[1, 3, -1]]
    """
    logits, sound = usable_logits(logits)
    return _accept_chosen(jnp.argmax(logits, axis=-1).astype(jnp.int32), sound, tree, logits.shape[-1], live)


def accept_sampled(
    logits: Float[Array, "S n V"],
    tree: DraftTree,
    sampling: SamplingParams,
    positions: Int[Array, "S"],
    draft_probs: Float32[Array, "S n V"] | None = None,
    live: Bool[Array, "S"] | None = None,
) -> Acceptance:
    """Accept drafts so that every emitted token has exactly the target's distribution.

    Without `draft_probs` a token is drawn from the target at each node, with the randomness of the position
    that follows the node, and the walk goes to the child that has it: the text is the one that `draw` writes
    token by token with `keys_at(sampling, position)`, whatever is drafted. With `draft_probs` drafts are accepted by
    recursive rejection, which takes more of them where the two distributions are alike.

    Args:
        logits: the target's logits at each node.
        tree: see `accept_greedy`. Without `draft_probs` the drafts may have been made in any way that does not
            look at the keys. With them the children of a node are successive draws without replacement from
            its row, and all that were drawn are in the tree; an all-zero row stands for any other way.
        sampling: temperature, top-k, top-p and key of each sequence; the rows of temperature 0 emit
            what `accept_greedy` emits.
        positions: position of the first token that each sequence emits.
        draft_probs: the distribution from which the children of each node were drawn.
        live: sequences that take part; all by default.

    The rule for one draft is that of Leviathan et al. 2023 (arXiv:2211.17192) and Chen et al. 2023
    (arXiv:2302.01318); over siblings it is repeated on the residual as in SpecInfer (arXiv:2305.09781).
    """
    probs, sound = probabilities(logits, sampling)
    sequences, n, vocab = probs.shape
    if draft_probs is None:
        following = positions[:, None] + depths(ancestor_bits(tree.parents)).reshape(sequences, n)
        keys = jax.vmap(keys_at, in_axes=(None, 1), out_axes=1)(sampling, following)
        chosen = draw(keys.reshape(-1), probs.reshape(-1, vocab)).reshape(sequences, n)
        return _accept_chosen(chosen, sound, tree, vocab, live)
    keys = keys_at(sampling, positions)
    coins = jax.vmap(lambda key: jax.random.uniform(key, (n,), jnp.float32))(substream(keys, COIN_STREAM))
    path, accept_len, residual = jax.vmap(rejection_walk)(
        probs, draft_probs, tree.tokens, tree.parents, coins
    )
    return _emit(tree, path, accept_len, draw(substream(keys, BONUS_STREAM), residual), sound, live)


def _accept_chosen(chosen: Int32[Array, "S n"], sound, tree: DraftTree, vocab: int, live) -> Acceptance:
    """Follow the children that have the token chosen at their parent."""

    def one(chosen, tokens, parents):
        def attempt(node, current, state):
            return tokens[node] == chosen[current], state

        path, accept_len, _ = _walk(tokens, parents, vocab, (), attempt)
        return path, accept_len, chosen[path[accept_len - 1]]

    path, accept_len, bonus = jax.vmap(one)(chosen, tree.tokens, tree.parents)
    return _emit(tree, path, accept_len, bonus, sound, live)


def rejection_walk(
    probs: Float32[Array, "n V"],
    draft_probs: Float32[Array, "n V"],
    tokens: Int32[Array, "n"],
    parents: Int32[Array, "n"],
    coins: Float32[Array, "n"],
) -> tuple[Int32[Array, "n"], Int32[Array, ""], Float32[Array, "V"]]:
    """Walk one tree by rejection: the accepted path, its length, and what the next token is drawn from.

    A child of token x is accepted iff `coin * q(x) < p(x)`, strictly, so probability 0 is never accepted.
    After a rejection p becomes the normalised `max(p - q, 0)` and q loses x. A row of `draft_probs`
    without any mass stands for q(x) = 1.

    Args:
        probs: the target's distribution at each node.
        draft_probs: the distribution that the children of each node were drawn from.
        tokens: the token of each node.
        parents: the parent of each node.
        coins: uniform in [0, 1), one per node.
    """
    draft_probs = jnp.where(jnp.isfinite(draft_probs), draft_probs, jnp.float32(0))
    vocab = probs.shape[-1]

    def attempt(node, current, state):
        p, q = state
        token = tokens[node]
        certain = jax.nn.one_hot(token, vocab, dtype=jnp.float32)
        mass = jnp.sum(q)
        proposal = jnp.where(mass > 0, q / jnp.where(mass > 0, mass, jnp.float32(1)), certain)
        accepted = coins[node] * proposal[token] < p[token]
        rest = jnp.maximum(p - proposal, jnp.float32(0))
        left = jnp.sum(rest)
        rest = jnp.where(left > 0, rest / jnp.where(left > 0, left, jnp.float32(1)), p)
        p = jnp.where(accepted, probs[node], rest)
        q = jnp.where(
            accepted, draft_probs[node], jnp.where(jnp.arange(q.shape[-1]) == token, jnp.float32(0), q)
        )
        return accepted, (p, q)

    path, accept_len, (residual, _) = _walk(tokens, parents, vocab, (probs[0], draft_probs[0]), attempt)
    return path, accept_len, residual


def _walk(
    tokens: Int32[Array, "n"],
    parents: Int32[Array, "n"],
    vocab: int,
    state: Any,
    attempt: Callable[[Any, Any, Any], tuple[Any, Any]],
) -> tuple[Int32[Array, "n"], Int32[Array, ""], Any]:
    """Go from node 0 to a child for which `attempt(node, current, state)` says so, until none is left."""
    n = tokens.shape[0]

    def visit(node, walk):
        current, length, path, state = walk
        eligible = (parents[node] == current) & (tokens[node] >= 0) & (tokens[node] < vocab)
        accepted, tried = attempt(node, current, state)
        accepted = accepted & eligible
        state = jax.tree.map(lambda new, old: jnp.where(eligible, new, old), tried, state)
        path = path.at[length].set(jnp.where(accepted, node, path[length]), mode="drop")
        return jnp.where(accepted, node, current), length + accepted.astype(jnp.int32), path, state

    path = jnp.full((n,), -1, jnp.int32).at[0].set(0)
    start = (jnp.int32(0), jnp.int32(1), path, state)
    _, length, path, state = jax.lax.fori_loop(jnp.int32(1), jnp.int32(n), visit, start)
    return path, length, state


def _emit(tree, path, accept_len, bonus, sound, live) -> Acceptance:
    """Put the accepted drafts and the bonus token in order, and blank the sequences that are not live."""
    n = path.shape[1]
    live = jnp.ones(path.shape[:1], bool) if live is None else live
    column = jnp.arange(n, dtype=jnp.int32)
    following = jnp.concatenate([path[:, 1:], jnp.zeros_like(path[:, :1])], axis=1)
    accepted = jnp.take_along_axis(tree.tokens, jnp.maximum(following, 0), axis=1)
    tokens = jnp.where(column == accept_len[:, None] - 1, bonus[:, None], accepted)
    inside = (column < accept_len[:, None]) & live[:, None]
    decided = jnp.take_along_axis(sound, jnp.maximum(path, 0), axis=1) | ~inside
    return Acceptance(
        tokens=jnp.where(inside, tokens, -1),
        path=jnp.where(inside, path, -1),
        accept_len=jnp.where(live, accept_len, 0),
        sound=jnp.all(decided, axis=1),
    )
