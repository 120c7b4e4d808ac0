"""Quantised weights and the configs that declare them."""

from jaxattn.quantization.config import QuantizationConfig
from jaxattn.quantization.exclude import ExcludeList
from jaxattn.quantization.fp8 import Fp8Weight
from jaxattn.quantization.mxfp4_tiles import Mxfp4Tiles
from jaxattn.quantization.mxfp4_weight import Mxfp4Weight
from jaxattn.quantization.registry import (
    QuantizationMethod,
    get_method,
    method_names,
    register_method,
    resolve_config,
)
from jaxattn.quantization.report import LoadReport, load_report
from jaxattn.quantization.weights import QuantizedWeight

__all__ = [
    "ExcludeList",
    "Fp8Weight",
    "LoadReport",
    "Mxfp4Tiles",
    "Mxfp4Weight",
    "QuantizationConfig",
    "QuantizationMethod",
    "QuantizedWeight",
    "get_method",
    "load_report",
    "method_names",
    "register_method",
    "resolve_config",
]
