"""The two models that are known by name, against what transformers computes from the same files."""

import dataclasses
import functools
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models

from jaxattn import cli, console
from jaxattn.errors import CheckpointError
from jaxattn.generate import GenerationOptions, generate, mean_accepted_length
from jaxattn.metadata import extend_metadata
from jaxattn.models.fetch import NAMED_MODELS, fetch
from jaxattn.models.load import load_model

REPEATING = "red green blue yellow red green blue yellow red green blue yellow red green blue"


@functools.cache
def load(name):
    """The model without its stop tokens, which the goldens do not honour."""
    try:
        path = fetch(NAMED_MODELS[name])
    except CheckpointError as error:
        pytest.skip(f"{name} cannot be fetched: {error}")
    model = load_model(path, dtype=np.float32)
    return dataclasses.replace(model, codec=dataclasses.replace(model.codec, stop_ids=frozenset()))


def golden(name):
    return json.loads((tiny_models.DATA / f"{name}_golden.json").read_text())["cases"]


def last_logits(model, ids):
    """Logits of the token after `ids`, in one pass."""
    config = model.program.config
    pages = -(-len(ids) // 16)
    metadata = extend_metadata(
        seqused_k=np.array([len(ids)]),
        cu_seqlens_q=np.array([0, len(ids)]),
        max_seqlen_q=len(ids),
        page_size=16,
        req_to_token=16 + np.arange(16 * pages)[None],
        req_pool_indices=np.array([0]),
    )
    cache = model.program.allocate_cache(
        config, num_seqs=1, num_pages=1 + pages, page_size=16, dtype=jnp.float32
    )

    @jax.jit
    def run(weights, cache, metadata):
        hidden, _ = model.program.forward(config, weights, jnp.asarray(ids, jnp.int32), cache, metadata)
        return model.program.logits(weights, hidden[-1:])[0]

    return np.asarray(run(model.weights, cache, metadata))


def generated(name, golden_name, speculative):
    """New tokens and pieces of the goldens' prompts and of the repeating one, as one ragged batch."""
    model = load(name)
    prompts = [case["prompt_ids"] for case in golden(golden_name)] + [model.codec.encode(REPEATING)]
    options = GenerationOptions(max_new_tokens=32, chunk_size=256, speculative=speculative)
    pieces = list(generate(model, prompts, options))
    tokens = [[t for p in pieces if p.sequence == i for t in p.tokens] for i in range(len(prompts))]
    return tokens, pieces


both = pytest.mark.parametrize(
    ("name", "golden_name"), [("smollm2-135m", "smollm2"), ("gemma3-270m", "gemma3")]
)


@both
def test_prompts_become_the_ids_that_transformers_makes_of_them(name, golden_name):
    codec = load(name).codec
    for case in golden(golden_name):
        assert codec.encode(case["prompt"]) == case["prompt_ids"]
        assert codec.tokenizer.decode(case["greedy_ids"], skip_special_tokens=False) == case["greedy_text"]
        stream = codec.stream(case["prompt_ids"])
        text = "".join(stream.push(token) for token in case["greedy_ids"]) + stream.finish()
        assert text == codec.decode(case["greedy_ids"])


@both
def test_the_first_logits_are_those_of_transformers(name, golden_name):
    case = golden(golden_name)[0]
    logits = last_logits(load(name), case["prompt_ids"])
    ids, values = zip(*case["top5"], strict=True)
    np.testing.assert_allclose(logits[list(ids)], values, atol=1e-3, rtol=0)
    assert np.argsort(-logits)[:5].tolist() == list(ids)


@both
def test_greedy_text_is_that_of_transformers_and_drafts_change_only_the_passes(name, golden_name):
    tokens, pieces = generated(name, golden_name, "off")
    assert tokens[:-1] == [case["greedy_ids"] for case in golden(golden_name)]
    assert mean_accepted_length(pieces) == 1
    drafted, pieces = generated(name, golden_name, "ngram")
    assert drafted == tokens
    repeating = len(tokens) - 1
    assert mean_accepted_length([piece for piece in pieces if piece.sequence == repeating]) > 1.5
    if name == "smollm2-135m":  # the model that the package brings a head for
        drafted, pieces = generated(name, golden_name, "eagle")
        assert drafted == tokens
        assert mean_accepted_length([piece for piece in pieces if piece.sequence != repeating]) > 1.2


def test_gemma_3_reads_past_its_window():
    case = golden("gemma3")[-1]
    assert len(case["prompt_ids"]) > 512 == load("gemma3-270m").program.config.layers[0].sliding_window


@pytest.mark.parametrize("speculative", ["off", "eagle"])
def test_the_default_model_knows_the_capital_of_france(speculative, capsys, monkeypatch):
    load("smollm2-135m")
    monkeypatch.setattr(console, "_keep_compiled_programs", lambda: None)
    assert cli.main(["generate", "--speculative", speculative, "What is the capital of France?"]) == 0
    captured = capsys.readouterr()
    assert captured.out == "The capital of France is Paris.\n"
    assert captured.err.startswith("7 tokens, ")
