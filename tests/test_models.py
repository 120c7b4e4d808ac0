"""Decoders against what transformers computes from the same files, by every way of reading them."""

import dataclasses
from types import MappingProxyType
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tiny_models
import toy_decoder

from jaxattn.errors import CheckpointError
from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import extend_metadata, target_verify_metadata
from jaxattn.models import decoder, gemma3, layers, llama
from jaxattn.models.config import Rope
from jaxattn.models.layers import linear, rms_norm, rotate, rotation
from jaxattn.models.load import load_model

PAGE_SIZE = 4


def prefill_logits(model, ids, options=MappingProxyType({}), **metadata_options):
    """Logits of all rows, over shuffled pages whose other slots hold NaN; `options` are of attention."""
    config = model.program.config
    num_pages = 16
    window = metadata_options.pop("window", {})
    pages = np.random.default_rng(0).permutation(np.arange(1, num_pages))
    slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(1, -1)
    cache = PagedKVCache.allocate(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=PAGE_SIZE,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=jnp.float32,
        **window,
    )
    cache = jax.tree.map(lambda pages: jnp.full_like(pages, jnp.nan), cache)
    rows = jnp.asarray([*ids, 0, 0], jnp.int32)
    metadata = extend_metadata(
        seqused_k=np.array([len(ids)]),
        cu_seqlens_q=np.array([0, len(ids)]),
        max_seqlen_q=len(rows),
        page_size=PAGE_SIZE,
        req_to_token=slots,
        req_pool_indices=np.array([0]),
        **metadata_options,
    )

    @jax.jit
    def run(weights, cache, metadata):
        hidden, cache = decoder.forward(config, weights, rows, cache, metadata, **options)
        return decoder.logits(weights, hidden), cache

    logits, cache = run(model.weights, cache, metadata)
    return np.asarray(logits)[: len(ids)], cache


@pytest.mark.parametrize("name", tiny_models.NAMES)
def test_logits_equal_those_of_transformers(name):
    golden = tiny_models.golden(name)
    logits, _ = prefill_logits(tiny_models.load(name), tiny_models.prompt(name))
    np.testing.assert_allclose(logits, golden["logits"][0], atol=1e-3, rtol=0)


@pytest.mark.parametrize(("name", "kinds"), [("llama_tiny", 1), ("gemma3_tiny", 2)])
def test_kernels_share_a_plan_for_each_kind_of_layer(name, kinds, monkeypatch):
    pytest.importorskip("triton")
    from jaxattn.kernels.triton import attention

    planned = mock.Mock(wraps=layers.make_plan)
    monkeypatch.setattr(layers, "make_plan", planned)
    alone = mock.Mock(side_effect=AssertionError("a layer made a schedule of its own"))
    monkeypatch.setattr(attention, "_BACKEND", dataclasses.replace(attention._BACKEND, build_schedule=alone))
    ids = tiny_models.prompt(name)
    expected, _ = prefill_logits(tiny_models.load(name), ids)
    assert not planned.called
    logits, _ = prefill_logits(tiny_models.load(name), ids, {"implementation": "triton"})
    assert planned.call_count == 1
    assert len(planned.call_args.kwargs["sliding_windows"]) == kinds
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def test_cached_keys_and_values_equal_those_of_transformers():
    with np.load(tiny_models.DATA / "llama_tiny" / "golden.npz") as golden:
        k, v, ids = golden["kv_key_1"][0], golden["kv_value_1"][0], golden["input_ids"][0]
    _, cache = prefill_logits(tiny_models.load("llama_tiny"), ids.tolist())
    pages = np.random.default_rng(0).permutation(np.arange(1, 16))
    slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(-1)[: len(ids)]
    found_k, found_v = cache.gather(1, jnp.asarray(slots))
    np.testing.assert_allclose(found_k, k.swapaxes(0, 1), atol=1e-4, rtol=0)
    np.testing.assert_allclose(found_v, v.swapaxes(0, 1), atol=1e-4, rtol=0)


