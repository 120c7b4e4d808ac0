"""Quantised checkpoints as models: Quark's goldens, mixed files, generation, KV scales, quantising on load."""

import functools
import json

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import DATA, dequantised, edited, packed, read_tensors, same, trees
from hybrid import QUICKLY, Pool, rows

from jaxattn.errors import CheckpointError
from jaxattn.generate import GenerationOptions, generate
from jaxattn.models import streaming
from jaxattn.models.load import load_model
from jaxattn.quantization import Fp8Weight, Mxfp4Tiles, Mxfp4Weight

MIXED, MOE = "quark_mxfp4_qwen3_5_mtp", "quark_f2f_mxfp4_qwen3_5_moe_mtp"


@functools.partial(jax.jit, static_argnums=0, compiler_options=QUICKLY)
def forward(program, weights, tokens, cache, metadata):
    hidden, cache = program.forward(program.config, weights, tokens, cache, metadata)
    return program.logits(weights, hidden), cache


def prefill(model, ids, dtype=jnp.float32, **descales):
    """Logits of a prompt over NaN-filled shuffled pages, and keys and values of its tokens in the first cache layer."""
    program, pool = model.program, Pool(1, 16)
    cache = program.allocate_cache(
        program.config, num_seqs=1, num_pages=pool.num_pages, page_size=16, dtype=dtype, **descales
    )
    cache = jax.tree.map(lambda a: jnp.full_like(a, jnp.nan) if a.ndim == 4 else a, cache)
    logits, cache = forward(program, model.weights, rows([ids]), cache, pool.extend([0], [len(ids)]))
    stored = getattr(cache, "kv", cache).gather(0, pool.table["req_to_token"][0, : len(ids)])
    return np.asarray(logits)[: len(ids)], [np.asarray(side) for side in stored]


def close(got, want):
    assert np.abs(got - want).max() <= 1e-4 * np.abs(want).max()


@pytest.mark.parametrize(
    ("name", "simulated"),
    [
        ("quark_mxfp4_llama", True),
        ("quark_mxfp4_qwen3", True),
        ("quark_mxfp4_kvfp8_llama", False),
        ("quark_fp8_llama", True),
        ("quark_fp8_custom_llama", False),
    ],
)
def test_quark_goldens_of_weights_alone_and_with_simulated_activations(name, simulated):
    golden = np.load(DATA / name / "golden.npz")
    ids = golden["input_ids"][0]
    close(prefill(load_model(DATA / name), ids)[0], golden["logits_weight_only"][0])
    if simulated:
        model = load_model(DATA / name, emulate_activations=True)
        close(prefill(model, ids)[0], golden["logits_quark_simulated"][0])


def test_the_hybrid_golden_with_four_bit_activations():
    golden = np.load(DATA / MIXED / "golden.npz")
    model = load_model(DATA / MIXED, quantization="quark", emulate_activations=True)
    close(prefill(model, golden["input_ids"][0])[0], golden["logits_quark_simulated"][0])


@pytest.mark.parametrize("name", ["quark_mxfp4_llama", "quark_mxfp4_qwen3", "quark_fp8_llama", MIXED, MOE])
def test_loaded_weights_equal_the_files_bit_for_bit(name):
    tensors, model = read_tensors(DATA / name), load_model(DATA / name)
    found = 0
    for weight in jax.tree.leaves(model.weights, is_leaf=lambda w: isinstance(w, Mxfp4Weight | Fp8Weight)):
        if isinstance(weight, Mxfp4Weight | Fp8Weight):
            values = np.asarray(weight.dequantize(jnp.float32))
            for expert in values.reshape(-1, *values.shape[-2:]):
                match = [
                    key
                    for key in tensors
                    if key + "_scale" in tensors
                    and np.array_equal(dequantised(tensors, key).astype(np.float32), expert)
                ]
                assert len(match) == 1, weight.shape
                found += 1
    assert found == sum(key.endswith("weight_scale") for key in tensors)


