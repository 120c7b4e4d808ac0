"""From products of queries and keys to scores: softcap, ALiBi, masks."""

import jax.numpy as jnp
from jax import lax

from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.arithmetic import quotient, remainder
from jaxattn.kernels.pallas.block import Block
from jaxattn.kernels.pallas.memory import load

LOG2E = 1.4426950408889634


def tanh(x):
    """`tanh` with a small relative error near 0, which the compilers' own need not have."""
    t = lax.exp2(jnp.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - t) / (1.0 + t)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return jnp.where(jnp.abs(x) < 0.2, near, jnp.where(x < 0.0, -far, far))


def key_positions(key, block: Block, depths, C: AttentionConstants):
    """What the window and ALiBi measure to: the key's index, or context + depth for a draft node among others."""
    if C.tree_words == 0 or C.path_keys or not (C.window > 0 or C.alibi):
        return key
    node = key - block.context
    draft = (node >= 0) & (node < block.q_len)
    depth = load(depths, block.q_start + node.astype(jnp.int64), draft)
    return jnp.where(draft, block.context + depth, key)  # [TILE]


def modified(score, block: Block, key_position, C: AttentionConstants):
    """Apply softcap and ALiBi to scores in natural units."""
    if C.softcap > 0:
        score = tanh(score * (1.0 / C.softcap)) * C.softcap
    if C.alibi:
        distance = jnp.abs(block.position[:, None] - key_position[None, :]).astype(jnp.float32)
        score = score - block.slope[:, None] * distance
    return score  # [BM, TILE]


def masked(score, block: Block, key, key_position, known, ancestors, C: AttentionConstants):
    """Put -inf where a row does not see a key."""
    visible = (key[None, :] <= block.limit[:, None]) & known[None, :]  # [BM, TILE]
    if C.window > 0:
        visible = visible & (key_position[None, :] >= block.position[:, None] - (C.window - 1))
    if C.tree_words > 0 and not C.path_keys:
        # Integers, because a compiler that moves this mask through shared memory cannot store single bits.
        visible = lax.cond(
            jnp.max(key) >= block.context,
            lambda seen: seen & _tree_visible(ancestors, block, key, C),
            lambda seen: seen,
            visible.astype(jnp.int32),
        )
        visible = visible != 0
    return jnp.where(visible, score, -jnp.inf)


def _tree_visible(ancestors, block: Block, key, C: AttentionConstants):
    """1 where the ancestor bit of a draft node is set in a row, and for keys of the prefix; else 0.

    A row's words are loaded whole, not one for each key: a load of a [BM, TILE] tile would bring the scores into its
    own layout, and with it the sums of weights into another order than they have without a tree.
    """
    node = key - block.context
    draft = (node >= 0) & (node < block.q_len)  # [TILE]
    place = jnp.where(draft, node, 64 * C.tree_words)
    bit = remainder(place, 64).astype(jnp.uint64)
    seen = jnp.broadcast_to((node < 0)[None, :].astype(jnp.int32), (C.block_rows, C.tile))
    for number in range(C.tree_words):
        word = load(ancestors, block.row * C.tree_words + number, block.live)  # [BM]
        bits = lax.shift_right_logical(
            jnp.broadcast_to(word[:, None], seen.shape), jnp.broadcast_to(bit[None, :], seen.shape)
        )
        here = (quotient(place, 64) == number)[None, :]
        seen = seen | jnp.where(here, (bits & 1).astype(jnp.int32), 0)
    return seen
