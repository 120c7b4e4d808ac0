"""Generation on small models: what the batch, the pages, the chunks and the drafts must not change."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from jaxattn.errors import JaxattnError, PoolExhaustedError
from jaxattn.generate import (
    GenerationOptions,
    Piece,
    generate,
    int8_descales,
    mean_accepted_length,
    plan_batch,
)
from jaxattn.models.tokenizer import TextCodec
from jaxattn.speculative import decoder as loop

# Prompts of any length share one compiled prefill, and all batches of a size one pool.
CHUNK, NUM_PAGES = 16, 160
SMALL = "llama3_tiny"
PROMPTS = [range(3, 43), [7], [9, 8, 7, 9, 8, 7, 9, 8], range(20, 43)]


def options(**changes):
    return GenerationOptions(**{"max_new_tokens": 16, "chunk_size": CHUNK, "num_pages": NUM_PAGES, **changes})


def run(model, prompts, **changes):
    """New tokens of each prompt, and all pieces."""
    pieces = list(generate(model, prompts, options(**changes)))
    tokens = [[] for _ in prompts]
    for piece in pieces:
        tokens[piece.sequence] += piece.tokens
    return tokens, pieces


def stopping_at(model, *stop_ids):
    return dataclasses.replace(model, codec=TextCodec(None, frozenset(stop_ids), {}))


def forgetful(model):
    """`model` with layers that add nothing: a token depends on the one before it alone, so the text is a circle."""
    layers = tuple(
        dataclasses.replace(layer, o=jnp.zeros_like(layer.o), down=jnp.zeros_like(layer.down))
        for layer in model.weights.layers
    )
    return dataclasses.replace(model, weights=dataclasses.replace(model.weights, layers=layers))


@pytest.mark.parametrize(
    ("name", "speculative"),
    [
        (SMALL, "off"),
        (SMALL, "ngram"),
        ("gemma3_tiny", "off"),
        ("gemma3_tiny", "ngram"),
    ],
)
def test_greedy_tokens_are_those_of_transformers(name, speculative):
    tokens, pieces = run(tiny_models.load(name), [tiny_models.prompt(name)], speculative=speculative)
    assert tokens == tiny_models.golden(name)["greedy_ids"].tolist()
    assert pieces[-1].finish == "length"
    if speculative == "off":
        assert [piece.accepted for piece in pieces] == [1] * 16


@pytest.mark.parametrize("speculative", ["off", "ngram"])
def test_a_ragged_batch_equals_each_prompt_alone(speculative):
    model = tiny_models.load(SMALL)
    together, _ = run(model, PROMPTS, speculative=speculative)
    alone = [run(model, [prompt])[0][0] for prompt in PROMPTS]
    assert together == alone


@pytest.mark.parametrize(
    "changes", [{"chunk_size": 5}, {"chunk_size": 512}, {"page_size": 1}, {"page_size": 3}]
)
def test_chunks_and_pages_change_no_token(changes):
    tokens, _ = run(tiny_models.load(SMALL), PROMPTS, **changes)
    assert tokens == run(tiny_models.load(SMALL), PROMPTS)[0]


def test_drafts_are_accepted_where_the_text_repeats():
    model = forgetful(tiny_models.load(SMALL))
    plain, _ = run(model, [[5]], max_new_tokens=64)
    drafted, pieces = run(model, [[5]], max_new_tokens=64, speculative="ngram")
    assert drafted == plain
    passes = pieces[1:]
    assert mean_accepted_length(pieces) == sum(piece.accepted for piece in passes) / len(passes) > 1.5
    assert max(piece.accepted for piece in passes) == 4
    assert sum(len(piece.tokens) for piece in pieces) == 64


def test_a_sequence_ends_at_a_stop_token_and_the_others_go_on():
    model = tiny_models.load(SMALL)
    free, _ = run(model, PROMPTS)
    stop = free[2][5]
    for speculative in ("off", "ngram"):
        tokens, pieces = run(stopping_at(model, stop), PROMPTS, speculative=speculative)
        assert tokens == [text[: text.index(stop)] if stop in text else text for text in free]
        for i, text in enumerate(free):
            finishes = [piece.finish for piece in pieces if piece.sequence == i]
            assert finishes == [None] * (len(finishes) - 1) + ["stop" if stop in text else "length"]
    assert {"stop", "length"} == {piece.finish for piece in pieces} - {None}


def test_a_stop_token_right_after_the_prompt_gives_no_text():
    model, prompt = tiny_models.load(SMALL), tiny_models.prompt(SMALL)
    first = int(tiny_models.golden(SMALL)["greedy_ids"][0, 0])
    assert list(generate(stopping_at(model, first), [prompt], options())) == [Piece(0, (), 1, "stop")]


def test_a_limit_inside_an_accepted_run_cuts_it():
    model = forgetful(tiny_models.load(SMALL))
    plain, _ = run(model, [[5]], max_new_tokens=64)
    for limit in (1, 50, 51, 52, 53):
        drafted, pieces = run(model, [[5]], max_new_tokens=limit, speculative="ngram")
        assert drafted[0] == plain[0][:limit]
        assert pieces[-1].finish == "length"


def test_the_end_of_the_context_ends_a_sequence():
    model = tiny_models.load(SMALL)
    prompt = (tiny_models.prompt(SMALL) * 7)[:251]
    assert model.program.config.context_length == 256
    tokens, pieces = run(model, [prompt])
    assert len(tokens[0]) == 5
    assert [piece.finish for piece in pieces] == [None] * 4 + ["context"]


def test_drawn_text_depends_on_the_seed_and_not_on_drafts():
    model = tiny_models.load(SMALL)
    drawn = {"temperature": 0.7, "top_p": 0.9, "seed": 3}
    plain, _ = run(model, PROMPTS, **drawn)
    assert run(model, PROMPTS, **drawn, speculative="ngram")[0] == plain
    assert run(model, PROMPTS, **drawn | {"seed": 4})[0] != plain
    greedy = run(model, PROMPTS)[0]
    assert greedy != plain
    assert greedy == run(model, PROMPTS, temperature=5.0, top_p=1e-6)[0]


def test_drawn_tokens_have_the_models_distribution():
    """The first tokens of many seeds against softmax(logits / T), by a chi-square over the likely ones."""
    model, prompt = tiny_models.load(SMALL), tiny_models.prompt(SMALL)[:8]
    logits = tiny_models.golden(SMALL)["logits"][0, 7].astype(np.float64)
    expected = np.exp(logits - logits.max())
    expected /= expected.sum()
    draws = [
        tokens[0]
        for seed in range(8)
        for tokens in run(model, [prompt] * 64, temperature=1.0, seed=seed, max_new_tokens=1, chunk_size=512)[
            0
        ]
    ]
    likely = np.argsort(-expected)[:6]
    observed = np.array([draws.count(token) for token in likely])
    observed = np.append(observed, len(draws) - observed.sum())
    wanted = len(draws) * np.append(expected[likely], 1 - expected[likely].sum())
    # The 99.99% point of chi-square with 6 degrees of freedom.
    assert ((observed - wanted) ** 2 / wanted).sum() < 27.9


@pytest.mark.parametrize(("kv_dtype", "shared"), [("bfloat16", 4), ("float8_e4m3fn", 1), ("int8", 1)])
def test_text_from_a_narrower_cache_starts_the_same(kv_dtype, shared):
    tokens, _ = run(
        tiny_models.load(SMALL), [tiny_models.prompt(SMALL)], kv_dtype=kv_dtype, max_new_tokens=shared
    )
    assert tokens[0] == tiny_models.golden(SMALL)["greedy_ids"][0, :shared].tolist()


def test_int8_descales_hold_the_largest_value_with_room():
    pages = np.zeros((3, 2, 2, 4), np.float32)
    pages[1, 0, 0, 3], pages[2, 1, 0, 0], pages[0, 0, 1, 1] = 5.0, -6.35, 2.54
    (descale,) = int8_descales([jnp.asarray(pages)])
    np.testing.assert_allclose(descale, np.array([6.35, 2.54]) * 1.25 / 127, rtol=1e-6)


def test_one_compilation_serves_batches_that_differ_only_in_values():
    model = tiny_models.load(SMALL)
    run(model, PROMPTS)
    before = loop._prefill._cache_size(), loop._run._cache_size()
    run(model, [prompt[::-1] for prompt in PROMPTS][::-1], max_new_tokens=9)
    run(model, [[1], [2, 3], [4], [5] * 70], max_new_tokens=12)
    assert (loop._prefill._cache_size(), loop._run._cache_size()) == before


def test_each_program_is_compiled_once(caplog):
    """Also that which a thread compiles beside the other."""
    jax.config.update("jax_log_compiles", True)
    try:
        for _ in range(2):
            run(tiny_models.load(SMALL), [[1, 2], [3]], page_size=5, max_new_tokens=5)
    finally:
        jax.config.update("jax_log_compiles", False)
    messages = [record.getMessage() for record in caplog.records]
    for name in ("_prefill", "_run"):
        assert sum(f"XLA compilation of jit({name})" in message for message in messages) == 1


def test_results_do_not_depend_on_x64():
    model, prompt = tiny_models.load(SMALL), tiny_models.prompt(SMALL)
    with jax.enable_x64(True):
        tokens, _ = run(model, [prompt], speculative="ngram")
    assert tokens == tiny_models.golden(SMALL)["greedy_ids"].tolist()


def test_a_pool_that_is_too_small_says_what_it_has():
    model = tiny_models.load(SMALL)
    with pytest.raises(PoolExhaustedError, match="asked for 4 pages, but only 2 of 2 are free"):
        generate(model, [tiny_models.prompt(SMALL)], options(num_pages=3))


def test_each_sequence_has_pages_of_its_own_for_all_its_tokens():
    batch = plan_batch(tiny_models.load(SMALL), PROMPTS, options(page_size=3), lookahead=4)
    pages = np.concatenate(batch.pages)
    assert len(set(pages)) == len(pages)
    assert [len(own) for own in batch.pages] == [-(-(len(prompt) + 16 + 3) // 3) for prompt in PROMPTS]
    assert pages.min() >= 1
    assert pages.max() < batch.num_pages


@pytest.mark.parametrize(
    ("prompts", "message"),
    [
        ([], "prompts: expected at least one"),
        ([[1], []], "prompt 2: expected at least one token"),
        ([[1, 64]], r"prompt 1: expected token ids in \[0, 64\)"),
        ([[1, -1]], r"prompt 1: expected token ids in \[0, 64\)"),
        ([[1] * 256], "prompt 1: expected fewer tokens than the model's context of 256, got 256; shorten it"),
    ],
)
def test_prompts_that_cannot_be_read_are_refused(prompts, message):
    with pytest.raises(ValueError, match=message):
        generate(tiny_models.load(SMALL), prompts, options())


@pytest.mark.parametrize(
    "changes",
    [
        {"max_new_tokens": 0},
        {"page_size": 0},
        {"chunk_size": 0},
        {"num_draft_tokens": 1},
        {"temperature": -0.1},
        {"temperature": float("nan")},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"seed": -1},
        {"num_pages": 1},
        {"speculative": "eagles"},
        {"topk": 0},
        {"read_every": 0},
        {"kv_dtype": "int4"},
    ],
)
def test_an_option_out_of_range_is_named(changes):
    (name,) = changes
    with pytest.raises(ValueError, match=f"^{name}: expected"):
        options(**changes)


def test_logits_that_are_not_finite_are_an_error():
    model, prompt = tiny_models.load(SMALL), tiny_models.prompt(SMALL)
    weights = dataclasses.replace(model.weights, final_norm=model.weights.final_norm * jnp.nan)
    with pytest.raises(JaxattnError, match="logits of prompt 1 are not finite"):
        run(dataclasses.replace(model, weights=weights), [prompt])
