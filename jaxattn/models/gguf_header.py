"""What the headers of all GGUF decoders have in common, read as the fields of a `DecoderConfig`."""

import dataclasses
from typing import Any

from jaxattn.errors import CheckpointError
from jaxattn.models.checkpoint import TensorFile
from jaxattn.models.config import linear_divisors, required

_REQUIRED = object()


@dataclasses.dataclass(frozen=True)
class GGUFHeader:
    """The metadata of `file`, read by keys without the prefix of the architecture."""

    metadata: dict[str, Any]
    file: TensorFile

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return required(self.metadata, "general.architecture", str(self.file.path))

    def get(self, key: str, default: Any = _REQUIRED) -> Any:
        """The value of `{architecture}.{key}`, or `default`.

        Raises:
            CheckpointError: the key is missing and there is no default, or it has a value per layer.
        """
        key = f"{self.architecture}.{key}"
        if default is not _REQUIRED and key not in self.metadata:
            return default
        value = required(self.metadata, key, str(self.file.path))
        if isinstance(value, list):
            raise CheckpointError(
                f"{self.file.path}: {key}: expected one value for all layers, got {len(value)}"
            )
        return value

    def head_dim(self) -> int:
        """Width of a head, of keys, values and their rotation alike.

        Raises:
            CheckpointError: these widths differ.
        """
        keys = self.get(
            "attention.key_length", self.get("embedding_length") // self.get("attention.head_count")
        )
        others = {name: self.get(name, keys) for name in ("attention.value_length", "rope.dimension_count")}
        for name, width in others.items():
            if width != keys:
                raise CheckpointError(f"{self.file.path}: {name}: expected the key width {keys}, got {width}")
        return keys

    def rope_divisors(self, width: int) -> tuple[float, ...]:
        """Divisors of the rotary angles, from `rope_freqs.weight` or from linear scaling; empty without scaling.

        Raises:
            CheckpointError: the scaling is of another kind.
        """
        if "rope_freqs.weight" in self.file.tensors:
            return tuple(self.file.read("rope_freqs.weight").tolist())
        kind = self.get("rope.scaling.type", "none")
        if kind == "linear":
            return linear_divisors(width, self.get("rope.scaling.factor"))
        if kind != "none":
            raise CheckpointError(f"{self.file.path}: rope scaling: expected none or linear, got {kind!r}")
        return ()

    def sizes(self) -> dict[str, Any]:
        """The fields of `DecoderConfig` that mean the same in every architecture."""
        embedding = self.file.tensors.get("token_embd.weight")
        if embedding is None:
            raise CheckpointError(
                f"{self.file.path}: expected the tensor token_embd.weight, which is missing"
            )
        heads = self.get("attention.head_count")
        return {
            "architecture": self.architecture,
            "vocab_size": embedding.shape[0],
            "hidden_size": self.get("embedding_length"),
            "intermediate_size": self.get("feed_forward_length"),
            "num_heads": heads,
            "num_kv_heads": self.get("attention.head_count_kv", heads),
            "head_dim": self.head_dim(),
            "rms_norm_eps": self.get("attention.layer_norm_rms_epsilon"),
            "context_length": self.get("context_length"),
            "tied_head": "output.weight" not in self.file.tensors,
        }