@pytest.mark.parametrize("name", [MIXED, MOE])
def test_mixed_checkpoints_generate_with_the_method_named_and_from_the_config(name, tmp_path):
    """MXFP4 target and bf16 module; every variant of the config loads the same weights."""
    golden = np.load(DATA / name / "golden.npz")
    model = load_model(DATA / name, quantization="quark")
    down = model.weights.layers[3].mlp.down if name == MIXED else model.weights.layers[3].mlp.experts.down
    assert isinstance(down, Mxfp4Weight)
    assert not [w for w in jax.tree.leaves(model.mtp.module) if w.dtype == jnp.uint8]
    ids = golden["input_ids"][0].tolist()
    pieces = generate(model, [ids], GenerationOptions(max_new_tokens=8, speculative="mtp", read_every=8))
    assert [token for piece in pieces for token in piece.tokens] == golden["greedy_ids_weight_only"][0][
        :8
    ].tolist()
    assert same(trees(load_model(DATA / name)), trees(model))
    if name == MIXED:
        for variant in ("glob", "regex", "undeclared"):
            other = load_model(
                edited(name, tmp_path, config=f"config.{variant}_mtp.json"), quantization="quark"
            )
            assert same(trees(other), trees(model)), variant


def test_scales_may_be_stored_as_bytes_or_as_e8m0(tmp_path):
    def edit(tensors):
        for name in [name for name in tensors if name.endswith("weight_scale")]:
            tensors[name] = tensors[name].view(ml_dtypes.float8_e8m0fnu)

    assert same(trees(load_model(edited(MOE, tmp_path, edit))), trees(load_model(DATA / MOE)))


def part_of_the_module(tensors, names):
    for name in names:
        weight = tensors[f"{name}.weight"].astype(np.float32)
        tensors[f"{name}.weight"], tensors[f"{name}.weight_scale"] = packed(weight)


@pytest.mark.parametrize("listed", [True, False])
def test_a_module_of_which_only_part_is_bf16_loads_leaf_by_leaf(tmp_path, listed):
    """The list excludes the whole module, or one entry of it; the file alone says which leaves are packed."""
    quantised = ("mtp.fc", "mtp.layers.0.mlp.up_proj", "mtp.layers.0.self_attn.q_proj")
    folder = edited(MIXED, tmp_path, lambda tensors: part_of_the_module(tensors, quantised))
    if not listed:
        config = json.loads((folder / "config.json").read_text())
        config["quantization_config"]["exclude"] = ["lm_head", "mtp.norm"]
        (folder / "config.json").write_text(json.dumps(config))
    model = load_model(folder, quantization="quark")
    module, tensors = model.mtp.module, read_tensors(folder)
    forms = {
        "mtp.fc": module.fc,
        "mtp.layers.0.mlp.up_proj": module.layer.mlp.up,
        "mtp.layers.0.mlp.gate_proj": module.layer.mlp.gate,
        "mtp.layers.0.self_attn.q_proj": module.layer.mixer.q,
        "mtp.layers.0.self_attn.k_proj": module.layer.mixer.k,
    }
    for name, weight in forms.items():
        assert isinstance(weight, Mxfp4Weight) == (name in quantised), name
        values = weight.dequantize(jnp.float32) if name in quantised else weight
        assert (np.asarray(values) == dequantised(tensors, f"{name}.weight")).all(), name


def test_experts_of_both_forms_cannot_be_stacked_and_the_error_names_them(tmp_path):
    name = "mtp.layers.0.mlp.experts.2.up_proj"
    folder = edited(MOE, tmp_path, lambda tensors: part_of_the_module(tensors, [name]))
    with pytest.raises(
        CheckpointError, match=rf"experts\.0\.up_proj.* plain .*{name}.weight in mxfp4.*cannot be fused"
    ):
        load_model(folder)


def test_quantised_tensors_are_refused_where_the_model_has_no_linear_weight(tmp_path):
    def edit(tensors):
        name = "model.embed_tokens.weight"
        tensors[name], tensors[f"{name}_scale"] = packed(tensors[name].astype(np.float32))

    with pytest.raises(
        CheckpointError, match=r"model\.embed_tokens\.weight: expected floating point values without"
    ):
        load_model(edited(MIXED, tmp_path, edit))


@pytest.mark.parametrize("name", ["quark_mxfp4_kvfp8_llama", "quark_fp8_custom_llama"])
def test_kv_scales_of_both_spellings_reach_the_cache(name):
    model, tensors = load_model(DATA / name), read_tensors(DATA / name)
    suffixes = ("k_proj.output_scale", "v_proj.output_scale") if "mxfp4" in name else ("k_scale", "v_scale")
    want = [[float(tensors[f"model.layers.{i}.self_attn.{suffix}"]) for i in range(2)] for suffix in suffixes]
    assert list(model.kv_scales) == want
    ids = np.load(DATA / name / "golden.npz")["input_ids"][0]
    wide, exact = prefill(model, ids)
    descales = dict(zip(("k_descale", "v_descale"), model.kv_scales, strict=True))
    narrow, stored = prefill(model, ids, jnp.float8_e4m3fn, **descales)
    for side in range(2):
        rounded = (exact[side] / np.float32(want[side][0])).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        np.testing.assert_allclose(stored[side], rounded * np.float32(want[side][0]), rtol=1e-6)
    assert (wide.argmax(axis=1) == narrow.argmax(axis=1)).mean() > 0.9


