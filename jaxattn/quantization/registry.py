"""Quantisation methods by name, shared by the config's `quant_method` and the command line's `--quantization`."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from jaxattn.quantization.config import FP8, MXFP4, LayerSpec, QuantizationConfig, TensorSpec
from jaxattn.quantization.exclude import ExcludeList
from jaxattn.quantization.quark import parse_quark

# Small, and a rounding there moves a discrete choice or every logit.
ON_LOAD_EXCLUDE = (
    "*lm_head",
    "*embed_tokens",
    "*.gate",
    "*.router",
    "*shared_expert_gate",
    "*.in_proj_a",
    "*.in_proj_b",
)


@dataclasses.dataclass(frozen=True)
class QuantizationMethod:
    """A registered method: how to read its config, and what it does to a checkpoint that declares none.

    Attributes:
        name: the value of `quant_method` and of `--quantization`.
        summary: one line for a listing.
        parse: reads the `quantization_config` of a config.json that declares this method.
        on_load: the form that plain linear weights get while loading when the method is asked for and the
            checkpoint declares none; None when the method only reads checkpoints.
    """

    name: str
    summary: str
    parse: Callable[[Mapping[str, Any]], QuantizationConfig]
    on_load: LayerSpec | None = None


_METHODS: dict[str, QuantizationMethod] = {}


def register_method(method: QuantizationMethod) -> QuantizationMethod:
    """Add a method to the registry.

    Raises:
        ValueError: the name is taken.
    """
    if method.name in _METHODS:
        raise ValueError(f"method: expected a new name, got {method.name!r}, which is registered already")
    _METHODS[method.name] = method
    return method


def method_names() -> tuple[str, ...]:
    """The registered names, sorted: the choices of `--quantization`."""
    return tuple(sorted(_METHODS))


def get_method(name: str) -> QuantizationMethod:
    """The method of that name.

    Raises:
        ValueError: there is none; the message lists the known ones.

    Example:
        >>> from jaxattn.quantization import get_method
        >>> get_method("quark").name
        'quark'
    """
    if name not in _METHODS:
        raise ValueError(f"quantization: expected one of {', '.join(method_names())}, got {name!r}")
    return _METHODS[name]


def resolve_config(model_config: Mapping[str, Any], requested: str | None = None) -> QuantizationConfig:
    """The quantisation config of a model: the declared one, checked against the method asked for.

    Args:
        model_config: the content of config.json; `quantization_config` may be missing, or sit in `text_config`.
        requested: a method name (`--quantization`), or None for whatever the config declares.

    Raises:
        ValueError: an unknown method, a request that contradicts the config, or a request for a method that
            needs a declared config where there is none.
    """
    declared = model_config.get("quantization_config") or model_config.get("text_config", {}).get(
        "quantization_config"
    )
    method = None if requested is None else get_method(requested)
    if not declared:
        if method is None or method.name == "none":
            return QuantizationConfig()
        if method.on_load is None:
            raise ValueError(
                f"quantization: {method.name} reads the quantization_config of config.json, and this model has none; "
                "leave the option out, or quantise on load with fp8 or mxfp4"
            )
        exclude = ExcludeList(ON_LOAD_EXCLUDE)
        return QuantizationConfig(method=method.name, default=method.on_load, exclude=exclude, on_load=True)
    name = declared.get("quant_method")
    if not isinstance(name, str):
        raise ValueError(f"quantization_config.quant_method: expected a method name, got {name!r}")
    if method is not None and method.name != name:
        raise ValueError(
            f"quantization: config.json declares {name!r}, got {method.name!r}; leave the option out or give {name!r}"
        )
    return get_method(name).parse(declared)


def _parse_none(config: Mapping[str, Any]) -> QuantizationConfig:
    return QuantizationConfig()


def _parse_uniform(form: LayerSpec) -> Callable[[Mapping[str, Any]], QuantizationConfig]:
    """Reader of the flat configs that name the method, the modules left alone and little else."""

    def parse(config: Mapping[str, Any]) -> QuantizationConfig:
        keys = ("ignored_layers", "modules_to_not_convert", "exclude")
        exclude = tuple(entry for key in keys for entry in config.get(key) or ())
        static_cache = config.get("kv_cache_scheme") is not None
        static_input = config.get("activation_scheme") == "static"
        inputs = dataclasses.replace(form.input, dynamic=not static_input) if form.input else None
        return QuantizationConfig(
            method=str(config["quant_method"]),
            default=dataclasses.replace(form, input=inputs),
            exclude=ExcludeList(exclude),
            kv_cache_dtype="float8_e4m3fn" if static_cache else None,
        )

    return parse


_FP8 = LayerSpec(weight=TensorSpec(FP8, "per_channel", False), input=TensorSpec(FP8, "per_tensor", True))
_MXFP4 = LayerSpec(weight=TensorSpec(MXFP4, "per_group", False), input=TensorSpec(MXFP4, "per_group", True))

register_method(QuantizationMethod("none", "weights as they are stored", _parse_none))
register_method(
    QuantizationMethod(
        "fp8", "float8_e4m3fn weights, one scale a tensor or a row", _parse_uniform(_FP8), _FP8
    )
)
register_method(
    QuantizationMethod(
        "mxfp4", "4-bit weights, one e8m0 scale per 32 columns", _parse_uniform(_MXFP4), _MXFP4
    )
)
register_method(QuantizationMethod("quark", "AMD Quark checkpoints, MXFP4 or FP8 per layer", parse_quark))
