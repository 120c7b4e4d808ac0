"""Quantisation configs: exclusion, rules, the registry, and the load report of real and edited checkpoints."""

import json

import numpy as np
import pytest
from checkpoints import DATA, edited, read_tensors

from jaxattn import cli
from jaxattn.errors import CheckpointError, UnsupportedError
from jaxattn.quantization import (
    ExcludeList,
    QuantizationMethod,
    get_method,
    load_report,
    method_names,
    register_method,
    resolve_config,
)
from jaxattn.quantization.exclude import shards_of
from jaxattn.quantization.quark import parse_quark

MXFP4 = {
    "dtype": "fp4",
    "qscheme": "per_group",
    "group_size": 32,
    "scale_format": "e8m0",
    "is_dynamic": False,
}
FP8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
MOE = "quark_f2f_mxfp4_qwen3_5_moe_mtp"
MIXED = "quark_mxfp4_qwen3_5_mtp"


def config_of(name, file="config.json"):
    return json.loads((DATA / name / file).read_text())


def quark(**config):
    return parse_quark({"global_quant_config": {"weight": MXFP4}, **config})


def test_p63_fused_names_are_excluded_as_such_and_by_their_experts():
    experts = [f"model.layers.3.mlp.experts.{e}.{p}_proj" for e in range(4) for p in ("gate", "up", "down")]
    exclude = ExcludeList(("visual.blocks.0.attn.qkv_proj", *experts))
    assert exclude.decide("visual.blocks.0.attn.qkv_proj") == "visual.blocks.0.attn.qkv_proj"
    assert exclude.decide("model.layers.3.mlp.experts") is not None
    assert exclude.decide("model.layers.4.mlp.experts") is None
    assert exclude.decide("visual.blocks.1.attn.qkv_proj") is None
    with pytest.raises(CheckpointError, match=r"layers\.3\.mlp\.experts.*cannot be fused"):
        exclude.decide(
            "model.layers.3.mlp.experts", present=[*experts, "model.layers.3.mlp.experts.4.up_proj"]
        )


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.qkv_proj", "layers.0.self_attn.qkv_proj"])
def test_p64_fused_names_resolve_to_their_projections_in_both_spellings(name):
    exclude = ExcludeList(("*.self_attn.q_proj", "*.self_attn.k_proj", "*.self_attn.v_proj"))
    assert exclude.decide(name) == "*.self_attn.q_proj"
    assert exclude.decide(name.replace("self_attn", "mlp")) is None


def test_p65_a_shard_that_does_not_exist_has_no_say():
    exclude = ExcludeList(("layers.0.index_q_proj", "layers.0.index_k_proj"))
    present = {"model.layers.0.index_q_proj", "model.layers.0.index_k_proj"}
    assert exclude.decide("model.layers.0.index_qkv_proj", present) == "layers.0.index_q_proj"
    with pytest.raises(CheckpointError) as error:
        exclude.decide("model.layers.0.index_qkv_proj", present | {"model.layers.0.index_v_proj"})
    for shard in ("index_q_proj", "index_k_proj", "index_v_proj"):
        assert f"model.layers.0.{shard}" in str(error.value)


def test_p66_plain_patterns_are_globs_and_re_marks_a_regular_expression():
    exclude = ExcludeList(("*.mlp.gate", "re:.*lm_head", "model.layers.?.mlp.gate_proj"))
    assert exclude.match("model.layers.7.mlp.gate") == "*.mlp.gate"
    assert exclude.match("language_model.lm_head") == "re:.*lm_head"
    assert exclude.match("model.layers.3.mlp.gate_proj") == "model.layers.?.mlp.gate_proj"
    assert exclude.match("model.layers.10.mlp.gate_proj") is None
    assert exclude.match("model.layers.7.mlp.gate_up") is None


def test_a_name_covers_what_is_below_it_but_no_longer_name():
    exclude = ExcludeList(("model.layers.1", "re:model.layers.2[.]"))
    assert exclude.match("model.layers.1.mlp.up_proj") == "model.layers.1"
    assert exclude.match("model.language_model.layers.1.mlp.up_proj") == "model.layers.1"
    assert exclude.match("model.layers.11.mlp.up_proj") is None
    assert exclude.match("mtp.layers.1.mlp.up_proj") is None
    assert exclude.match("language_model.model.layers.2.mlp") is not None
    assert exclude.match("model.layers.22.mlp") is None


