"""Safetensors checkpoints read header first: nothing but headers until a tensor is asked for by name.

Format: an 8-byte little-endian header length, a JSON header (name -> dtype, shape, data_offsets), the data.
https://github.com/huggingface/safetensors#format
"""

import dataclasses
import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import ml_dtypes
import numpy as np

from jaxattn.errors import CheckpointError

DTYPES: Mapping[str, np.dtype] = MappingProxyType(
    {
        name: np.dtype(dtype)
        for name, dtype in {
            "BOOL": np.bool_,
            "U8": np.uint8,
            "I8": np.int8,
            "U16": np.uint16,
            "I16": np.int16,
            "U32": np.uint32,
            "I32": np.int32,
            "U64": np.uint64,
            "I64": np.int64,
            "F16": np.float16,
            "BF16": ml_dtypes.bfloat16,
            "F32": np.float32,
            "F64": np.float64,
            "F8_E4M3": ml_dtypes.float8_e4m3fn,
            "F8_E4M3FNUZ": ml_dtypes.float8_e4m3fnuz,
            "F8_E5M2": ml_dtypes.float8_e5m2,
        }.items()
    }
)
# The limit of the reference implementation; a larger length is a damaged file.
MAX_HEADER_BYTES = 100_000_000
INDEX_SUFFIX = ".safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one tensor lies: its shard and the byte range there.

    `dtype` is the name that the header uses (`DTYPES` maps it), `begin` and `end` count from the start of the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    shard: Path
    begin: int
    end: int

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype of the array that `read` returns."""
        return DTYPES[self.dtype]

    def read(self, index: tuple[slice, ...] = ()) -> np.ndarray:
        """Read the tensor, or the part of it at `index`, into host memory.

        Args:
            index: one slice per leading axis, step 1. Only the rows of the first axis that it names are read.

        Raises:
            CheckpointError: the shard ends before the tensor does.
        """
        dtype = self.numpy_dtype
        rows = slice(None)
        if self.shape and index:
            rows = slice(*index[0].indices(self.shape[0]))
        shape, offset = self.shape, 0
        if rows != slice(None):
            row_bytes = math.prod(self.shape[1:]) * dtype.itemsize
            shape, offset = (rows.stop - rows.start, *self.shape[1:]), rows.start * row_bytes
        buffer = np.empty(math.prod(shape) * dtype.itemsize, np.uint8)
        with self.shard.open("rb", buffering=0) as file:
            file.seek(self.begin + offset)
            view, done = memoryview(buffer), 0
            while done < buffer.size:
                count = file.readinto(view[done:])
                if not count:
                    raise _truncated(self, os.path.getsize(self.shard))
                done += count
        array = buffer.view(dtype).reshape(shape)
        return array[(slice(None), *index[1:])] if len(index) > 1 else array


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """The tensors of a checkpoint folder by name; opening it reads the header of every shard and no data."""

    path: Path
    entries: Mapping[str, TensorEntry]

    def __contains__(self, name: str) -> bool:
        return name in self.entries

    def __getitem__(self, name: str) -> TensorEntry:
        """The entry of a tensor.

        Raises:
            CheckpointError: there is none of that name.
        """
        if name not in self.entries:
            near = [other for other in self.entries if other.rsplit(".", 2)[-2:] == name.rsplit(".", 2)[-2:]]
            hint = f"; of that kind it has {', '.join(sorted(near)[:3])}" if near else ""
            raise CheckpointError(f"{self.path}: expected the tensor {name}, found none of that name{hint}")
        return self.entries[name]

    @property
    def largest_tensor_bytes(self) -> int:
        """Bytes of the largest tensor, the host memory that loading one by one needs."""
        return max((entry.end - entry.begin for entry in self.entries.values()), default=0)


def open_checkpoint(path: str | os.PathLike) -> Checkpoint:
    """Read the headers of a checkpoint.

    Args:
        path: a `.safetensors` file, or a folder with one, with several, or with an index
            (`*.safetensors.index.json`) that names its shards.

    Raises:
        CheckpointError: a shard is missing, truncated or not safetensors, an index and its shards disagree,
            or two shards hold a tensor of the same name.
    """
    path = Path(path)
    shards, declared = _shards(path)
    entries: dict[str, TensorEntry] = {}
    for shard in shards:
        for name, entry in read_header(shard).items():
            if name in entries:
                raise CheckpointError(
                    f"{shard}: the tensor {name} is also in {entries[name].shard.name}; remove one"
                )
            entries[name] = entry
    for name, shard_name in declared.items():
        if name not in entries or entries[name].shard.name != shard_name:
            raise CheckpointError(
                f"{path}: the index puts the tensor {name} in {shard_name}, which does not hold it"
            )
    return Checkpoint(path, MappingProxyType(entries))


def read_header(shard: Path) -> dict[str, TensorEntry]:
    """Read and check the header of one shard.

    Raises:
        CheckpointError: the file is missing, is not safetensors, or is shorter than its header says.
    """
    if not shard.is_file():
        raise CheckpointError(f"{shard}: expected a safetensors file, found none; download the missing shard")
    size = shard.stat().st_size
    with shard.open("rb") as file:
        prefix = file.read(8)
        length = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else 0
        if not 2 <= length <= MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{shard}: expected a safetensors header length, found the bytes {prefix.hex()!r}"
            )
        text = file.read(length)
    if len(text) < length:
        raise CheckpointError(
            f"{shard}: truncated inside its header ({size} of {8 + length} bytes); download it again"
        )
    try:
        header = json.loads(text)
    except ValueError as error:
        raise CheckpointError(f"{shard}: expected a JSON header: {error}") from error
    entries = {}
    for name, fields in header.items():
        if name != "__metadata__":
            entries[name] = _entry(name, fields, shard, 8 + length)
    for entry in entries.values():
        if entry.end > size:
            raise _truncated(entry, size)
    return entries


def _entry(name: str, fields: dict, shard: Path, data_start: int) -> TensorEntry:
    try:
        dtype, shape = fields["dtype"], tuple(int(extent) for extent in fields["shape"])
        begin, end = (int(offset) for offset in fields["data_offsets"])
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(
            f"{shard}: tensor {name}: expected dtype, shape and data_offsets, got {fields}"
        ) from error
    if dtype not in DTYPES:
        raise CheckpointError(
            f"{shard}: tensor {name}: expected one of {', '.join(DTYPES)}, got the dtype {dtype}"
        )
    expected = math.prod(shape) * DTYPES[dtype].itemsize
    if begin < 0 or end - begin != expected:
        raise CheckpointError(
            f"{shard}: tensor {name}: expected {expected} bytes for {dtype} {list(shape)}, got {end - begin}"
        )
    return TensorEntry(name, dtype, shape, shard, data_start + begin, data_start + end)


def _truncated(entry: TensorEntry, size: int) -> CheckpointError:
    return CheckpointError(
        f"{entry.shard}: truncated: the tensor {entry.name} ends at byte {entry.end}, the file at {size}; "
        "download the shard again"
    )


def _shards(path: Path) -> tuple[list[Path], dict[str, str]]:
    if path.is_file():
        return [path], {}
    indices = sorted(path.glob(f"*{INDEX_SUFFIX}"))
    if indices:
        try:
            declared = json.loads(indices[0].read_text())["weight_map"]
        except (ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{indices[0]}: expected a JSON object with a weight_map: {error}"
            ) from error
        return [path / name for name in sorted(set(declared.values()))], declared
    shards = sorted(path.glob("*.safetensors"))
    if not shards:
        raise CheckpointError(f"{path}: expected *.safetensors or *{INDEX_SUFFIX}, found neither")
    return shards, {}
