"""Tokens per pass that the shape of a draft tree allows, from how often the draft's guesses are right."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn.speculative import DraftTree, accept_greedy


def ranks(parents: Sequence[int]) -> list[int]:
    """The place of each node among its siblings: 0 for the draft's best guess."""
    seen: dict[int, int] = {}
    found = []
    for parent in parents:
        found.append(seen.get(parent, 0))
        seen[parent] = found[-1] + 1
    return found


def reach(parents: Sequence[int], accuracy: Sequence[float]) -> np.ndarray:
    """Probability that each node is accepted, where guess `r` of a node is right with probability `accuracy[r]`.

    Example:
        >>> from bench.acceptance import reach
        >>> reach([-1, 0, 0, 1], [0.5, 0.25]).tolist()
        [1.0, 0.5, 0.25, 0.25]
    """
    probability = np.ones(len(parents))
    for node, (parent, rank) in enumerate(zip(parents, ranks(parents), strict=True)):
        if parent >= 0:
            probability[node] = probability[parent] * accuracy[rank]
    return probability


def simulated_tokens(
    parents: Sequence[int], accuracy: Sequence[float], passes: int, seed: int = 0
) -> np.ndarray:
    """Tokens of each of `passes` verify passes, accepted by `accept_greedy`; their mean tends to `sum(reach(...))`."""
    n = len(parents)
    # Node i drafts token i; token n stands for everything that is not drafted.
    guess = np.random.default_rng(seed).choice(
        len(accuracy) + 1, size=(passes, n), p=[*accuracy, 1 - sum(accuracy)]
    )
    chosen = np.full((passes, n), n)
    for node, (parent, rank) in enumerate(zip(parents, ranks(parents), strict=True)):
        if parent >= 0:
            chosen[:, parent] = np.where(guess[:, parent] == rank, node, chosen[:, parent])
    logits = np.eye(n + 1, dtype=np.float32)[chosen]
    tree = DraftTree(
        tokens=jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32), (passes, n)),
        parents=jnp.broadcast_to(jnp.asarray(parents, jnp.int32), (passes, n)),
    )
    return np.asarray(jax.jit(accept_greedy)(jnp.asarray(logits), tree).accept_len)