def test_a_pattern_that_meets_a_fused_name_by_accident_does_not_cover_all_of_it():
    with pytest.raises(
        CheckpointError, match=r"excludes layers\.0\.up_proj and quantises layers\.0\.gate_proj"
    ):
        ExcludeList(("*up_proj",)).decide("layers.0.gate_up_proj")
    assert ExcludeList(("*up_proj", "*gate_proj")).decide("layers.0.gate_up_proj") == "*gate_proj"
    assert ExcludeList(("*.qkv_proj",)).decide("layers.0.qkv_proj") == "*.qkv_proj"


def test_a_regular_expression_matches_from_the_start():
    assert ExcludeList(("re:mtp.*",)).match("mtp.layers.0.mlp.up_proj") is not None
    assert ExcludeList(("re:tp.*",)).match("mtp.layers.0.mlp.up_proj") is None


def test_fused_names_expand_with_their_own_prefix():
    assert shards_of("layers.0.mlp.gate_up_proj") == ("layers.0.mlp.gate_proj", "layers.0.mlp.up_proj")
    assert shards_of("a.in_proj_ba", present={"model.a.in_proj_b"}) == ("a.in_proj_b",)
    assert shards_of("layers.0.mlp.down_proj") == ()


@pytest.mark.parametrize("entries", [("re:*bad(",), (3,)])
def test_bad_exclude_entries_are_refused(entries):
    with pytest.raises(ValueError, match="exclude: "):
        ExcludeList(entries)


def test_rules_are_asked_in_order_layer_then_type_then_global():
    config = quark(
        exclude=["lm_head"],
        layer_quant_config={"*.up_proj": {"weight": FP8}, "*.layers.0.*": {"weight": None}},
        layer_type_quant_config={"Embedding": {"weight": {**FP8, "qscheme": "per_channel"}}},
    )
    assert config.declared("model.layers.0.mlp.up_proj").form == "fp8"
    assert config.declared("model.layers.0.mlp.down_proj").form == "plain"
    assert config.declared("model.layers.1.mlp.down_proj").form == "mxfp4"
    assert config.declared("model.embed_tokens", layer_type="Embedding").form == "fp8"
    assert (
        config.declared("model.embed_tokens", layer_type="Embedding").spec.weight.granularity == "per_channel"
    )
    assert config.declared("lm_head").why == "excluded by 'lm_head'"
    with pytest.raises(CheckpointError, match=r"gate_proj as mxfp4 .*up_proj as fp8 .*cannot be fused"):
        config.declared("model.layers.1.mlp.gate_up_proj")
    assert config.declared("model.layers.1.self_attn.qkv_proj").form == "mxfp4"


@pytest.mark.parametrize(
    ("broken", "text"),
    [
        (
            {"global_quant_config": {"weight": {**MXFP4, "group_size": 16}}},
            "global_quant_config.weight: expected fp4",
        ),
        ({"global_quant_config": {"weight": [MXFP4, FP8]}}, "global_quant_config.weight"),
        ({"global_quant_config": {"weight": MXFP4, "bias": FP8}}, "global_quant_config.bias: expected null"),
        ({"global_quant_config": {"weight": MXFP4, "output_tensors": FP8}}, "output_tensors: expected null"),
        (
            {"layer_quant_config": {"*a": {"weight": {"dtype": "int4"}}}},
            r"layer_quant_config\['\*a'\].weight",
        ),
        ({"export": {"pack_method": "zigzag"}}, "export.pack_method"),
    ],
)
def test_schemes_that_are_not_read_are_refused_by_name(broken, text):
    with pytest.raises(UnsupportedError, match=text):
        quark(**broken)


def test_a_config_of_wrong_types_is_refused():
    with pytest.raises(ValueError, match="layer_quant_config: expected an object"):
        quark(layer_quant_config=["a"])
    with pytest.raises(ValueError, match="global_quant_config: expected an object"):
        quark(global_quant_config="fp8")


