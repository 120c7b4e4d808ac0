"""GGUF files: the header, and tensors dequantised to float32.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. The header is parsed here because the reader of
the `gguf` package makes an array per string, which takes many seconds for a vocabulary of 262,144; block
formats and their dequantisation are the `gguf` package's.
"""

import dataclasses
import math
import mmap
import struct
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32

from jaxattn.errors import CheckpointError

MAGIC = b"GGUF"
_SUPPORTED_VERSIONS = (2, 3)
_DEFAULT_ALIGNMENT = 32
_STRING, _ARRAY = 8, 9
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
# Dequantising in pieces keeps the temporaries of a large embedding small.
_ELEMENTS_PER_PIECE = 1 << 22


@dataclasses.dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies in the file; `shape` is in row-major order, `[out, in]` for a linear weight."""

    name: str
    shape: tuple[int, ...]
    type: Any
    offset: int
    nbytes: int


class GGUFFile:
    """A GGUF file whose header has been read and whose tensors are read on demand.

    Raises:
        CheckpointError: the file is missing, is not a GGUF, or its header is damaged or promises more bytes
            than the file has.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        try:
            with self.path.open("rb") as file:
                self._bytes = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except FileNotFoundError:
            raise CheckpointError(f"{self.path}: no such file") from None
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{self.path}: cannot be read as a GGUF file: {error}") from None
        if self._bytes[:4] != MAGIC:
            raise CheckpointError(
                f"{self.path}: not a GGUF file: expected it to start with {MAGIC!r}, got {self._bytes[:4]!r}"
            )
        try:
            self.metadata, self.tensors = self._read_header()
        except (struct.error, UnicodeDecodeError, KeyError, ValueError, OverflowError, MemoryError) as error:
            if isinstance(error, CheckpointError):
                raise
            raise CheckpointError(f"{self.path}: damaged GGUF header: {error}") from None

    def read(self, name: str) -> Float32[np.ndarray, "..."]:
        """The tensor called `name`, dequantised to float32."""
        import gguf.quants

        info = self.tensors[name]
        raw = np.frombuffer(self._bytes, np.uint8, info.nbytes, info.offset)
        rows = raw.reshape(math.prod(info.shape[:-1]), -1)
        piece = max(1, _ELEMENTS_PER_PIECE // info.shape[-1])
        out = np.empty((rows.shape[0], info.shape[-1]), np.float32)
        for start in range(0, rows.shape[0], piece):
            block = rows[start : start + piece]
            try:
                out[start : start + piece] = gguf.quants.dequantize(block, info.type)
            except NotImplementedError:
                raise CheckpointError(
                    f"{self.path}: tensor {name} is {info.type.name}, which cannot be dequantised; "
                    "expected one of F32, F16, BF16, Q4_0 to Q8_0 or a K-quant"
                ) from None
        return out.reshape(info.shape)

    def _read_header(self) -> tuple[dict[str, Any], dict[str, TensorInfo]]:
        cursor = _Cursor(self._bytes, 4)
        version = cursor.scalar("I")
        if version not in _SUPPORTED_VERSIONS:
            raise CheckpointError(
                f"{self.path}: expected GGUF version 2 or 3 in little-endian order, got version {version}"
            )
        num_tensors, num_entries = cursor.scalar("Q"), cursor.scalar("Q")
        metadata = {}
        for _ in range(num_entries):
            key = cursor.string()
            metadata[key] = cursor.value(cursor.scalar("I"))
        heads = [_read_tensor_head(cursor) for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
        start = -(-cursor.offset // alignment) * alignment
        return metadata, {head[0]: self._locate(start, *head) for head in heads}

    def _locate(self, start: int, name: str, shape: tuple[int, ...], type_id: int, offset: int) -> TensorInfo:
        from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

        kind = GGMLQuantizationType(type_id)
        block_size, block_bytes = GGML_QUANT_SIZES[kind]
        if shape[-1] % block_size:
            raise CheckpointError(
                f"{self.path}: tensor {name}: expected rows of a multiple of {block_size} for {kind.name}, "
                f"got {shape[-1]}"
            )
        nbytes = math.prod(shape) // block_size * block_bytes
        if start + offset + nbytes > len(self._bytes):
            raise CheckpointError(
                f"{self.path}: tensor {name} ends at byte {start + offset + nbytes}, but the file has "
                f"{len(self._bytes)}: it is truncated; fetch it again"
            )
        return TensorInfo(name, shape, kind, start + offset, nbytes)


class _Cursor:
    """Reads little-endian values one after another."""

    def __init__(self, data: mmap.mmap, offset: int):
        self.data, self.offset = data, offset

    def scalar(self, code: str) -> Any:
        (value,) = struct.unpack_from("<" + code, self.data, self.offset)
        self.offset += struct.calcsize("<" + code)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        start, self.offset = self.offset, self.offset + length
        if self.offset > len(self.data):
            raise ValueError(f"a string of {length} bytes at {start} reaches past the end of the file")
        return self.data[start : self.offset].decode("utf-8")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            return self.scalar(_SCALARS[kind])
        kind, count = self.scalar("I"), self.scalar("Q")
        if kind in (_STRING, _ARRAY):
            return [self.value(kind) for _ in range(count)]
        code = f"<{count}{_SCALARS[kind]}"
        values = struct.unpack_from(code, self.data, self.offset)
        self.offset += struct.calcsize(code)
        return list(values)


def _read_tensor_head(cursor: _Cursor) -> tuple[str, tuple[int, ...], int, int]:
    name = cursor.string()
    dims = [cursor.scalar("Q") for _ in range(cursor.scalar("I"))]
    return name, tuple(reversed(dims)), cursor.scalar("I"), cursor.scalar("Q")
