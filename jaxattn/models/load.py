"""Model: a decoder with its weights and tokeniser, loaded by name or path."""

import dataclasses
import importlib
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
from jaxattn.models.config_file import read_config
from jaxattn.models.fetch import NAMED_MODELS, fetch
from jaxattn.models.folder import load_folder
from jaxattn.models.gguf import GGUFFile
from jaxattn.models.program import Program
from jaxattn.models.streaming import Sharding
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
    "qwen3_5": "qwen3_5",
    "qwen3_5_text": "qwen3_5",
    "qwen3_5_moe": "qwen3_5",
    "qwen3_5_moe_text": "qwen3_5",
    "qwen3_next": "qwen3_5",
}


@dataclasses.dataclass(frozen=True)
class Model:
    """A loaded model.

    Attributes:
        name: what it was loaded by.
        program: what it computes.
        weights: its weights.
        codec: its tokeniser, or None where the checkpoint has none.
        mtp: weights of its multi-token-prediction module, or None.
        kv_scales: value of a stored 1 in the keys and in the values of each cache layer, which a checkpoint with an
            8-bit KV cache brings along, or None.
    """

    name: str
    program: Program
    weights: Any
    codec: TextCodec | None = None
    mtp: Any = None
    kv_scales: tuple[list[float], list[float]] | None = None

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
    source: str | Path,
    *,
    dtype=None,
    quantization: str | None = None,
    emulate_activations: bool = False,
    sharding: Sharding | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Model:
    """Load a model by name (`NAMED_MODELS`), from a GGUF file or from a Hugging Face folder of safetensors.

    Args:
        source: name or path.
        dtype: of the matrices and of the computation; `default_dtype()` by default.
        quantization: a method of `jaxattn.quantization`; None for what config.json declares. Each tensor of the
            folder loads in the form that the file has it in. `fp8` and `mxfp4` quantise a folder that declares no
            method.
        emulate_activations: round the inputs of quantised layers as well, as the quantiser simulated them.
        sharding: chooses the sharding of each weight of a folder by its path and shape; None for one device.
        progress: called with the weights read so far and the weights in all.

    Raises:
        CheckpointError: the model cannot be found or fetched, or its files are damaged or of an unknown kind.
        ValueError: an unknown method, one that config.json contradicts, or an option that a GGUF file has not.
    """
    path = locate(source)
    dtype = default_dtype() if dtype is None else jnp.dtype(dtype)
    if not path.is_dir():
        given = {
            "quantization": quantization,
            "sharding": sharding,
            "emulate_activations": emulate_activations or None,
        }
        for option, value in given.items():
            if value is not None:
                raise ValueError(
                    f"{option}: expected a folder of safetensors with it, got the GGUF file {path}"
                )
        return _load_gguf(str(source), path, dtype, progress)
    settings = read_config(path)
    content = load_folder(
        path,
        settings,
        _family(settings.get("model_type"), HF_FAMILIES, f"{path / 'config.json'}: model_type"),
        dtype=dtype,
        quantization=quantization,
        emulate_activations=emulate_activations,
        sharding=sharding,
        progress=progress,
    )
    codec = codec_from_folder(path, settings)
    return Model(str(source), content.program, content.weights, codec, content.mtp, content.kv_scales)


def _load_gguf(name: str, path: Path, dtype, progress: Callable[[int, int], None]) -> Model:
    file = GGUFFile(path)
    architecture = file.metadata.get("general.architecture")
    family = _family(architecture, GGUF_FAMILIES, f"{path}: general.architecture")
    config, names = family.config_from_gguf(file.metadata, file), family.gguf_names(architecture)
    weights = _read_weights(config, file, names, dtype, progress)
    return Model(name, Program(config), weights, codec_from_gguf(file.metadata))


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
