"""The content of a Hugging Face folder: any family, quantised leaf by leaf, streamed onto the devices."""

import dataclasses
import math
import os
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

import jax

from jaxattn.models import decoder_specs, qwen3_5, qwen3_5_mtp
from jaxattn.models.hybrid_cache import HybridCache
from jaxattn.models.program import Program
from jaxattn.models.qwen3_5_config import HybridConfig
from jaxattn.models.safetensors import SafetensorsFolder, StoredTensor
from jaxattn.models.streaming import PlannedWeight, Sharding, find, load_tree, plan_weights, read_stored
from jaxattn.quantization.kv_scales import read_kv_scales
from jaxattn.quantization.registry import resolve_config


@dataclasses.dataclass(frozen=True)
class FolderContent:
    """What a folder holds.

    Attributes:
        program: what the model computes.
        weights: its weights.
        mtp: the weights of its multi-token-prediction module, or None.
        kv_scales: value of a stored 1 in the keys and in the values of each cache layer, or None.
    """

    program: Program
    weights: Any
    mtp: qwen3_5_mtp.MtpWeights | None
    kv_scales: tuple[list[float], list[float]] | None


def load_folder(
    path: str | os.PathLike,
    settings: Mapping[str, Any],
    family: ModuleType,
    *,
    dtype,
    quantization: str | None = None,
    emulate_activations: bool = False,
    sharding: Sharding | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> FolderContent:
    """Load a folder of safetensors shards. Nothing is allocated before all headers are read and fit the model.

    Args:
        path: the folder.
        settings: its config.json.
        family: the module with `config_from_hf`, and with `HF_NAMES` unless the model is a hybrid one.
        dtype: of the plain matrices and of the computation.
        quantization: see `jaxattn.models.load.load_model`, as the rest.
        emulate_activations: see there.
        sharding: see there.
        progress: see there.

    Raises:
        CheckpointError: a shard is damaged, or a tensor is missing or does not fit the model; it names the tensor.
        ValueError: an unknown method, or one that config.json contradicts.
    """
    tensors = SafetensorsFolder(path).tensors
    quantised = resolve_config(settings, quantization)
    config = family.config_from_hf(settings)
    planned = plan_weights(_specs(config, family, tensors), tensors, quantised)
    weights, module = load_tree(
        planned,
        tensors,
        dtype=dtype,
        sharding=sharding,
        emulate_activations=emulate_activations,
        on_load=quantised,
        loaded=_counter(planned, progress),
    )
    hybrid = isinstance(config, HybridConfig)
    layers = config.full_layers if hybrid else range(config.num_layers)
    return FolderContent(
        program=hybrid_program(config) if hybrid else Program(config),
        weights=weights,
        mtp=None if module is None else qwen3_5_mtp.MtpWeights.share(module, weights),
        kv_scales=read_kv_scales(tensors, [f"model.layers.{i}." for i in layers], read_stored),
    )


def hybrid_program(config: HybridConfig) -> Program:
    """The program of a decoder with recurrent states, which follow the accepted drafts of a verify step."""
    return Program(
        config, qwen3_5.forward, qwen3_5.logits, allocate_cache=HybridCache.allocate, commit=_commit_states
    )


def _commit_states(cache: HybridCache, metadata, path) -> HybridCache:
    """A step that is no verify step has advanced the states already."""
    return cache if cache.pending is None else cache.commit((path >= 0).sum(axis=1))


def _specs(config: Any, family: ModuleType, tensors: Mapping[str, StoredTensor]) -> tuple[Any, Any]:
    if not isinstance(config, HybridConfig):
        return decoder_specs.weight_specs(config, family.HF_NAMES), None
    has_module = config.mtp_layers and find("mtp.fc.weight", tensors) is not None
    return (
        qwen3_5.weight_specs(config, tensors),
        qwen3_5_mtp.mtp_specs(config, tensors) if has_module else None,
    )


def _counter(planned: Any, progress: Callable[[int, int], None]) -> Callable[[int], None]:
    weights: list[PlannedWeight] = jax.tree.leaves(planned)
    total, done = sum(math.prod(weight.spec.shape) for weight in weights), 0

    def loaded(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return loaded
