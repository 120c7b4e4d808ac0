"""Checkpoints for tests: the committed ones, edited copies of them, and an independent dequantisation."""

import json
import shutil
import struct
from pathlib import Path

import jax
import ml_dtypes
import numpy as np

DATA = Path(__file__).parent / "data"
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
NUMPY = {
    "BF16": ml_dtypes.bfloat16,
    "F32": np.float32,
    "U8": np.uint8,
    "F8_E4M3": ml_dtypes.float8_e4m3fn,
    "F8_E8M0": ml_dtypes.float8_e8m0fnu,
}
NAMES = {np.dtype(dtype): name for name, dtype in NUMPY.items()}


def read_tensors(folder) -> dict[str, np.ndarray]:
    """All tensors of `model.safetensors`, straight from the format's definition."""
    blob = (Path(folder) / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", blob[:8])
    header, data = json.loads(blob[8 : 8 + length]), blob[8 + length :]
    header.pop("__metadata__", None)
    return {
        name: np.frombuffer(data[slice(*h["data_offsets"])], NUMPY[h["dtype"]]).reshape(h["shape"])
        for name, h in header.items()
    }


def write_tensors(path, tensors: dict[str, np.ndarray]) -> None:
    header, parts, offset = {}, [], 0
    for name, array in tensors.items():
        part = np.ascontiguousarray(array).tobytes()
        header[name] = {
            "dtype": NAMES[array.dtype],
            "shape": list(array.shape),
            "data_offsets": [offset, offset + len(part)],
        }
        parts.append(part)
        offset += len(part)
    text = json.dumps(header).encode()
    Path(path).write_bytes(struct.pack("<Q", len(text)) + text + b"".join(parts))


def edited(source: str, target: Path, edit=lambda tensors: None, config="config.json") -> Path:
    """A copy of a committed checkpoint whose tensors went through `edit`, with one of its configs."""
    target.mkdir(exist_ok=True)
    shutil.copyfile(DATA / source / config, target / "config.json")
    tensors = read_tensors(DATA / source)
    edit(tensors)
    write_tensors(target / "model.safetensors", tensors)
    return target


def dequantised(tensors: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A weight in float64, quantised or not, by table look-up."""
    value, scale = tensors[name], tensors.get(name + "_scale")
    if scale is None:
        return value.astype(np.float64)
    if value.dtype == np.uint8:
        codes = np.stack([value & 15, value >> 4], -1).reshape(*value.shape[:-1], -1)
        return (
            E2M1[codes] * np.repeat(2.0 ** (scale.astype(np.float64) - 127), 32, -1)[..., : codes.shape[-1]]
        )
    return value.astype(np.float64) * scale.astype(np.float64).reshape(-1, *[1] * (value.ndim - 1))


def packed(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """MXFP4 of a weight by search over the grid: codes to nearest, ties to the even code, and scale bytes."""
    groups = weight.astype(np.float64).reshape(*weight.shape[:-1], -1, 32)
    largest = np.abs(groups).max(-1)
    exponent = np.floor(np.log2(np.maximum(largest, 2.0**-126) * (8 / 7)))
    scale = np.clip(exponent - 2 + 127, 1, 254).astype(np.uint8)
    scaled = groups / 2.0 ** (scale.astype(np.float64) - 127)[..., None]
    gap = np.abs(np.abs(scaled)[..., None] - E2M1[:8])
    odd = np.arange(8) % 2
    codes = np.lexsort((np.broadcast_to(odd, gap.shape), gap), axis=-1)[..., 0].astype(np.uint8)
    codes = np.where((codes > 0) & (scaled < 0), codes | 8, codes).reshape(weight.shape)
    return codes[..., 0::2] | codes[..., 1::2] << 4, scale


def trees(model):
    """All weights of a loaded model."""
    return model.weights, model.mtp


def same(a, b):
    """Whether two trees hold the same weights in the same forms."""
    a, b = jax.device_get((a, b))
    assert jax.tree.structure(a) == jax.tree.structure(b)
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))
