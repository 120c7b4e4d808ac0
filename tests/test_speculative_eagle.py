"""The EAGLE-style head: drafting through its cache against naive recomputation, its file, and its training."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
from test_speculative_drafting import log_softmax
from toy_decoder import VOCAB, WIDTH, program, setup, weights

from bench.draft_head import questions, training
from bench.draft_head.texts import Conversations
from bench.requests import Engine, Request
from bench.speculative import PROMPTS as PROMPTS_OF_BENCH
from jaxattn import CheckpointError, extend_metadata
from jaxattn.models import decoder
from jaxattn.speculative import ModelDrafter, Weights, drafting_for, eagle
from jaxattn.speculative import decoder as loop

REFERENCE = (("implementation", "reference"),)
PROMPTS = [np.random.default_rng(8).integers(0, VOCAB, size).tolist() for size in (11, 7)]
DRAFT = eagle.EagleDraft(program().config, REFERENCE)
LENGTH = 32


def random_head(seed=0, config=None, target=None):
    config, target = config or program().config, target or weights()
    head = eagle.init_head(config, target, jax.random.key(seed))
    return dataclasses.replace(
        head, fc=head.fc + 0.2 * jax.random.normal(jax.random.key(seed + 1), head.fc.shape)
    )


def run_of(drafter, **options):
    run = setup(drafter, rows=2, page_size=4, features=eagle.features(program().config), **options)
    shared = eagle.EagleWeights.share(random_head(), weights())
    run.weights = Weights(weights(), shared)
    pages = run.state.cache.k[0].shape[0]
    cache = eagle.allocate_cache(program().config, num_pages=pages, page_size=4, dtype=jnp.float32)
    cache = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), cache)
    run.state = dataclasses.replace(run.state, draft=drafter.empty_state(cache, 2))
    return run


def one_sequence(length):
    return extend_metadata(
        seqused_k=length[None],
        cu_seqlens_q=jnp.stack([0 * length, length]),
        max_seqlen_q=LENGTH,
        page_size=LENGTH,
        req_to_token=jnp.arange(LENGTH, dtype=jnp.int32)[None],
        req_pool_indices=jnp.zeros(1, jnp.int32),
    )


@jax.jit
def target_hidden(tokens, length):
    cache = decoder.allocate_cache(program().config, num_pages=1, page_size=LENGTH, dtype=jnp.float32)
    config, features = program().config, eagle.features(program().config)
    hidden, _ = decoder.forward(
        config, weights(), tokens, cache, one_sequence(length), features=features, implementation="reference"
    )
    return eagle.fuse(config, random_head(), hidden)


@jax.jit
def head_hidden(tokens, hidden, length):
    shared = eagle.EagleWeights.share(random_head(), weights())
    cache = eagle.allocate_cache(program().config, num_pages=1, page_size=LENGTH, dtype=jnp.float32)
    return eagle.forward(
        program().config, shared, tokens, hidden, cache, one_sequence(length), implementation="reference"
    )[0]


def padded(rows, width=None):
    out = np.zeros((LENGTH, *(() if width is None else (width,))), np.int32 if width is None else np.float32)
    out[: len(rows)] = rows
    return out


def naive_hidden(text, drafts):
    """The head's hidden state after `drafts`, all of it recomputed: the target's states, then its own."""
    states = list(np.asarray(target_hidden(padded(text), np.int32(len(text))))[: len(text) - 1])
    tokens = [*text[1:], *drafts]
    for known in range(len(text) - 1, len(tokens) + 1):
        out = np.asarray(head_hidden(padded(tokens[:known]), padded(states, WIDTH), np.int32(known)))
        states.append(out[known - 1])
    return states[-1]


def naive_log_probs(text, drafts):
    return log_softmax(np.asarray(weights().embedding) @ naive_hidden(text, drafts))


def drafted(run, drafter):
    """Text and draft tree of each row after two cycles, so that drafts follow a draft extend."""
    state = run.decoder.run(run.weights, run.decoder.prefill(run.weights, run.state), 2)
    texts = [state.history[row, : int(state.lengths[row])].tolist() for row in range(2)]
    with jax.enable_x64(True):
        tree, _, _ = jax.jit(lambda w, s: drafter.draft(w, s, loop.runnable(run.decoder, s)))(
            run.weights.draft, state
        )
    return texts, jax.tree.map(np.asarray, tree)


def test_each_draft_of_a_chain_sees_the_drafts_before_it():
    drafter = ModelDrafter(model=DRAFT, num_draft_tokens=5)
    run = run_of(drafter)
    for row, prompt in enumerate(PROMPTS):
        run.admit(row, prompt, max_new_tokens=20)
    texts, tree = drafted(run, drafter)
    for row, text in enumerate(texts):
        drafts = []
        for _ in range(4):
            drafts.append(int(naive_log_probs(text, drafts).argmax()))
        assert tree.tokens[row].tolist() == [text[-1], *drafts]
        assert tree.parents[row].tolist() == [-1, 0, 1, 2, 3]


def test_a_tree_holds_the_best_nodes_of_a_naive_search():
    topk, steps, n = 2, 3, 7
    drafter = ModelDrafter(model=DRAFT, num_draft_tokens=n, topk=topk, num_steps=steps)
    run = run_of(drafter)
    for row, prompt in enumerate(PROMPTS):
        run.admit(row, prompt, max_new_tokens=20)
    texts, tree = drafted(run, drafter)
    for row, text in enumerate(texts):
        nodes, beam = [], [(0.0, ())]
        for _ in range(steps):
            level = []
            for score, path in beam:
                log_probs = naive_log_probs(text, path)
                best = np.argsort(-log_probs)[:topk]
                level += [(score + log_probs[token], (*path, int(token))) for token in best]
            nodes += level
            beam = sorted(level, reverse=True)[:topk]
        chosen = sorted(range(len(nodes)), key=lambda i: -nodes[i][0])[: n - 1]
        paths = {0: ()}
        for node in range(1, n):
            paths[node] = (*paths[int(tree.parents[row, node])], int(tree.tokens[row, node]))
        assert sorted(paths.values()) == sorted([(), *(nodes[i][1] for i in chosen)])


@pytest.mark.parametrize("name", ["llama_tiny", "gemma3_tiny"])
def test_the_head_leaves_the_text_of_real_architectures_as_it_is(name, tmp_path):
    model = tiny_models.load(name)
    config = model.program.config
    eagle.save_head(tmp_path / "head.safetensors", random_head(3, config, model.weights), {})
    drafting = drafting_for(
        "eagle", model, num_draft_tokens=6, topk=2, attention=REFERENCE, head=tmp_path / "head.safetensors"
    )
    golden = tiny_models.golden(name)
    prompts = golden["input_ids"]
    shape = {"rows": len(prompts), "max_context_len": prompts.shape[1] + 16}
    answers = Engine(model, drafting, options=REFERENCE, **shape).answer(
        [Request(p, 16) for p in prompts.tolist()]
    )
    assert [a.tokens for a in answers] == golden["greedy_ids"].tolist()


def test_a_head_comes_back_from_its_file(tmp_path):
    config = program().config
    head = random_head()
    eagle.save_head(tmp_path / "head.safetensors", head, {"note": "a test"})
    again = eagle.load_head(tmp_path / "head.safetensors", config)
    assert jax.tree.structure(again) == jax.tree.structure(head)
    for old, new in zip(jax.tree.leaves(head), jax.tree.leaves(again), strict=True):
        np.testing.assert_array_equal(np.asarray(old, np.float16), new)
        assert new.dtype == jnp.float32


def test_a_head_of_other_sizes_is_refused_by_name(tmp_path):
    config = program().config
    eagle.save_head(tmp_path / "head.safetensors", random_head(), {})
    wider = dataclasses.replace(config, intermediate_size=64)
    with pytest.raises(CheckpointError, match=r"layer\.gate: expected shape \[64, 32\]"):
        eagle.load_head(tmp_path / "head.safetensors", wider)
    (tmp_path / "cut.safetensors").write_bytes((tmp_path / "head.safetensors").read_bytes()[:1000])
    with pytest.raises(CheckpointError, match=r"cut\.safetensors: cannot be read as a draft head"):
        eagle.load_head(tmp_path / "cut.safetensors", config)
    with pytest.raises(CheckpointError, match="no draft head for llama-1x32-24"):
        eagle.find_head(config)


def test_a_target_without_features_is_refused():
    run = run_of(ModelDrafter(model=DRAFT, num_draft_tokens=3))
    run.decoder = dataclasses.replace(
        run.decoder, target=dataclasses.replace(run.decoder.target, features=())
    )
    run.admit(0, PROMPTS[0], max_new_tokens=4)
    with pytest.raises(
        ValueError, match=r"expected width 64, the target's 32 with the inputs of layers \(0,\)"
    ):
        run.write()


def test_the_slope_of_the_training_loss_is_its_derivative(monkeypatch):
    monkeypatch.setattr(training, "LOGITS_ROWS", 4)
    rng = np.random.default_rng(0)
    outputs = jnp.asarray(rng.standard_normal((10, 3, WIDTH)), jnp.float32)
    target = jnp.asarray(rng.standard_normal((10, WIDTH)), jnp.float32)
    counts = jnp.asarray(rng.random((10, 3)) < 0.6)

    def logits(hidden):
        return program().logits(weights(), hidden.reshape(-1, WIDTH)).reshape(*hidden.shape[:-1], VOCAB)

    def plain(outputs):
        wanted = jax.nn.softmax(logits(target))[:, None]
        cross = -jnp.sum(wanted * jax.nn.log_softmax(logits(outputs)), axis=-1)
        return jnp.mean(jnp.sum(cross * counts, axis=0) / jnp.sum(counts, axis=0))

    def sliced(outputs):
        return training._compare(program(), weights(), outputs, target, counts)[0]

    value, slope = jax.value_and_grad(sliced)(outputs)
    expected, expected_slope = jax.value_and_grad(plain)(outputs)
    np.testing.assert_allclose(value, expected, rtol=1e-6)
    np.testing.assert_allclose(slope, expected_slope, rtol=1e-4, atol=1e-7)


def test_no_question_of_the_training_is_one_that_is_measured_with():
    rng = np.random.default_rng(0)
    asked = {questions.ask(rng) for _ in range(20000)}
    assert len(asked) > 10000
    assert not asked & set(PROMPTS_OF_BENCH)


def test_features_that_are_no_layers_of_the_model_are_refused():
    run = run_of(ModelDrafter(model=DRAFT, num_draft_tokens=3))
    target = dataclasses.replace(run.decoder.target, features=(7,))
    run.decoder = dataclasses.replace(run.decoder, target=target)
    run.admit(0, PROMPTS[0], max_new_tokens=4)
    with pytest.raises(ValueError, match=r"features: expected layers in \[0, 1\), .* got \(7,\)"):
        run.write()


def test_conversations_to_measure_with_share_no_question_with_the_others():
    tokens = np.array([[1, 2, 3], [4, 5, 6], [1, 2, 9], [7, 8, 9], [4, 5, 1]])
    texts = Conversations(tokens, np.full(5, 3), np.full(5, 2))
    trained, held_out = training._parted(texts, 1)
    assert trained.tolist() == [0, 2, 3]
    assert held_out.tolist() == [4]
    model = tiny_models.load("llama_tiny")
    for held_out in (1, 6):
        plan = training.Plan(steps=1, batch=2, held_out=held_out)
        with pytest.raises(ValueError, match=f"held_out: expected a multiple of batch=2 .* got {held_out}"):
            training.train_head(model, texts, plan)