def test_the_kv_cache_group_is_read_and_its_outputs_are_not_those_of_layers():
    config = parse_quark(config_of("quark_mxfp4_kvfp8_llama")["quantization_config"])
    assert config.kv_cache_dtype == "float8_e4m3fn"
    assert config.declared("model.layers.0.self_attn.k_proj").form == "mxfp4"
    rule = {"weight": MXFP4, "output_tensors": FP8}
    group = {"kv_cache_group": ["*k_proj", "*v_proj"]}
    with pytest.raises(ValueError, match=r"kv_cache_group: expected names that .*\*k_proj.*got '\*v_proj'"):
        quark(export=group, layer_quant_config={"*k_proj": rule})
    other = {**rule, "output_tensors": {**FP8, "is_dynamic": True}}
    with pytest.raises(ValueError, match="expected equal output_tensors"):
        quark(export=group, layer_quant_config={"*k_proj": rule, "*v_proj": other})
    wide = {**rule, "output_tensors": MXFP4}
    with pytest.raises(UnsupportedError, match="for the KV cache"):
        quark(export=group, layer_quant_config={"*k_proj": wide, "*v_proj": wide})


def test_the_registry_lists_what_it_knows():
    assert {"none", "fp8", "mxfp4", "quark"} <= set(method_names())
    with pytest.raises(ValueError, match=r"quantization: expected one of fp8, mxfp4, none, quark.*got 'awq'"):
        get_method("awq")
    with pytest.raises(ValueError, match="'quark', which is registered already"):
        register_method(QuantizationMethod("quark", "", parse_quark))


def test_the_method_comes_from_the_config_and_a_request_must_agree():
    declared = config_of(MIXED)
    assert resolve_config(declared).method == "quark"
    assert resolve_config(declared, "quark") == resolve_config(declared)
    with pytest.raises(ValueError, match=r"declares 'quark', got 'fp8'"):
        resolve_config(declared, "fp8")
    with pytest.raises(ValueError, match="expected one of"):
        resolve_config(declared, "gptq")
    assert resolve_config({}).method == resolve_config({}, "none").method == "none"
    assert resolve_config({}, "mxfp4").on_load
    with pytest.raises(ValueError, match=r"quark reads the quantization_config .* has none"):
        resolve_config({}, "quark")
    with pytest.raises(ValueError, match="quant_method: expected a method name, got None"):
        resolve_config({"quantization_config": {"exclude": []}})
    custom = resolve_config(config_of("quark_fp8_custom_llama"))
    assert (custom.method, custom.kv_cache_dtype) == ("fp8", "float8_e4m3fn")
    assert custom.declared("lm_head").form == "plain"


def test_the_report_trusts_the_file_where_the_exclude_list_forgets_the_mtp_experts():
    report = load_report(DATA / MOE)
    assert report.counts() == {"mxfp4": 48, "plain": 114}
    assert {leaf.name for leaf in report.disagreements} == {
        f"mtp.layers.0.mlp.experts.{e}.{p}_proj.weight" for e in range(4) for p in ("gate", "up", "down")
    }
    leaf = next(leaf for leaf in report.leaves if leaf.name == "mtp.layers.0.mlp.experts.2.up_proj.weight")
    assert (leaf.form, leaf.shape) == ("plain", (32, 64))
    assert leaf.why == "bfloat16 without weight_scale, though global_quant_config declares mxfp4"
    packed = next(
        leaf for leaf in report.leaves if leaf.name.endswith("layers.0.mlp.experts.0.gate_proj.weight")
    )
    assert packed.shape == (32, 64)
    table = report.table().splitlines()
    assert table[0].split() == ["tensor", "shape", "form", "why"]
    assert "12 marked ! differ from the config; the file decides" in table
    row = next(line for line in table if line.startswith(leaf.name))
    assert row.split(maxsplit=3)[1:] == ["32x64", "plain", f"! {leaf.why}"]


@pytest.mark.parametrize("variant", ["glob", "regex", "undeclared"])
def test_the_report_reads_every_way_to_declare_a_bf16_mtp(tmp_path, variant):
    folder = edited(MIXED, tmp_path, config=f"config.{variant}_mtp.json")
    report = load_report(folder, "quark")
    mtp = [leaf for leaf in report.leaves if leaf.name.startswith("mtp.")]
    assert len(mtp) == 15
    assert {leaf.form for leaf in mtp} == {"plain"}
    differ = {leaf.name for leaf in report.disagreements}
    linear = {leaf.name for leaf in mtp if len(leaf.shape) == 2}
    assert differ == (linear if variant == "undeclared" else set())


def test_the_report_of_an_excluded_tensor_that_is_quantised_says_so(tmp_path):
    folder = edited(MIXED, tmp_path)
    config = config_of(MIXED)
    config["quantization_config"]["exclude"].append("model.layers.0.mlp")
    (folder / "config.json").write_text(json.dumps(config))
    differ = load_report(folder).disagreements
    assert [leaf.name.split(".")[-2] for leaf in differ] == ["down_proj", "gate_proj", "up_proj"]
    assert {leaf.form for leaf in differ} == {"mxfp4"}
    assert "though excluded by 'model.layers.0.mlp'" in differ[0].why


