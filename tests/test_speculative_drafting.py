"""Trees grown from draft logits, and prompt lookup, against plain loops."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxattn.speculative import (
    branch_parents,
    draw_children,
    expand,
    keep_best,
    propose,
    select_tree,
)


def log_softmax(row):
    row = row.astype(np.float64)
    return row - row.max() - np.log(np.exp(row - row.max()).sum())


@functools.partial(jax.jit, static_argnames=("topk", "n"))
def two_levels(root, first, second, topk, n):
    """Grow `topk` nodes, then the `topk` best of topk * topk, and keep n - 1; also where the beam was."""
    rows = first.shape[0]
    zeros = jnp.zeros((rows, 1), jnp.float32)
    found = expand(first[:, None], zeros, jnp.full((rows, 1), -1, jnp.int32), topk)
    beam = keep_best(found, topk)
    scores = jnp.take_along_axis(found.scores, beam, axis=1)
    found = found.extend(expand(second, scores, beam, topk))
    return select_tree(root, found, n), beam


def loop_two_levels(root, first, second, topk, n):
    nodes = []
    row = log_softmax(first)
    for token in np.argsort(-row, kind="stable")[:topk]:
        nodes.append((row[token], int(token), -1))
    for parent in range(topk):
        row = log_softmax(second[parent])
        for token in np.argsort(-row, kind="stable")[:topk]:
            nodes.append((nodes[parent][0] + row[token], int(token), parent))
    chosen = sorted(sorted(range(len(nodes)), key=lambda i: -nodes[i][0])[: n - 1])
    tokens = [root] + [nodes[i][1] for i in chosen]
    parents = [-1] + [0 if nodes[i][2] < 0 else chosen.index(nodes[i][2]) + 1 for i in chosen]
    return tokens, parents


@pytest.mark.parametrize("n", [2, 6, 13])
def test_the_best_nodes_of_each_sequence_form_its_tree(n):
    rng = np.random.default_rng(n)
    rows, topk, vocab = 16, 3, 11
    root = rng.integers(0, vocab, rows).astype(np.int32)
    first = rng.standard_normal((rows, vocab)).astype(np.float32) * 2
    second = rng.standard_normal((rows, topk, vocab)).astype(np.float32) * 2
    tree, _ = two_levels(root, first, second, topk, n)
    shapes = set()
    for s in range(rows):
        tokens, parents = loop_two_levels(int(root[s]), first[s], second[s], topk, n)
        assert tree.tokens[s].tolist() == tokens
        assert tree.parents[s].tolist() == parents
        shapes.add(tuple(parents))
    assert n != 6 or len(shapes) > 3


def test_draft_logits_without_values_leave_nodes_that_draft_nothing():
    first = jnp.full((1, 4), -jnp.inf).at[0, 2].set(0.0)
    second = jnp.full((1, 3, 4), jnp.nan)
    tree, _ = two_levels(jnp.asarray([9], jnp.int32), first, second, 3, 5)
    tokens = tree.tokens[0].tolist()
    assert tokens[:2] == [9, 2]
    parents = np.asarray(tree.parents[0])
    assert (parents[1:] < np.arange(1, 5)).all()
    reachable = [tokens[j] for j in range(1, 5) if parents[j] == 0]
    assert reachable.count(-1) == len(reachable) - 1


def test_too_few_candidates_for_the_tree_are_refused():
    with pytest.raises(ValueError, match="num_draft_tokens: expected at most 7"):
        two_levels(jnp.zeros(1, jnp.int32), jnp.zeros((1, 5)), jnp.zeros((1, 2, 5)), 2, 8)


def test_branches_share_only_the_root():
    assert branch_parents(8, 3).tolist() == [-1, 0, 0, 0, 1, 2, 3, 4]
    assert branch_parents(4, 1).tolist() == [-1, 0, 1, 2]


def test_children_are_drawn_without_replacement_in_order():
    draws = 200_000
    weights = np.asarray([0.5, 0.2, 0.3, 0.0])
    keys = jax.random.split(jax.random.key(0), draws)
    children = np.asarray(
        jax.jit(draw_children, static_argnums=2)(keys, jnp.tile(jnp.float32(weights), (draws, 1)), 4)
    )
    assert (children[:, 3] == -1).all()
    pairs = np.bincount(children[:, 0] * 4 + children[:, 1], minlength=16).reshape(4, 4)
    want = weights[:, None] * weights / (1 - weights)[:, None] * draws
    np.fill_diagonal(want, 0)
    assert pairs[want == 0].sum() == 0
    statistic = ((pairs - want)[want > 0] ** 2 / want[want > 0]).sum()
    assert scipy.stats.chi2.sf(statistic, 5) > 1e-3


def loop_propose(history, length, n, topk, max_ngram, min_ngram):
    """Nodes as (path of tokens) of each branch, in the order of preference."""
    last, scored = length - 1, []
    for end in range(last):
        agreed = 0
        while agreed < max_ngram and end >= agreed and history[end - agreed] == history[last - agreed]:
            agreed += 1
        if agreed >= min_ngram:
            scored.append((agreed, end))
    scored = sorted(scored, reverse=True)[:topk]
    depth = -(-(n - 1) // topk)
    return [tuple(history[end + 1 + i % (last - end)] for i in range(depth)) for _, end in scored]


def paths_of(tokens, parents):
    """The tokens on the way to each node that drafts something."""
    paths = {0: ()}
    for node in range(1, len(tokens)):
        if tokens[node] >= 0 and parents[node] in paths:
            paths[node] = (*paths[parents[node]], int(tokens[node]))
    return [paths[node] for node in sorted(paths) if node]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=12),
    st.integers(0, 11),
    st.sampled_from([(1, 5), (2, 6), (3, 8)]),
)
def test_prompt_lookup_equals_a_loop(text, cut, shape):
    topk, n = shape
    length = max(1, len(text) - cut)
    history = np.full((1, 12), 7, np.int32)
    history[0, : len(text)] = text
    tree = propose(history, np.array([length]), num_draft_tokens=n, topk=topk, max_ngram=3, min_ngram=1)
    tokens, parents = np.asarray(tree.tokens[0]), np.asarray(tree.parents[0])
    assert tokens[0] == text[length - 1]
    assert (parents[1:] < np.arange(1, n)).all()
    branches = loop_propose(list(history[0]), length, n, topk, 3, 1)
    found = paths_of(tokens, parents)
    assert len(set(found)) == len(found)
    slots = [branch_path for level in range(-(-(n - 1) // topk)) for branch_path in range(topk)][: n - 1]
    level = [i // topk for i in range(n - 1)]
    want = {branches[b][: d + 1] for b, d in zip(slots, level, strict=True) if b < len(branches)}
    assert set(found) == want


def test_prompt_lookup_drafts_nothing_without_an_occurrence_or_a_text():
    history = jnp.asarray([[1, 2, 3, 4], [5, 5, 5, 5]], jnp.int32)
    tree = propose(history, jnp.asarray([4, 0]), num_draft_tokens=3)
    assert tree.tokens.tolist() == [[4, -1, -1], [-1, -1, -1]]


def test_prompt_lookup_runs_under_jit_with_x64_off_and_on():
    history = jnp.asarray([[7, 8, 9, 1, 7, 8, 0, 0]], jnp.int32)
    draft = functools.partial(propose, num_draft_tokens=4, topk=1)
    for x64 in (False, True):
        with jax.enable_x64(x64):
            assert jax.jit(draft)(history, jnp.asarray([6])).tokens.tolist() == [[8, 9, 1, 7]]


@pytest.mark.parametrize(("name", "value"), [("min_ngram", 0), ("topk", 0), ("num_draft_tokens", 0)])
def test_prompt_lookup_refuses_bad_numbers(name, value):
    arguments = {"num_draft_tokens": 4} | {name: value}
    with pytest.raises(ValueError, match=name):
        propose(jnp.zeros((1, 4), jnp.int32), jnp.asarray([2]), **arguments)
