"""Weights by the library's own names, whatever a checkpoint calls them."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from jaxtyping import Shaped

from jaxattn.errors import CheckpointError
from jaxattn.models.config import DecoderConfig


class TensorFile(Protocol):
    """Tensors by the names of the file: a `GGUFFile` or a `SafetensorsFolder`."""

    path: Any
    tensors: Mapping[str, Any]

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The tensor called `name`."""


Transform = Callable[[Shaped[np.ndarray, "..."], DecoderConfig], Shaped[np.ndarray, "..."]]


@dataclasses.dataclass(frozen=True)
class TensorNames:
    """How one family of checkpoints names its tensors.

    Attributes:
        model: the file's name of `embedding`, `final_norm` and `head`.
        layer: the file's name of each weight of a layer, with `{}` for the number of the layer.
        transforms: what turns a stored tensor into the library's form, by the library's name.
    """

    model: Mapping[str, str]
    layer: Mapping[str, str]
    transforms: Mapping[str, Transform] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class NamedTensors:
    """The tensors of `file` by the library's names: `embedding`, or `q` of layer 3.

    The linear weights are `[out, in]`, q and k in the half-split rotary order, and a norm's weight is what the
    normalised value is multiplied by.
    """

    file: TensorFile
    names: TensorNames
    config: DecoderConfig

    def has(self, name: str, layer: int | None = None) -> bool:
        """Whether the checkpoint has the weight."""
        return self._stored_name(name, layer) in self.file.tensors

    def read(self, name: str, shape: tuple[int, ...], layer: int | None = None) -> Shaped[np.ndarray, "..."]:
        """The weight, on the host.

        Raises:
            CheckpointError: it is missing or its shape is not `shape`; the message has the file's name of it.
        """
        stored_name = self._stored_name(name, layer)
        if stored_name not in self.file.tensors:
            raise CheckpointError(f"{self.file.path}: expected the tensor {stored_name}, which is missing")
        found = tuple(self.file.tensors[stored_name].shape)
        if found != shape:
            raise CheckpointError(
                f"{self.file.path}: tensor {stored_name}: expected shape {list(shape)}, found {list(found)}"
            )
        value = self.file.read(stored_name)
        transform = self.names.transforms.get(name)
        return value if transform is None else transform(value, self.config)

    def _stored_name(self, name: str, layer: int | None) -> str:
        return self.names.model[name] if layer is None else self.names.layer[name].format(layer)
