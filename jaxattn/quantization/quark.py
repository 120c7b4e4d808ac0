"""AMD Quark's `quantization_config`, read whole.

Format: https://quark.docs.amd.com, as amd-quark 0.13 writes it into config.json.
"""

from collections.abc import Mapping
from typing import Any

from jaxattn.errors import UnsupportedError
from jaxattn.quantization.config import FP8, MXFP4, LayerSpec, QuantizationConfig, TensorSpec
from jaxattn.quantization.exclude import ExcludeList

GROUP_SIZE = 32
FP8_DTYPES = ("fp8_e4m3", "fp8_e4m3fn")
PACK_METHODS = ("reorder", "order", None)


def parse_quark(config: Mapping[str, Any]) -> QuantizationConfig:
    """Read a Quark `quantization_config`.

    Args:
        config: the value of `quantization_config` in config.json: `global_quant_config`,
            `layer_quant_config`, `layer_type_quant_config`, `exclude`, `export` and `kv_cache_quant_config`.

    Raises:
        ValueError: a group of the config has the wrong type, or the KV-cache group names a layer that no rule
            configures or whose rules disagree.
        UnsupportedError: a scheme other than MXFP4 (fp4, groups of 32, e8m0) or FP8 (e4m3, per tensor or per
            channel), or quantised outputs or biases outside the KV cache.

    Example:
        >>> from jaxattn.quantization.quark import parse_quark
        >>> fp8 = {"dtype": "fp8_e4m3", "qscheme": "per_tensor", "is_dynamic": False}
        >>> config = parse_quark({"global_quant_config": {"weight": fp8}, "exclude": ["lm_head"]})
        >>> config.declared("model.layers.0.mlp.up_proj").form, config.declared("lm_head").form
        ('fp8', 'plain')
    """
    export = _mapping(config, "export")
    if export.get("pack_method") not in PACK_METHODS:
        raise UnsupportedError(
            f"quantization_config.export.pack_method: expected one of {PACK_METHODS}, got {export['pack_method']!r}"
        )
    rules = _mapping(config, "layer_quant_config")
    kv_rules = {**_mapping(config, "kv_cache_quant_config"), **rules}
    kv_group = tuple(export.get("kv_cache_group") or ())
    kv_cache_dtype = _kv_cache_dtype(kv_group, kv_rules)
    default = config.get("global_quant_config")
    return QuantizationConfig(
        method="quark",
        default=None if default is None else _layer_spec(default, "global_quant_config"),
        exclude=ExcludeList(tuple(config.get("exclude") or ())),
        layer_rules=tuple(
            (glob, _layer_spec(rule, f"layer_quant_config[{glob!r}]", outputs=glob in kv_group))
            for glob, rule in rules.items()
        ),
        type_rules=tuple(
            (name, _layer_spec(rule, f"layer_type_quant_config[{name!r}]"))
            for name, rule in _mapping(config, "layer_type_quant_config").items()
        ),
        kv_cache_dtype=kv_cache_dtype,
    )


def _mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    value = config.get(key) or {}
    if not isinstance(value, Mapping):
        raise ValueError(f"quantization_config.{key}: expected an object, got {value!r}")
    return value


def _layer_spec(rule: Mapping[str, Any], where: str, outputs: bool = False) -> LayerSpec:
    if not isinstance(rule, Mapping):
        raise ValueError(f"quantization_config.{where}: expected an object, got {rule!r}")
    for key in ("bias",) if outputs else ("bias", "output_tensors"):
        if rule.get(key) is not None:
            raise UnsupportedError(
                f"quantization_config.{where}.{key}: expected null (only the KV cache's layers have quantised "
                f"outputs), got {rule[key]!r}"
            )
    weight, inputs = rule.get("weight"), rule.get("input_tensors")
    return LayerSpec(
        weight=None if weight is None else _tensor_spec(weight, f"{where}.weight"),
        input=None if inputs is None else _tensor_spec(inputs, f"{where}.input_tensors"),
    )


def _tensor_spec(spec: Any, where: str) -> TensorSpec:
    if isinstance(spec, Mapping):
        dtype, scheme = spec.get("dtype"), spec.get("qscheme")
        dynamic = bool(spec.get("is_dynamic"))
        group = (scheme, spec.get("group_size"), spec.get("scale_format"))
        if dtype == "fp4" and group == ("per_group", GROUP_SIZE, "e8m0"):
            return TensorSpec(MXFP4, "per_group", dynamic)
        if dtype in FP8_DTYPES and scheme in ("per_tensor", "per_channel"):
            return TensorSpec(FP8, scheme, dynamic)
        spec = {key: spec.get(key) for key in ("dtype", "qscheme", "group_size", "scale_format")}
    raise UnsupportedError(
        f"quantization_config.{where}: expected fp4 per_group of {GROUP_SIZE} with e8m0 scales (MXFP4), or fp8_e4m3 "
        f"per_tensor or per_channel, got {spec!r}; export the model again with one of these schemes"
    )


def _kv_cache_dtype(group: tuple[str, ...], rules: Mapping[str, Any]) -> str | None:
    outputs = []
    for name in group:
        if name not in rules:
            raise ValueError(
                f"quantization_config.export.kv_cache_group: expected names that layer_quant_config configures "
                f"({', '.join(rules) or 'it has none'}), got {name!r}"
            )
        outputs.append(rules[name].get("output_tensors"))
    if not outputs:
        return None
    if any(output != outputs[0] for output in outputs):
        raise ValueError(
            f"quantization_config: expected equal output_tensors for {', '.join(group)}, got {outputs!r}"
        )
    where = f"layer_quant_config[{group[0]!r}].output_tensors"
    spec = _tensor_spec(outputs[0], where)
    if spec.form != FP8 or spec.granularity != "per_tensor":
        raise UnsupportedError(
            f"quantization_config.{where}: expected fp8_e4m3 per_tensor for the KV cache, got {spec}"
        )
    return "float8_e4m3fn"
