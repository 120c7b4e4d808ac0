"""From products of queries and keys to scores and softmax weights: softcap, ALiBi, masks, the running maximum."""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tanh(x):
    t = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - t) / (1.0 + t)
    square = x * x
    near = x * (1.0 + square * (-1.0 / 3.0 + square * (2.0 / 15.0 + square * (-17.0 / 315.0))))
    return tl.where(tl.abs(x) < 0.2, near, tl.where(x < 0.0, -far, far))


@triton.jit
def key_positions(key, context, tree, C: tl.constexpr):
    """What the window and ALiBi measure to: the key's index, or context + depth for a draft node among others."""
    position = key
    if (C.tree_words > 0) and (not C.path_keys) and ((C.window > 0) or C.alibi):
        _, depths_ptr, q_start, q_len, _ = tree
        node = key - context
        draft = (node >= 0) & (node < q_len)
        depth = tl.load(depths_ptr + q_start + node.to(tl.int64), mask=draft, other=0)
        position = tl.where(draft, context + depth, key)
    return position  # [TILE]


@triton.jit
def modified(score, rows, key_position, C: tl.constexpr):
    """Apply softcap and ALiBi to scores in natural units."""
    _, _, position, slope = rows
    if C.softcap > 0:
        score = _tanh(score * (1.0 / C.softcap)) * C.softcap
    if C.alibi:
        distance = tl.abs(position[:, None] - key_position[None, :]).to(tl.float32)
        score = score - slope[:, None] * distance
    return score  # [BM, TILE]


@triton.jit
def constant_rows(value, C: tl.constexpr):
    """Repeat a number for each row of a block."""
    return tl.full([C.block_rows], value, tl.float32)


@triton.jit
def _tree_visible(tree, node, live, C: tl.constexpr):
    """Whether the ancestor bit of a draft node is set in each row; prefix keys are visible.

    A row's words are loaded whole, not one for each key: a load of a [BM, TILE] tile would bring the scores into its
    own layout, and with it the sums of weights into another order than they have without a tree.
    """
    ancestors_ptr, _, _, q_len, row = tree
    draft = (node >= 0) & (node < q_len)  # [TILE]
    place = tl.where(draft, node, 64 * C.tree_words)
    bit = (place % 64)[None, :].to(tl.uint64)
    seen = tl.broadcast_to((node < 0)[None, :].to(tl.int32), [C.block_rows, C.tile])
    words: tl.constexpr = C.tree_words
    for number in tl.static_range(words):
        word = tl.load(ancestors_ptr + row * C.tree_words + number, mask=live, other=0)  # [BM]
        bits = ((word[:, None] >> bit) & 1).to(tl.int32)
        seen = seen | tl.where((place // 64 == number)[None, :], bits, 0)
    return seen


@triton.jit
def masked(score, rows, key, key_position, known, context, tree, C: tl.constexpr):
    """Put -inf where a row does not see a key."""
    limit, floor, _, _ = rows
    visible = (key[None, :] <= limit[:, None]) & known[None, :]  # [BM, TILE]
    if C.window > 0:
        visible = visible & (key_position[None, :] >= floor[:, None])
    if (C.tree_words > 0) and (not C.path_keys):
        # Integers, because a compiler that moves this mask through shared memory cannot store single bits.
        seen = visible.to(tl.int32)
        if tl.max(key, 0) >= context:
            seen = seen & _tree_visible(tree, key - context, limit >= 0, C)
        visible = seen != 0
    return tl.where(visible, score, float("-inf"))


@triton.jit
def weights(score, peak, unit, C: tl.constexpr):
    """Softmax weights relative to the new running maximum, that maximum, and the decay of what came before.

    One rounding of `score * unit - maximum` keeps differences of huge scores exact.
    """
    new_peak = tl.maximum(peak, tl.max(score, 1) * unit - C.weight_shift)
    base = tl.where(new_peak == float("-inf"), 0.0, new_peak)
    decay = tl.exp2(peak - base)
    weight = tl.exp2(tl.fma(score, unit[:, None], -base[:, None]))  # [BM, TILE]
    return weight, new_peak, decay
