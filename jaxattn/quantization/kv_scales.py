"""Scales of the KV cache that a checkpoint carries, which `PagedKVCache.allocate` takes as descales."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
from jaxtyping import Shaped

from jaxattn.errors import CheckpointError
from jaxattn.models.safetensors import StoredTensor
from jaxattn.quantization.exclude import spellings

# Quark's own mode names the output of the projection, its fp8 mode the cache.
K_NAMES = ("self_attn.k_proj.output_scale", "self_attn.k_scale")
V_NAMES = ("self_attn.v_proj.output_scale", "self_attn.v_scale")


def read_kv_scales(
    tensors: Mapping[str, StoredTensor],
    prefixes: Sequence[str],
    read: Callable[[StoredTensor], Shaped[np.ndarray, "..."]],
) -> tuple[list[float], list[float]] | None:
    """The value of a stored 1 in the keys and in the values of each layer; None where the checkpoint has no scales.

    Args:
        tensors: the headers of all shards.
        prefixes: what the tensors of each layer with a KV cache are called up to `self_attn`.
        read: reads a tensor.

    Raises:
        CheckpointError: some layers have scales and others have none, or a scale is not one positive number.
    """
    sides = (K_NAMES, V_NAMES)
    found = [[_find(tensors, prefix, names) for names in sides] for prefix in prefixes]
    if not any(name for pair in found for name in pair):
        return None

    def scale(layer: int, side: int) -> float:
        name = found[layer][side]
        if name is None:
            raise CheckpointError(
                f"expected the KV cache scale {prefixes[layer]}{sides[side][0]}, which is missing"
            )
        return _scalar(tensors[name], read)

    keys, values = ([scale(layer, side) for layer in range(len(prefixes))] for side in range(2))
    return keys, values


def _find(tensors: Mapping[str, StoredTensor], prefix: str, names: Sequence[str]) -> str | None:
    candidates = (spelling for name in names for spelling in spellings(prefix + name))
    return next((name for name in candidates if name in tensors), None)


def _scalar(tensor: StoredTensor, read: Callable[[StoredTensor], np.ndarray]) -> float:
    value = read(tensor).astype(np.float32)
    if value.size != 1 or not 0 < float(value.reshape(())) < np.inf:
        raise CheckpointError(
            f"{tensor.path}: tensor {tensor.name}: expected one positive scale, found {value.tolist()}"
        )
    return float(value.reshape(()))
