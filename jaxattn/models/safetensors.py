"""Safetensors folders: the headers of every shard, and tensors read one at a time in their stored dtype.

Format: https://huggingface.co/docs/safetensors/index#format. The header is parsed here because the numpy front end
of the `safetensors` package knows neither bfloat16 nor float8.
"""

import dataclasses
import json
import math
import struct
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from jaxtyping import Shaped

from jaxattn.errors import CheckpointError

INDEX_NAME = "model.safetensors.index.json"
DTYPES: dict[str, np.dtype] = {
    name: np.dtype(dtype)
    for name, dtype in {
        "BOOL": np.bool_,
        "U8": np.uint8,
        "I8": np.int8,
        "I16": np.int16,
        "U16": np.uint16,
        "I32": np.int32,
        "U32": np.uint32,
        "I64": np.int64,
        "U64": np.uint64,
        "F16": np.float16,
        "F32": np.float32,
        "F64": np.float64,
        "BF16": ml_dtypes.bfloat16,
        "F8_E4M3": ml_dtypes.float8_e4m3fn,
        "F8_E5M2": ml_dtypes.float8_e5m2,
        "F8_E8M0": ml_dtypes.float8_e8m0fnu,
    }.items()
}


@dataclasses.dataclass(frozen=True)
class StoredTensor:
    """Where a tensor lies: its shard, and the bytes within it."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    path: Path
    offset: int
    nbytes: int


class SafetensorsFolder:
    """The tensors of all `.safetensors` shards in a folder; nothing but headers is read until `read`.

    With an index file, the shards are those that it lists, and each tensor must lie where it says.

    Raises:
        CheckpointError: no shard is there, one is missing or damaged, or the index and the shards disagree.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        index = self.path / INDEX_NAME
        placement = _read_index(index) if index.is_file() else None
        shards = (
            sorted({self.path / shard for shard in placement.values()})
            if placement is not None
            else sorted(self.path.glob("*.safetensors"))
        )
        if not shards:
            raise CheckpointError(f"{self.path}: expected at least one .safetensors file, found none")
        self.tensors: dict[str, StoredTensor] = {}
        for shard in shards:
            self.tensors |= read_header(shard)
        for name, shard_name in (placement or {}).items():
            if name not in self.tensors or self.tensors[name].path.name != shard_name:
                raise CheckpointError(f"{self.path}: the index places {name} in {shard_name}, which lacks it")

    def read(self, name: str) -> Shaped[np.ndarray, "..."]:
        """The tensor called `name`, mapped from the file in its stored dtype."""
        info = self.tensors[name]
        if info.nbytes == 0:
            return np.zeros(info.shape, info.dtype)
        raw = np.memmap(info.path, np.uint8, "r", info.offset, info.nbytes)
        return raw.view(info.dtype).reshape(info.shape)


def read_header(path: Path) -> dict[str, StoredTensor]:
    """The tensors that the shard at `path` declares, checked against the size of the file.

    Raises:
        CheckpointError: the shard is missing, is damaged or truncated, or has a tensor of an unknown dtype.
    """
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            if length > size:
                raise ValueError(f"it announces a header of {length} bytes, the file has {size}")
            header = json.loads(file.read(length))
        header.pop("__metadata__", None)
        tensors = {name: _locate(path, name, entry, 8 + length) for name, entry in header.items()}
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such file, though the checkpoint lists it") from None
    except (OSError, struct.error, ValueError, KeyError, TypeError, AttributeError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise CheckpointError(f"{path}: damaged safetensors header: {error}") from None
    for info in tensors.values():
        if info.offset + info.nbytes > size:
            raise CheckpointError(
                f"{path}: tensor {info.name} ends at byte {info.offset + info.nbytes}, but the file has {size}: "
                "it is truncated; fetch it again"
            )
    return tensors


def _locate(path: Path, name: str, entry: dict[str, Any], start: int) -> StoredTensor:
    if entry["dtype"] not in DTYPES:
        raise CheckpointError(
            f"{path}: tensor {name} has the dtype {entry['dtype']}; expected one of {list(DTYPES)}"
        )
    shape, dtype = tuple(entry["shape"]), DTYPES[entry["dtype"]]
    begin, end = entry["data_offsets"]
    if end - begin != math.prod(shape) * dtype.itemsize:
        raise CheckpointError(
            f"{path}: tensor {name} of shape {list(shape)} and dtype {entry['dtype']} needs "
            f"{math.prod(shape) * dtype.itemsize} bytes, the header gives it {end - begin}"
        )
    return StoredTensor(name, shape, dtype, path, start + begin, end - begin)


def _read_index(path: Path) -> dict[str, str]:
    try:
        return dict(json.loads(path.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: damaged index: {error}") from None