def test_every_committed_checkpoint_agrees_with_its_config():
    forms = {
        "quark_mxfp4_llama": {"mxfp4": 6, "plain": 15},
        "quark_mxfp4_qwen3": {"mxfp4": 13, "plain": 12},
        "quark_fp8_llama": {"fp8": 14, "plain": 7, "scale": 14},
        "quark_fp8_custom_llama": {"fp8": 14, "plain": 7, "scale": 18},
        "quark_mxfp4_kvfp8_llama": {"mxfp4": 14, "plain": 7, "scale": 4},
        "qwen3_5_mtp_tiny": {"plain": 71},
    }
    for name, counts in forms.items():
        report = load_report(DATA / name)
        assert report.counts() == counts, name
        assert not report.disagreements, name


def test_inspect_prints_the_report_and_refuses_what_is_no_checkpoint(capsys):
    assert cli.main(["inspect", str(DATA / MOE), "--quantization", "quark"]) == 0
    assert capsys.readouterr().out == load_report(DATA / MOE).table() + "\n"
    assert cli.main(["inspect", "no-such-folder"]) == 2
    assert capsys.readouterr().err == (
        "jaxattn: no-such-folder: expected a folder with config.json and safetensors shards\n"
    )
    assert cli.main(["inspect", str(DATA / MOE), "--quantization", "awq"]) == 2
    assert "expected one of fp8, mxfp4, none, quark" in capsys.readouterr().err


def drop(name):
    return lambda tensors: tensors.pop(name)


def narrower(name):
    return lambda tensors: tensors.update({name: tensors[name][:, :-1]})


def as_bf16(name):
    def edit(tensors):
        tensors[name] = np.zeros((4, 4), tensors["lm_head.weight"].dtype)

    return edit


UP = "model.layers.0.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (narrower(f"{UP}_scale"), rf"{UP}_scale: expected shape \[256, 4\].*found \[256, 3\]"),
        (drop(f"{UP}_scale"), rf"{UP} fits no known form: .*found uint8 \[256, 64\] without one"),
        (drop(UP), rf"expected the tensor {UP} for {UP}_scale"),
        (as_bf16(UP), rf"{UP} fits no known form: .*found bfloat16 \[4, 4\] with a uint8 weight_scale"),
    ],
)
def test_tensors_that_fit_no_form_are_refused_by_name(tmp_path, edit, text):
    with pytest.raises(CheckpointError, match=text):
        load_report(edited("quark_mxfp4_llama", tmp_path, edit))


def test_fp8_scales_of_another_shape_are_refused(tmp_path):
    name = "model.layers.1.mlp.down_proj.weight"

    def per_row(tensors):
        tensors[f"{name}_scale"] = np.broadcast_to(tensors[f"{name}_scale"], (128,))

    def wrong(tensors):
        tensors[f"{name}_scale"] = np.broadcast_to(tensors[f"{name}_scale"], (64,))

    assert not load_report(edited("quark_fp8_llama", tmp_path, per_row)).disagreements
    with pytest.raises(CheckpointError, match=rf"{name}_scale: .*each of the 128 rows.*found \[64\]"):
        load_report(edited("quark_fp8_llama", tmp_path, wrong))


def test_blockwise_fp8_is_named_as_what_it_is(tmp_path):
    name = "model.layers.0.mlp.up_proj.weight"

    def edit(tensors):
        tensors[f"{name}_scale_inv"] = tensors.pop(f"{name}_scale").reshape(1, 1)

    with pytest.raises(CheckpointError, match=r"scales of blocks \(weight_scale_inv\) are not supported"):
        load_report(edited("quark_fp8_llama", tmp_path, edit))


def test_the_report_reads_headers_only(tmp_path, monkeypatch):
    folder = edited("quark_mxfp4_llama", tmp_path)
    header_end = 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")
    size = (folder / "model.safetensors").stat().st_size
    with (folder / "model.safetensors").open("r+b") as file:
        file.truncate(header_end)
        file.truncate(size)
    assert load_report(folder).counts() == {"mxfp4": 6, "plain": 15}
    assert not read_tensors(folder)[UP].any()
