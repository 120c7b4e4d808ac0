"""Model: a decoder with its weights and tokeniser, loaded by name or path."""

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp

from jaxattn.errors import CheckpointError
from jaxattn.models import decoder
from jaxattn.models.checkpoint import NamedTensors, TensorFile, TensorNames
from jaxattn.models.config import DecoderConfig
from jaxattn.models.fetch import NAMED_MODELS, fetch
from jaxattn.models.gguf import GGUFFile
from jaxattn.models.safetensors import SafetensorsFolder
from jaxattn.models.tokenizer import TextCodec, codec_from_folder, codec_from_gguf

DEFAULT_MODEL = "smollm2-135m"
# The module that knows the configs and tensor names of a family, by `general.architecture` or `model_type`.
GGUF_FAMILIES = {"llama": "llama", "qwen2": "llama", "qwen3": "llama", "gemma3": "gemma3"}
HF_FAMILIES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "llama",
    "qwen3": "llama",
    "gemma3_text": "gemma3",
}


@dataclasses.dataclass(frozen=True)
class Program:
    """What a model computes, without its weights; hashable, so that a jitted step takes it as a static argument.

    Attributes:
        config: the model's own configuration.
        forward: `(config, weights, tokens, cache, metadata, **options) -> (hidden, cache)`.
        logits: `(weights, hidden) -> float32 logits`.
        allocate_cache: `(config, num_pages=, page_size=, dtype=, k_descale=, v_descale=) -> cache`.
    """

    config: Any
    forward: Callable = decoder.forward
    logits: Callable = decoder.logits
    allocate_cache: Callable = decoder.allocate_cache


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model. `codec` is None where the checkpoint has no tokeniser."""

    name: str
    program: Program
    weights: Any
    codec: TextCodec | None = None

    @property
    def dtype(self):
        """Dtype of the weights and of the computation."""
        return self.weights.embedding.dtype


def default_dtype():
    """Float32 on a CPU, where bfloat16 is slower, and bfloat16 elsewhere."""
    return jnp.dtype(jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16)


def locate(source: str | Path) -> Path:
    """Path of a model given by name or by path; a named model is fetched on first use.

    Raises:
        CheckpointError: there is neither such a name nor such a path, or fetching failed.
    """
    if str(source) in NAMED_MODELS:
        return fetch(NAMED_MODELS[str(source)])
    path = Path(source)
    if not path.exists():
        raise CheckpointError(
            f"{path}: no such file or folder, and not one of the models known by name: {', '.join(NAMED_MODELS)}"
        )
    return path


def load_model(
    source: str | Path, *, dtype=None, progress: Callable[[int, int], None] = lambda done, total: None
) -> Model:
    """Load a model by name (`NAMED_MODELS`), from a GGUF file or from a Hugging Face folder of safetensors.

    Args:
        source: name or path.
        dtype: of the matrices and of the computation; `default_dtype()` by default.
        progress: called with the weights read so far and the weights in all.

    Raises:
        CheckpointError: the model cannot be found or fetched, or its files are damaged or of an unknown kind.
    """
    path = locate(source)
    dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
    if path.is_dir():
        settings = _read_config(path)
        family = _family(settings.get("model_type"), HF_FAMILIES, f"{path / 'config.json'}: model_type")
        file: TensorFile = SafetensorsFolder(path)
        config, names = family.config_from_hf(settings), family.HF_NAMES
        codec = codec_from_folder(path, settings)
    else:
        file = GGUFFile(path)
        architecture = file.metadata.get("general.architecture")
        family = _family(architecture, GGUF_FAMILIES, f"{path}: general.architecture")
        config, names = family.config_from_gguf(file.metadata, file), family.gguf_names(architecture)
        codec = codec_from_gguf(file.metadata)
    return Model(
        name=str(source),
        program=Program(config),
        weights=_read_weights(config, file, names, dtype, progress),
        codec=codec,
    )


def _read_weights(config: DecoderConfig, file: TensorFile, names: TensorNames, dtype, progress):
    total = decoder.num_weights(config)
    done = 0

    def loaded(count: int) -> None:
        nonlocal done
        done += count
        progress(done, total)

    return decoder.load_weights(config, NamedTensors(file, names, config), dtype, loaded)


def _family(kind: str | None, families: dict[str, str], where: str) -> ModuleType:
    if kind not in families:
        raise CheckpointError(f"{where}: expected one of {', '.join(families)}, got {kind!r}")
    return importlib.import_module(f"jaxattn.models.{families[kind]}")


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    try:
        config = json.loads(path.read_text())
    except FileNotFoundError:
        raise CheckpointError(f"{folder}: expected a config.json beside the weights, found none") from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise CheckpointError(f"{path}: expected an object, got {type(config).__name__}")
    return config