def test_window_layers_may_live_in_a_pool_of_their_own():
    model, ids = tiny_models.load("gemma3_tiny"), tiny_models.prompt("gemma3_tiny")
    config = model.program.config
    assert config.window_layers == (0, 1, 2, 3, 4)
    # Every slot has a place in the window pool: its pages are the full pool's in reverse.
    slots = np.arange(16 * PAGE_SIZE)
    full_to_swa = np.append((16 - slots // PAGE_SIZE) * PAGE_SIZE + slots % PAGE_SIZE, -1)
    logits, cache = prefill_logits(
        model,
        ids,
        full_to_swa=full_to_swa,
        window={"window_layers": config.window_layers, "num_window_pages": 17},
    )
    assert cache.k[0].shape[0] == 17
    assert cache.k[5].shape[0] == 16
    np.testing.assert_allclose(logits, tiny_models.golden("gemma3_tiny")["logits"][0], atol=1e-3, rtol=0)


@pytest.mark.parametrize("name", ["llama_tiny", "gemma3_tiny"])
def test_a_gguf_file_gives_the_weights_and_config_of_the_folder(name, tmp_path):
    write = tiny_models.write_llama_gguf if name == "llama_tiny" else tiny_models.write_gemma_gguf
    write(tmp_path / "model.gguf")
    model, expected = load_model(tmp_path / "model.gguf", dtype=np.float32), tiny_models.load(name)
    found = dataclasses.asdict(model.program.config)
    wanted = dataclasses.asdict(expected.program.config)
    # Gemma's header has no query_pre_attn_scalar, which is 24 in the folder; its head width stands in for it.
    if name == "gemma3_tiny":
        assert (found.pop("softmax_scale"), wanted.pop("softmax_scale")) == (32**-0.5, 24**-0.5)
    # A float32 in the header.
    assert found.pop("rms_norm_eps") == pytest.approx(wanted.pop("rms_norm_eps"), rel=1e-6)
    assert found == wanted
    jax.tree.map(np.testing.assert_array_equal, model.weights, expected.weights)


def test_weights_are_cast_and_norms_stay_in_float32():
    model = load_model(tiny_models.DATA / "qwen2_tiny", dtype=jnp.bfloat16)
    layer = model.weights.layers[0]
    assert {layer.q.dtype, layer.q_bias.dtype, model.weights.embedding.dtype} == {jnp.dtype(jnp.bfloat16)}
    assert {layer.mlp_norm.dtype, model.weights.final_norm.dtype} == {jnp.dtype(jnp.float32)}
    assert model.weights.head is None
    logits, _ = prefill_logits(model, tiny_models.prompt("qwen2_tiny"))
    golden = tiny_models.golden("qwen2_tiny")["logits"][0]
    assert np.abs(logits - golden).max() < 0.05 * np.abs(golden).max()


def test_progress_ends_at_the_number_of_weights():
    seen = []
    load_model(tiny_models.DATA / "qwen2_tiny", progress=lambda done, total: seen.append((done, total)))
    count = sum(value.size for value in tiny_models.stored("qwen2_tiny").values())
    assert seen[-1] == (count, count)
    assert len(seen) == len(tiny_models.stored("qwen2_tiny"))


def test_linear_takes_a_weight_with_a_matmul_of_its_own():
    @jax.tree_util.register_dataclass
    @dataclasses.dataclass(frozen=True)
    class Doubled:
        half: jax.Array

        def matmul(self, x):
            return x @ (2 * self.half).T

    rng = np.random.default_rng(1)
    x, weight, bias = (rng.standard_normal(shape).astype(np.float32) for shape in ((3, 8), (5, 8), (5,)))
    out = jax.jit(linear)(x, Doubled(jnp.asarray(weight / 2)), bias)
    np.testing.assert_allclose(out, x @ weight.T + bias, atol=1e-5)


@pytest.mark.parametrize("rows", [1, 4, 40])
def test_linear_accumulates_in_float32_and_returns_the_dtype_asked_for(rows):
    x, weight = jnp.ones((rows, 4096), jnp.bfloat16), jnp.full((2, 4096), 1 + 2**-7, jnp.bfloat16)
    assert linear(x, weight).dtype == jnp.bfloat16
    out = jax.jit(linear, static_argnames="out_dtype")(x, weight, out_dtype=jnp.float32)
    assert out.dtype == jnp.float32
    np.testing.assert_array_equal(out, np.full((rows, 2), 4096 * (1 + 2**-7), np.float32))


def test_rotation_is_a_complex_product_and_leaves_the_rest_of_a_head_alone():
    rope = Rope(theta=100.0, width=6, divisors=(1.0, 2.0, 4.0))
    positions = np.array([0, 3, 70000])
    x = np.random.default_rng(2).standard_normal((3, 2, 10))
    angles = positions[:, None] * 100.0 ** (-np.arange(3) / 3) / np.array([1.0, 2.0, 4.0])
    turned = (x[..., :3] + 1j * x[..., 3:6]) * np.exp(1j * angles)[:, None]
    expected = np.concatenate([turned.real, turned.imag, x[..., 6:]], axis=-1)
    out = rotate(jnp.asarray(x, jnp.float32), *rotation(jnp.asarray(positions), rope.inverse_frequencies()))
    np.testing.assert_allclose(out[:2], expected[:2], atol=1e-5)
    # Beyond, float32 angles carry an error of position * 2^-24, as they do in transformers.
    np.testing.assert_allclose(out[2], expected[2], atol=0.05)


def test_rms_norm_is_computed_in_float32():
    x = np.array([[300.0, 400.0]], np.float16)
    out = rms_norm(jnp.asarray(x), jnp.array([1.0, 2.0], jnp.float32), eps=0.0)
    assert out.dtype == jnp.float16
    np.testing.assert_allclose(out, [[300 / 125000**0.5, 800 / 125000**0.5]], rtol=1e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act: expected 'silu', .*got 'gelu'"),
        ({"mlp_bias": True}, "mlp_bias"),
        ({"attention_bias": True}, "attention_bias"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 2.0}}, "'yarn'"),
        ({"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4}}, "'factor', which is missing"),
        ({"num_key_value_heads": 3}, "multiple of the 3 KV heads"),
        ({"vocab_size": None}, "'vocab_size', which is missing"),
    ],
)
def test_a_config_that_is_not_computed_is_refused(change, message):
    settings = {**tiny_models.config("llama_tiny"), **change}
    settings = {key: value for key, value in settings.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        llama.config_from_hf(settings)


def test_windows_of_the_llama_family():
    def windows(**changes):
        config = llama.config_from_hf({**tiny_models.config("llama_tiny"), "num_hidden_layers": 3, **changes})
        return [layer.sliding_window for layer in config.layers]

    assert windows(model_type="mistral", sliding_window=32) == [32, 32, 32]
    assert windows(model_type="qwen2", sliding_window=32, use_sliding_window=False) == [None] * 3
    assert windows(model_type="qwen2", sliding_window=32, use_sliding_window=True, max_window_layers=1) == [
        None,
        32,
        32,
    ]
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    assert windows(model_type="qwen3", sliding_window=32, layer_types=kinds) == [32, None, 32]


def test_gemma_configs_of_both_generations_of_transformers_agree():
    new = tiny_models.config("gemma3_tiny")
    old = {key: value for key, value in new.items() if key not in ("rope_parameters", "layer_types")}
    old |= {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "sliding_window_pattern": 6, "rope_scaling": None}
    assert gemma3.config_from_hf(old) == gemma3.config_from_hf(new)


def test_linear_scaling_divides_every_angle():
    scaled = llama.rope_from_hf({"rope_theta": 1e4}, {"type": "linear", "factor": 4.0}, 8)
    plain = Rope(1e4, 8)
    np.testing.assert_allclose(scaled.inverse_frequencies(), plain.inverse_frequencies() / 4, rtol=1e-6)


def test_features_change_no_bit_of_a_batch_invariant_model():
    """The hidden states and scores of a verify step in bfloat16 are those of the program that gives no features."""
    windows, tokens = (None,) * 4, jnp.arange(8, dtype=jnp.int32)
    config = toy_decoder.program(windows).config
    weights = jax.tree.map(
        lambda x: x.astype(jnp.bfloat16) if x.ndim > 1 else x, toy_decoder.weights(windows, noise=1.0)
    )
    cache = decoder.allocate_cache(config, num_pages=16, page_size=4, dtype=jnp.bfloat16)
    step = target_verify_metadata(
        prefix_lens=np.array([9, 3]),
        num_draft_tokens=4,
        page_size=4,
        req_to_token=np.arange(64).reshape(2, 32),
        req_pool_indices=np.arange(2),
    )
    cache = jax.tree.map(lambda x: jax.random.normal(jax.random.key(1), x.shape).astype(x.dtype), cache)

    def run(features):
        def both(weights, cache):
            hidden, _ = decoder.forward(
                config, weights, tokens, cache, step, features=features, batch_invariant=True
            )
            return hidden[:, : config.hidden_size], decoder.logits(weights, hidden)

        return jax.jit(both)(weights, cache)

    for plain, other in zip(run(()), run((0, 2, 3)), strict=True):
        assert np.isfinite(np.asarray(plain, np.float32)).all()
        np.testing.assert_array_equal(plain, other)