def test_half_a_set_of_kv_scales_is_refused(tmp_path):
    name = "model.layers.1.self_attn.v_proj.output_scale"
    folder = edited("quark_mxfp4_kvfp8_llama", tmp_path, lambda tensors: tensors.pop(name))
    with pytest.raises(CheckpointError, match=f"expected the KV cache scale {name}, which is missing"):
        load_model(folder)

    def zero(tensors):
        tensors[name] = np.zeros((), ml_dtypes.bfloat16)

    with pytest.raises(CheckpointError, match=f"tensor {name}: expected one positive scale, found 0.0"):
        load_model(edited("quark_mxfp4_kvfp8_llama", tmp_path, zero))


@pytest.mark.parametrize(("method", "kind"), [("mxfp4", Mxfp4Weight), ("fp8", Fp8Weight)])
def test_a_plain_checkpoint_quantises_on_load_what_is_safe_to(method, kind):
    plain = load_model(DATA / "qwen3_5_moe_mtp_tiny")
    model = load_model(DATA / "qwen3_5_moe_mtp_tiny", quantization=method)
    layer, source = model.weights.layers[0], plain.weights.layers[0]
    assert isinstance(layer.mlp.experts.up, kind)
    assert isinstance(layer.mixer.qkv, kind)
    assert layer.mlp.experts.up.shape == source.mlp.experts.up.shape
    for kept in (
        layer.mlp.router,
        layer.mlp.shared_gate,
        layer.mixer.beta,
        model.weights.head,
        model.weights.embedding,
    ):
        assert isinstance(kept, jax.Array)
    again = kind.from_array(source.mlp.experts.up)
    assert same(layer.mlp.experts.up, again)
    dense = layer.mlp.experts.up.dequantize(jnp.float32)
    assert 0 < float(jnp.abs(dense - source.mlp.experts.up).max()) < 0.5


@pytest.mark.parametrize("name", ["quark_mxfp4_llama", MIXED, MOE])
def test_matrices_are_loaded_in_tiles_where_their_kernel_is_tuned(name, monkeypatch):
    plain = load_model(DATA / name, dtype=jnp.bfloat16)
    monkeypatch.setattr(streaming, "tiles_are_faster", lambda: True)
    model = load_model(DATA / name, dtype=jnp.bfloat16)

    def quantised(model):
        kinds = (Mxfp4Weight, Mxfp4Tiles)
        leaves = jax.tree.leaves(model.weights, is_leaf=lambda w: isinstance(w, kinds))
        return [w for w in leaves if isinstance(w, kinds)]

    for old, new in zip(quantised(plain), quantised(model), strict=True):
        # Experts are picked from a batch of weights.
        assert isinstance(new, Mxfp4Weight if len(old.shape) == 3 else Mxfp4Tiles)
        assert (new.dequantize(jnp.float32) == old.dequantize(jnp.float32)).all()
    ids = np.load(DATA / name / "golden.npz")["input_ids"][0]
    want = np.asarray(prefill(plain, ids)[0], np.float32)
    np.testing.assert_allclose(
        np.asarray(prefill(model, ids)[0], np.float32), want, atol=0.03 * np.abs(want).max()
    )
    assert isinstance(quantised(load_model(DATA / name, dtype=jnp.float32))[0], Mxfp4Weight)


def test_options_that_a_gguf_file_has_not_are_refused(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(
        ValueError, match="quantization: expected a folder of safetensors with it, got the GGUF file"
    ):
        load_model(path, quantization="fp8")


def test_a_requested_method_that_contradicts_the_config_is_refused():
    with pytest.raises(ValueError, match="declares 'quark', got 'none'"):
        load_model(DATA / MIXED, quantization="none")


def test_fp8_with_a_scale_per_row_is_read_as_such(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"
    scale = np.linspace(0.001, 0.002, 256, dtype=np.float32)

    def edit(tensors):
        tensors[f"{name}_scale"] = scale[:, None]

    weight = load_model(edited("quark_fp8_llama", tmp_path, edit)).weights.layers[0].up
    assert (np.asarray(weight.scale) == scale).all()
    want = read_tensors(tmp_path)[name].astype(np.float32) * scale[:, None]
    assert (np.asarray(weight.dequantize(jnp.float32)) == want).all()
