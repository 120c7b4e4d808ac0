"""Public bug reports about speculative decoding, each as a test that carries its number."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import oracle
import pytest
from test_speculative_acceptance import greedy_walk, sampled_walk
from toy_decoder import VOCAB, plain_text, program, setup

from jaxattn import PagedKVCache, draft_extend_metadata, target_verify_metadata, unified_attention, write_kv
from jaxattn.speculative import (
    DraftTree,
    ModelDrafter,
    NgramDrafter,
    ProgramDraft,
    SamplingParams,
    draw,
    rejection_walk,
    select_tree,
    window_ring,
)
from jaxattn.speculative.drafting import Candidates
from jaxattn.tree import ancestor_bits, tree_positions

PROMPTS = [np.random.default_rng(8).integers(0, VOCAB, size).tolist() for size in (30, 7)]
text = functools.cache(lambda row, new: plain_text(PROMPTS[row], new))


def slots_of(lengths, page_size, first_page=1):
    """Shuffled pages for sequences of these lengths, as a request pool of slots."""
    pages = [-(-length // page_size) for length in lengths]
    ids = np.random.default_rng(0).permutation(sum(pages)) + first_page
    pool = np.full((len(lengths), max(pages) * page_size), -1, np.int64)
    for row, own in enumerate(np.split(ids, np.cumsum(pages)[:-1])):
        pool[row, : len(own) * page_size] = (own[:, None] * page_size + np.arange(page_size)).reshape(-1)
    return pool


def seen_keys(pool, lengths, metadata, implementation, **options):
    """The keys that each query row sees: with equal scores its output is the mean of one-hot values."""
    width, page_size, rows = int(max(lengths)), metadata.page_size, int(metadata.cu_seqlens_q[-1])
    num_pages = int(pool.max()) // page_size + 1
    v = np.full((num_pages * page_size, 1, width), np.nan, np.float32)
    for row, length in zip(pool, lengths, strict=True):
        v[row[:length], 0] = np.eye(width)[:length]
    k = np.where(np.isnan(v[..., :1]), np.nan, 0).astype(np.float32)
    out = unified_attention(
        jnp.zeros((rows, 1, 1), jnp.float32),
        jnp.asarray(k).reshape(num_pages, page_size, 1, 1),
        jnp.asarray(v).reshape(num_pages, page_size, 1, width),
        metadata,
        implementation=implementation,
        **options,
    )
    weights = np.asarray(out)[:, 0]
    seen = [set(np.flatnonzero(row).tolist()) for row in weights]
    np.testing.assert_allclose(weights.sum(1), 1, rtol=1e-6)
    for row, keys in zip(weights, seen, strict=True):
        np.testing.assert_allclose(row[sorted(keys)], 1 / len(keys), rtol=1e-6)
    return seen


@pytest.mark.parametrize("drafter", [NgramDrafter(num_draft_tokens=4)], ids=["lookup"])
def test_p12_a_request_decodes_up_to_the_context_limit_within_its_own_pages(drafter):
    run = setup(drafter, page_size=16, context=64)
    assert run.pages.shape[1] == 5
    run.admit(1, PROMPTS[0], max_new_tokens=34)
    foreign = np.setdiff1d(np.arange(run.state.cache.k[0].shape[0]), run.pages[1])
    assert run.write()[1] == text(0, 34)
    assert int(run.state.lengths[1]) == 64
    assert all(np.isnan(layer[foreign]).all() for layer in (*run.state.cache.k, *run.state.cache.v))


def test_p20_each_row_of_a_verify_block_has_its_own_window(implementation):
    pool = slots_of((7, 9), 4)
    metadata = target_verify_metadata(
        prefix_lens=np.array([3, 5]),
        num_draft_tokens=4,
        page_size=4,
        req_to_token=pool,
        req_pool_indices=np.arange(2),
    )
    seen = seen_keys(pool, (7, 9), metadata, implementation, sliding_window=4)
    assert seen[4] == {2, 3, 4, 5}
    assert seen[7] == {5, 6, 7, 8}
    assert seen[:4] == [{0, 1, 2, 3}, {1, 2, 3, 4}, {2, 3, 4, 5}, {3, 4, 5, 6}]


def test_p20_windows_of_a_verify_block_over_fp8_keys(implementation):
    window, q_len = 8, 8
    length = window + 9
    rng = np.random.default_rng(1)
    pool = slots_of((length,), 4)
    metadata = target_verify_metadata(
        prefix_lens=np.array([length - q_len]),
        num_draft_tokens=q_len,
        page_size=4,
        req_to_token=pool,
        req_pool_indices=np.zeros(1, np.int64),
    )
    shape = (int(pool.max()) // 4 + 1, 4, 1, 16)
    empty = jnp.full(shape, jnp.nan, jnp.float8_e4m3fn)
    k, v = (jnp.asarray(rng.standard_normal((length, 1, 16)), jnp.float32) for _ in range(2))
    q = jnp.asarray(rng.standard_normal((q_len, 2, 16)), jnp.bfloat16)
    k_cache, v_cache = write_kv(empty, empty, k, v, pool[0, :length], k_descale=0.5, v_descale=2.0)
    out = unified_attention(
        q,
        k_cache,
        v_cache,
        metadata,
        sliding_window=window,
        k_descale=0.5,
        v_descale=2.0,
        implementation=implementation,
    )
    want, _ = oracle.attention(
        *(np.asarray(x, np.float64) for x in (q, k_cache, v_cache)),
        page_table=np.asarray(metadata.page_table),
        cu_seqlens_q=np.asarray(metadata.cu_seqlens_q),
        seqused_k=np.asarray(metadata.seqused_k),
        softmax_scale=0.25,
        sliding_window=window,
        k_descale=np.full(1, 0.5),
        v_descale=np.full(1, 2.0),
    )
    np.testing.assert_allclose(np.asarray(out, np.float64), want, atol=2e-2)


def test_p21_tree_bits_are_looked_up_by_the_key_and_windows_by_the_depth(implementation):
    pool = slots_of((24,), 4)
    metadata = target_verify_metadata(
        prefix_lens=np.array([20]),
        num_draft_tokens=4,
        ancestors=ancestor_bits(np.array([[-1, 0, 0, 1]])),
        page_size=4,
        req_to_token=pool,
        req_pool_indices=np.zeros(1, np.int64),
    )
    assert metadata.positions(4).tolist() == [20, 21, 21, 22]
    seen = seen_keys(pool, (24,), metadata, implementation, sliding_window=8)
    assert seen[3] == {15, 16, 17, 18, 19, 20, 21, 23}
    assert seen[2] == {14, 15, 16, 17, 18, 19, 20, 22}


def test_p22_a_ring_of_window_pages_keeps_what_the_earliest_row_sees(implementation):
    window, page_size, rows = 8, 4, 6
    ring = window_ring(window, rows, page_size)
    assert ring == 4
    table = np.arange(1, ring + 1)[np.arange(6) % ring]
    pool = (table[:, None] * page_size + np.arange(page_size)).reshape(1, -1)
    values = np.full(((ring + 1) * page_size, 1, 24), np.nan, np.float32)
    written = 0
    for first in (10, 16):
        metadata = target_verify_metadata(
            prefix_lens=np.array([first]),
            num_draft_tokens=rows,
            page_size=page_size,
            req_to_token=pool,
            req_pool_indices=np.zeros(1, np.int64),
        )
        for position in range(written, first + rows):
            values[pool[0, position], 0] = np.eye(24)[position]
        written = first + rows
        out = unified_attention(
            jnp.zeros((rows, 1, 1), jnp.float32),
            jnp.zeros((ring + 1, page_size, 1, 1), jnp.float32),
            jnp.asarray(values).reshape(ring + 1, page_size, 1, 24),
            metadata,
            sliding_window=window,
            implementation=implementation,
        )
        for row, weights in enumerate(np.asarray(out)[:, 0]):
            position = first + row
            assert np.flatnonzero(weights).tolist() == list(range(position - window + 1, position + 1))


@pytest.mark.parametrize("q", [[0.0, 0.0, 0.0, 0.0], [0.1, 0.1, 0.7, 0.1]], ids=["target only", "drawn"])
def test_p47_a_draft_of_probability_zero_is_rejected_at_coin_zero(q):
    p = jnp.asarray([[0.0, 1.0, 0.0, 0.0]] * 2, jnp.float32)
    path, accept_len, residual = rejection_walk(
        p,
        jnp.asarray([q] * 2, jnp.float32),
        jnp.asarray([3, 2], jnp.int32),
        jnp.asarray([-1, 0], jnp.int32),
        jnp.zeros(2, jnp.float32),
    )
    assert path.tolist() == [0, -1]
    assert int(accept_len) == 1
    assert residual.tolist() == [0.0, 1.0, 0.0, 0.0]
    assert draw(jax.random.split(jax.random.key(0), 50), jnp.tile(residual, (50, 1))).tolist() == [1] * 50


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("drawn", [False, True])
def test_p48_a_row_of_nan_emits_a_token_of_the_vocabulary(temperature, drawn):
    vocab = 1003
    logits = jnp.full((2, 2, vocab), jnp.nan)
    tree = DraftTree.chain(jnp.asarray([[5, 1002], [5, 1]], jnp.int32))
    sampling = SamplingParams.create(2, temperature=temperature)
    draft = jnp.full((2, 2, vocab), 1 / vocab, jnp.float32) if drawn else None
    walks = [sampled_walk(logits, tree, sampling, jnp.zeros(2, jnp.int32), draft)]
    if temperature == 0.0 and not drawn:
        walks.append(greedy_walk(logits, tree))
    for got in walks:
        emitted = np.asarray(got.tokens)[np.arange(2) < np.asarray(got.accept_len)[:, None]]
        assert (np.asarray(got.accept_len) >= 1).all()
        assert ((emitted >= 0) & (emitted < vocab)).all()
        assert not np.asarray(got.sound).any()


@pytest.mark.parametrize("drawn", [False, True])
def test_p49_padded_drafts_are_never_accepted(drawn):
    rows = 1000
    tokens = np.tile(np.asarray([0, 1, 0, 1, -1, -1], np.int32), (rows, 1))
    probs = np.zeros((rows, 6, 4), np.float32)
    probs[:, :4] = [0.45, 0.45, 0.05, 0.05]
    draft = np.zeros_like(probs)
    draft[:, :3] = [0.5, 0.5, 0, 0]
    got = sampled_walk(
        jnp.log(probs),
        DraftTree.chain(jnp.asarray(tokens)),
        SamplingParams.create(rows, temperature=1.0, seed=1),
        jnp.zeros(rows, jnp.int32),
        jnp.asarray(draft) if drawn else None,
    )
    lengths = np.asarray(got.accept_len)
    assert set(lengths.tolist()) == {1, 2, 3, 4}
    inside = np.arange(6) < lengths[:, None]
    assert (np.asarray(got.tokens)[inside] >= 0).all()
    assert (np.asarray(got.tokens)[~inside] == -1).all()


@pytest.mark.parametrize("drawn", [False, True])
def test_p50_temperature_zero_beside_a_sampled_row(drawn):
    rng = np.random.default_rng(50)
    logits = jnp.asarray(rng.standard_normal((2, 4, 8)), jnp.float32)
    best = np.asarray(jnp.argmax(logits[0], axis=-1))
    tree = DraftTree.chain(jnp.asarray([[0, best[0], best[1], 7 - best[2]], [0, 1, 2, 3]], jnp.int32))
    sampling = SamplingParams.create(2, temperature=[0.0, 0.7])
    draft = jnp.asarray(rng.dirichlet(np.ones(8), (2, 4)), jnp.float32).at[0].set(0) if drawn else None
    got = sampled_walk(logits, tree, sampling, jnp.zeros(2, jnp.int32), draft)
    greedy = greedy_walk(logits, tree)
    assert got.tokens[0].tolist() == greedy.tokens[0].tolist() == [*best[:3].tolist(), -1]
    assert int(got.accept_len[0]) == 3
    assert 1 <= int(got.accept_len[1]) <= 4
    assert np.asarray(got.sound).all()


@pytest.mark.parametrize("q", [[1.0, 0.0, 0.0], [0.2, 0.5, 0.3]], ids=["one-hot", "drawn"])
def test_p51_the_first_token_has_the_distribution_of_the_target(q):
    trials = 200_000
    p = np.asarray([0.5, 0.3, 0.2], np.float32)
    drafts = draw(
        jax.random.split(jax.random.key(51), trials), jnp.tile(jnp.asarray(q, jnp.float32), (trials, 1))
    )
    tree = DraftTree.chain(jnp.stack([jnp.zeros_like(drafts), drafts], axis=1))
    logits = jnp.log(jnp.tile(jnp.asarray(p), (trials, 2, 1)))
    probs = jnp.tile(jnp.asarray(q, jnp.float32), (trials, 2, 1))
    before = np.asarray(logits).copy(), np.asarray(probs).copy()
    got = sampled_walk(
        logits, tree, SamplingParams.create(trials, temperature=1.0), jnp.zeros(trials, jnp.int32), probs
    )
    share = np.bincount(np.asarray(got.tokens[:, 0]), minlength=3) / trials
    assert (np.abs(share - p) < 4 * np.sqrt(p * (1 - p) / trials)).all()
    np.testing.assert_array_equal(before[0], logits)
    np.testing.assert_array_equal(before[1], probs)


def test_p52_the_second_request_of_a_batch_is_walked_by_its_own_rows():
    # Two steps of two branches and their best children: 6 nodes; paths are at most 3 long.
    parents = np.asarray([[-1, 0, 0, 1, 1, 2], [-1, 0, 0, 2, 2, 1]], np.int32)
    tokens = np.asarray([[9, 1, 2, 3, 4, 5], [9, 1, 2, 3, 4, 5]], np.int32)
    best = np.asarray([[7, 0, 0, 0, 0, 0], [2, 0, 4, 0, 6, 0]])
    logits = jnp.eye(10, dtype=jnp.float32)[best]
    tree = DraftTree(tokens=jnp.asarray(tokens), parents=jnp.asarray(parents))
    both = greedy_walk(logits, tree)
    assert both.tokens.tolist() == [[7, -1, -1, -1, -1, -1], [2, 4, 6, -1, -1, -1]]
    assert both.path.tolist() == [[0, -1, -1, -1, -1, -1], [0, 2, 4, -1, -1, -1]]
    for row in range(2):
        one = greedy_walk(*jax.tree.map(lambda x, row=row: x[row : row + 1], (logits, tree)))
        assert one.tokens[0].tolist() == both.tokens[row].tolist()
        assert one.path[0].tolist() == both.path[row].tolist()


def test_p53_positions_follow_the_chosen_parent():
    candidates = Candidates(
        tokens=jnp.asarray([[1, 2, 3, 4, 5]], jnp.int32),
        parents=jnp.asarray([[-1, -1, 0, 0, 2]], jnp.int32),
        scores=-jnp.arange(1.0, 6.0)[None],
    )
    tree = select_tree(jnp.asarray([0], jnp.int32), candidates, 6)
    assert tree.parents.tolist() == [[-1, 0, 0, 1, 1, 3]]
    assert tree_positions(tree.parents, np.array([40])).tolist() == [[40, 41, 41, 42, 42, 43]]
    pool = slots_of((46,), 16)
    metadata = target_verify_metadata(
        prefix_lens=np.array([40]),
        num_draft_tokens=6,
        ancestors=ancestor_bits(tree.parents),
        page_size=16,
        req_to_token=pool,
        req_pool_indices=np.zeros(1, np.int64),
    )
    assert metadata.positions(6).tolist() == [40, 41, 41, 42, 42, 43]


def test_p54_siblings_of_a_lower_index_stay_invisible(implementation):
    prefix, branches, depth = 64, 3, 8
    parents = np.asarray([[-1 if node % depth == 0 else node - 1 for node in range(branches * depth)]])
    pool = slots_of((prefix + 24,), 16)
    metadata = target_verify_metadata(
        prefix_lens=np.array([prefix]),
        num_draft_tokens=24,
        ancestors=ancestor_bits(parents),
        page_size=16,
        req_to_token=pool,
        req_pool_indices=np.zeros(1, np.int64),
    )
    seen = seen_keys(pool, (prefix + 24,), metadata, implementation)
    for node, keys in enumerate(seen):
        branch = node // depth * depth
        assert keys == set(range(prefix)) | set(range(prefix + branch, prefix + node + 1))


def test_p55_draft_extend_gives_each_request_its_own_result():
    reference = (("implementation", "reference"),)
    drafter = ModelDrafter(model=ProgramDraft(program(), reference), num_draft_tokens=8, topk=4, num_steps=2)
    texts, passes = [], []
    for rows in ((0, 1), (0,), (1,)):
        run = setup(drafter, rows=2, page_size=4, draft_noise=0.08)
        for row in rows:
            run.admit(row, PROMPTS[row], max_new_tokens=20)
        metadata = run.state.metadata("draft_extend", run.state.lengths, 8, jnp.asarray([True, True]))
        assert metadata.cu_seqlens_q.tolist() == [0, 8, 16]
        texts.append(run.write())
        passes.append(run.state.passes.tolist())
    assert texts[0] == [text(0, 20), text(1, 20)]
    assert [texts[1][0], texts[2][1]] == texts[0]
    assert [passes[1][0], passes[2][1]] == passes[0]
    built = draft_extend_metadata(
        seqused_k=np.array([12, 20]),
        num_draft_tokens=8,
        page_size=4,
        req_to_token=slots_of((12, 20), 4),
        req_pool_indices=np.arange(2),
    )
    assert built.cu_seqlens_q.tolist() == [0, 8, 16]


def test_p56_drafts_beyond_the_table_have_no_slot():
    run = setup(NgramDrafter(num_draft_tokens=4), page_size=16, context=60)
    state = run.state
    assert state.page_table.shape == (3, 4)
    run.admit(0, PROMPTS[0], max_new_tokens=20)
    metadata = run.state.metadata(
        "target_verify", jnp.asarray([63, 0, 0]), 3, jnp.asarray([True, False, False])
    )
    slots = metadata.slots(9)[:3].tolist()
    assert slots == [int(run.pages[0, 3]) * 16 + 15, -1, -1]
    cache = PagedKVCache.allocate(
        num_layers=1, num_pages=14, page_size=16, num_kv_heads=1, head_dim=1, dtype=jnp.float32
    )
    ones = jnp.ones((3, 1, 1))
    written = cache.write(0, ones, ones, metadata.slots(9)[:3])
    assert float(jnp.abs(written.k[0][0]).max()) == 0
    assert float(written.k[0].sum()) == 1
