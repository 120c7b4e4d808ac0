"""Acceptance against plain loops, and its output distribution against the target's."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from jaxattn.speculative import (
    DraftTree,
    SamplingParams,
    accept_greedy,
    accept_sampled,
    branch_parents,
    draw,
    draw_children,
    keys_at,
    probabilities,
    rejection_walk,
)

DRAWS = 200_000
greedy_walk = jax.jit(accept_greedy)
sampled_walk = jax.jit(accept_sampled)


def random_trees(rng, rows, n, vocab, pads=0.2):
    parents = np.full((rows, n), -1, np.int32)
    for node in range(1, n):
        parents[:, node] = rng.integers(0, node, rows)
    tokens = rng.integers(0, vocab, (rows, n)).astype(np.int32)
    tokens[:, 1:][rng.random((rows, n - 1)) < pads] = -1
    return DraftTree(tokens=jnp.asarray(tokens), parents=jnp.asarray(parents))


def loop_greedy(logits, tokens, parents):
    path = [0]
    while True:
        best = int(np.argmax(logits[path[-1]]))
        children = [j for j in range(len(tokens)) if parents[j] == path[-1] and tokens[j] == best]
        if not children:
            return path, [int(tokens[j]) for j in path[1:]] + [best]
        path.append(children[0])


def loop_rejection(probs, draft_probs, tokens, parents, coins):
    path, p, q = [0], probs[0].copy(), draft_probs[0].copy()
    node = 0
    while (node := node + 1) < len(tokens):
        if parents[node] != path[-1] or tokens[node] < 0:
            continue
        proposal = q / q.sum() if q.sum() > 0 else np.eye(len(p))[tokens[node]]
        if coins[node] * proposal[tokens[node]] < p[tokens[node]]:
            path.append(node)
            p, q = probs[node].copy(), draft_probs[node].copy()
        else:
            p = np.maximum(p - proposal, 0)
            p /= p.sum()
            q[tokens[node]] = 0
    return path, p


def padded(values, n):
    return list(values) + [-1] * (n - len(values))


@pytest.mark.parametrize("vocab", [2, 7])
def test_greedy_walk_equals_a_loop_over_random_trees(vocab):
    rng = np.random.default_rng(vocab)
    rows, n = 64, 9
    tree = random_trees(rng, rows, n, vocab)
    logits = rng.standard_normal((rows, n, vocab)).astype(np.float32)
    live = rng.random(rows) < 0.8
    got = greedy_walk(logits, tree, jnp.asarray(live))
    longest = 0
    for s in range(rows):
        path, tokens = loop_greedy(logits[s], np.asarray(tree.tokens[s]), np.asarray(tree.parents[s]))
        path, tokens = (path, tokens) if live[s] else ([], [])
        assert got.path[s].tolist() == padded(path, n)
        assert got.tokens[s].tolist() == padded(tokens, n)
        assert int(got.accept_len[s]) == len(tokens)
        longest = max(longest, len(tokens))
    assert longest >= 3
    assert np.asarray(got.sound).all()


@pytest.mark.parametrize("soft", [False, True])
def test_rejection_walk_equals_a_float64_loop(soft):
    rng = np.random.default_rng(3)
    rows, n, vocab = 64, 8, 5
    tree = random_trees(rng, rows, n, vocab, pads=0.1)
    probs = rng.dirichlet(np.ones(vocab), (rows, n))
    draft = rng.dirichlet(np.ones(vocab), (rows, n)) if soft else np.zeros((rows, n, vocab))
    coins = rng.random((rows, n))
    path, accept_len, residual = jax.jit(jax.vmap(rejection_walk))(
        *(jnp.asarray(x, jnp.float32) for x in (probs, draft)),
        tree.tokens,
        tree.parents,
        jnp.asarray(coins, jnp.float32),
    )
    for s in range(rows):
        tokens, parents = np.asarray(tree.tokens[s]), np.asarray(tree.parents[s])
        want, rest = loop_rejection(probs[s], draft[s], tokens, parents, coins[s])
        assert path[s].tolist() == padded(want, n)
        assert int(accept_len[s]) == len(want)
        np.testing.assert_allclose(residual[s], rest, atol=1e-5)
    assert np.unique(accept_len).size >= 3


P0 = [0.5, 0.3, 0.2, 0.0]
P1 = [[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.2, 0.0], [0.25, 0.25, 0.25, 0.25], [1.0, 0.0, 0.0, 0.0]]
Q0 = [0.2, 0.4, 0.1, 0.3]
Q1 = [[0.4, 0.3, 0.2, 0.1], [0.1, 0.6, 0.2, 0.1], [0.0, 0.5, 0.5, 0.0], [0.25, 0.25, 0.25, 0.25]]
Q0_DISJOINT = [0.0, 0.0, 0.6, 0.4]


def draw_tree(keys, q0, q1, topk, n):
    """Branches drawn without replacement at the root, then one draw below each; and what they were drawn from."""
    rows = keys.shape[0]
    level = draw_children(keys, jnp.broadcast_to(q0, (rows, 4)), topk)
    branch_keys = jax.vmap(lambda key: jax.random.split(key, topk))(keys).reshape(-1)
    below = draw(branch_keys, q1[jnp.maximum(level, 0).reshape(-1)]).reshape(rows, topk)
    tokens = jnp.concatenate(
        [jnp.zeros((rows, 1), jnp.int32), level, jnp.where(level >= 0, below, -1)], axis=1
    )[:, :n]
    return tokens, q1[jnp.maximum(tokens, 0)].at[:, 0].set(q0)


def choose_tree(rows, q0, q1, topk, n):
    """The same shape, of the most likely drafts instead of drawn ones."""
    level = jax.lax.top_k(q0, topk)[1].astype(jnp.int32)
    below = jnp.argmax(q1[level], axis=1).astype(jnp.int32)
    return jnp.broadcast_to(jnp.concatenate([jnp.zeros(1, jnp.int32), level, below])[:n], (rows, n))


@functools.partial(jax.jit, static_argnames=("topk", "n", "drawn"))
def two_tokens(keys, sampling, q0, topk, n, drawn):
    """The first two tokens of each row, the second drawn from the target where only one was emitted."""
    p0, p1, q1 = (jnp.asarray(x, jnp.float32) for x in (P0, P1, Q1))
    draft_keys, rest_keys = keys
    if drawn:
        tokens, draft_probs = draw_tree(draft_keys, q0, q1, topk, n)
    else:
        tokens, draft_probs = choose_tree(draft_keys.shape[0], q0, q1, topk, n), None
    logits = jnp.log(p1[jnp.maximum(tokens, 0)].at[:, 0].set(p0))
    tree = DraftTree(tokens=tokens, parents=jnp.broadcast_to(branch_parents(n, topk), tokens.shape))
    out = accept_sampled(logits, tree, sampling, jnp.zeros(len(tokens), jnp.int32), draft_probs)
    first = out.tokens[:, 0]
    second = jnp.where(out.accept_len > 1, out.tokens[:, 1], draw(rest_keys, p1[first]))
    return first * 4 + second, out.accept_len


@pytest.fixture(scope="module")
def many():
    return jax.random.split(jax.random.key(4), (2, DRAWS)), SamplingParams.create(DRAWS, temperature=1.0)


def chi_square(counts, want):
    """p-value of the counts; a count where none may be gives 0."""
    if counts[want == 0].any():
        return 0.0
    counts, want = counts[want > 0], want[want > 0] * counts.sum()
    return scipy.stats.chi2.sf(((counts - want) ** 2 / want).sum(), want.size - 1)


@pytest.mark.parametrize("drafts", ["drawn", "drawn, q zero", "chosen"])
@pytest.mark.parametrize(
    ("topk", "n"), [(1, 2), (1, 3), (2, 5), (3, 6)], ids=["one", "chain", "tree", "uneven"]
)
def test_two_tokens_have_the_joint_distribution_of_the_target(topk, n, drafts, many):
    q0 = jnp.asarray(Q0_DISJOINT if drafts == "drawn, q zero" else Q0, jnp.float32)
    cells, lengths = two_tokens(*many, q0, topk, n, drafts != "chosen")
    counts = np.bincount(np.asarray(cells), minlength=16)
    want = (np.asarray(P0)[:, None] * np.asarray(P1)).reshape(-1)
    assert chi_square(counts, want) > 1e-3
    assert np.unique(lengths).tolist() == list(range(1, min(n, 3) + 1))


def test_the_distribution_test_sees_a_bias_of_one_percent():
    assert chi_square(np.asarray([0.505, 0.295, 0.2]) * DRAWS, np.asarray([0.5, 0.3, 0.2])) < 1e-4


def test_a_drawn_draft_is_accepted_with_the_probability_that_both_share(many):
    _, lengths = two_tokens(*many, jnp.asarray(Q0, jnp.float32), 1, 2, True)
    shared = np.minimum(P0, Q0).sum()
    assert abs((np.asarray(lengths) == 2).mean() - shared) < 4 * np.sqrt(shared * (1 - shared) / DRAWS)


def test_rows_of_temperature_zero_emit_what_the_greedy_walk_emits():
    rng = np.random.default_rng(5)
    rows, n, vocab = 32, 6, 3
    tree = random_trees(rng, rows, n, vocab)
    logits = jnp.asarray(rng.standard_normal((rows, n, vocab)), jnp.float32)
    temperature = np.where(np.arange(rows) % 2, 0.8, 0.0)
    sampling = SamplingParams.create(rows, temperature=temperature, top_p=0.9, top_k=2)
    positions = jnp.arange(rows, dtype=jnp.int32)
    draft = jnp.asarray(rng.dirichlet(np.ones(vocab), (rows, n)), jnp.float32)
    draft = jnp.where((temperature > 0)[:, None, None], draft, 0)
    greedy = greedy_walk(logits, tree)
    for rows_of_drafts in (None, draft):
        sampled = sampled_walk(logits, tree, sampling, positions, rows_of_drafts)
        for field in ("tokens", "path", "accept_len"):
            np.testing.assert_array_equal(getattr(sampled, field)[::2], getattr(greedy, field)[::2])
        assert (np.asarray(sampled.accept_len) >= 1).all()


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("temperature", "drawn"), [(0.0, False), (1.0, False), (1.0, True)])
def test_unsound_logits_are_reported_and_stay_in_their_row(poison, temperature, drawn):
    rng = np.random.default_rng(7)
    tree = random_trees(rng, 3, 5, 6, pads=0)
    logits = rng.standard_normal((3, 5, 6)).astype(np.float32)
    clean = logits.copy()
    logits[1] = poison
    sampling = SamplingParams.create(3, temperature=temperature)
    positions = jnp.arange(3, dtype=jnp.int32)
    draft = jnp.full((3, 5, 6), 1 / 6, jnp.float32) if drawn else None
    got, want = (sampled_walk(jnp.asarray(x), tree, sampling, positions, draft) for x in (logits, clean))
    assert got.sound.tolist() == [True, False, True]
    np.testing.assert_array_equal(got.tokens[::2], want.tokens[::2])
    assert int(got.accept_len[1]) >= 1
    emitted = np.asarray(got.tokens[1, : int(got.accept_len[1])])
    assert ((emitted >= 0) & (emitted < 6)).all()


def test_unsound_logits_at_a_node_that_decides_nothing_are_not_reported():
    tree = DraftTree.chain(jnp.asarray([[0, 3, 1]], jnp.int32))
    logits = jnp.zeros((1, 3, 4)).at[0, 0, 2].set(1.0).at[0, 1:].set(jnp.nan)
    got = accept_greedy(logits, tree)
    assert got.tokens.tolist() == [[2, -1, -1]]
    assert got.sound.tolist() == [True]


def test_a_draft_outside_the_vocabulary_is_never_accepted():
    tree = DraftTree.chain(jnp.asarray([[0, 4, 4], [0, -1, 2], [0, 3, -1]], jnp.int32))
    logits = jnp.zeros((3, 3, 4)).at[:, :, 3].set(1.0)
    sampling = SamplingParams.create(3)
    positions = jnp.zeros(3, jnp.int32)
    for got in (
        greedy_walk(logits, tree),
        sampled_walk(logits, tree, sampling, positions),
        sampled_walk(logits, tree, sampling, positions, jnp.zeros_like(logits)),
    ):
        assert got.tokens.tolist() == [[3, -1, -1], [3, -1, -1], [3, 3, -1]]


def test_chosen_drafts_do_not_change_the_sampled_text():
    rng = np.random.default_rng(9)
    rows, n, vocab = 64, 7, 3
    tree = random_trees(rng, rows, n, vocab)
    table = jnp.asarray(rng.standard_normal((vocab, vocab)), jnp.float32)
    logits = table[jnp.maximum(tree.tokens, 0)]
    sampling = SamplingParams.create(rows, temperature=1.0, top_p=0.9, seed=3)
    positions = jnp.arange(rows, dtype=jnp.int32)
    got = sampled_walk(logits, tree, sampling, positions)
    token, written = jnp.maximum(tree.tokens[:, 0], 0), []
    for step in range(n):
        probs, _ = probabilities(table[token][:, None], sampling)
        token = draw(keys_at(sampling, positions + step), probs[:, 0])
        written.append(token)
    written = np.stack(written, axis=1)
    inside = np.arange(n) < np.asarray(got.accept_len)[:, None]
    np.testing.assert_array_equal(np.asarray(got.tokens)[inside], written[inside])
    assert np.asarray(got.accept_len).max() >= 4


def test_probabilities_equal_a_float64_loop():
    rng = np.random.default_rng(11)
    temperature, top_k, top_p = [0.5, 1.0, 2.0, 0.0, 1.0], [0, 3, 4, 2, 1], [0.7, 1.0, 0.8, 0.5, 1.0]
    logits = rng.standard_normal((5, 2, 9)) * 2
    sampling = SamplingParams.create(5, temperature=temperature, top_k=top_k, top_p=top_p)
    got, sound = probabilities(jnp.asarray(logits, jnp.float32), sampling)
    assert np.asarray(sound).all()
    for s in range(5):
        for i in range(2):
            row = logits[s, i]
            if temperature[s] == 0:
                want = np.eye(9)[row.argmax()]
            else:
                want = np.exp(row / temperature[s])
                want /= want.sum()
                order = np.argsort(-want, kind="stable")
                want[order[top_k[s] or 9 :]] = 0
                want /= want.sum()
                cut = np.searchsorted(np.cumsum(want[order]), top_p[s]) + 1
                want[order[cut:]] = 0
                want /= want.sum()
            np.testing.assert_allclose(got[s, i], want, atol=1e-6)


def test_a_tiny_temperature_does_not_overflow():
    probs, _ = probabilities(jnp.asarray([[[3e38, 1.0, -3e38]]]), SamplingParams.create(1, temperature=1e-30))
    assert probs.tolist() == [[[1.0, 0.0, 0.0]]]


@pytest.mark.parametrize(
    ("argument", "value"),
    [("temperature", -1.0), ("temperature", np.nan), ("top_p", 0.0), ("top_p", 1.5), ("top_k", -1)],
)
def test_bad_sampling_values_are_refused_by_name(argument, value):
    with pytest.raises(ValueError, match=argument):
        SamplingParams.create(2, **{argument: value})


def test_sampling_values_must_be_one_or_one_per_row():
    with pytest.raises(ValueError, match="top_k: expected one value or 2, got shape \\(3,\\)"):
        SamplingParams.create(2, top_k=[1, 2, 3])
