"""GGUF and safetensors files: what is read, and what is said of a damaged one."""

import json
import struct

import gguf
import ml_dtypes
import numpy as np
import pytest
import tiny_models
from gguf.quants import quantize

from jaxattn.errors import CheckpointError
from jaxattn.models.gguf import GGUFFile
from jaxattn.models.load import load_model
from jaxattn.models.safetensors import SafetensorsFolder


@pytest.fixture(scope="module")
def llama_gguf(tmp_path_factory):
    path = tmp_path_factory.mktemp("gguf") / "llama.gguf"
    tiny_models.write_llama_gguf(path)
    return path


def test_gguf_metadata_of_every_type(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    entries = {
        "u8": (writer.add_uint8, 200),
        "i8": (writer.add_int8, -100),
        "u16": (writer.add_uint16, 60000),
        "i16": (writer.add_int16, -30000),
        "u32": (writer.add_uint32, 4_000_000_000),
        "i32": (writer.add_int32, -2_000_000_000),
        "u64": (writer.add_uint64, 2**63 + 1),
        "i64": (writer.add_int64, -(2**62)),
        "f32": (writer.add_float32, 0.5),
        "f64": (writer.add_float64, 0.1),
        "yes": (writer.add_bool, True),
        "text": (writer.add_string, "naïve 語"),
        "texts": (writer.add_array, ["a", "語"]),
        "numbers": (writer.add_array, [1, -2, 3]),
    }
    for key, (add, value) in entries.items():
        add(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    assert GGUFFile(tmp_path / "a.gguf").metadata == {
        "general.architecture": "llama",
        **{key: value for key, (_, value) in entries.items()},
    }


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_gguf_tensors_are_dequantised(kind, tmp_path, monkeypatch):
    # Three rows at a time, so that pieces are put together.
    monkeypatch.setattr("jaxattn.models.gguf._ELEMENTS_PER_PIECE", 3 * 64)
    kind = gguf.GGMLQuantizationType[kind]
    values = np.random.default_rng(0).standard_normal((7, 64)).astype(np.float32)
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", quantize(values, kind), raw_dtype=kind)
    writer.add_tensor("one", np.arange(5, dtype=np.float32))
    _finish(writer)
    file = GGUFFile(tmp_path / "a.gguf")
    assert file.tensors["w"].shape == (7, 64)
    found = file.read("w")
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found, gguf.quants.dequantize(quantize(values, kind), kind).reshape(7, 64))
    assert np.abs(found - values).max() < 0.6
    np.testing.assert_array_equal(file.read("one"), np.arange(5))


def test_k_quants_are_dequantised_as_the_format_says(tmp_path):
    """One Q6_K block by its definition: value = d * scale * (q - 32), the quants 6 bits wide."""
    rng = np.random.default_rng(3)
    low, high = rng.integers(0, 256, 128, np.uint8), rng.integers(0, 256, 64, np.uint8)
    scales = rng.integers(-60, 60, 16, np.int8)
    block = np.concatenate([low, high, scales.view(np.uint8), np.array([0.25], np.float16).view(np.uint8)])
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "llama")
    writer.add_tensor("w", block[None], raw_dtype=gguf.GGMLQuantizationType.Q6_K)
    _finish(writer)
    expected = np.zeros(256)
    for half in range(2):
        for i in range(128):
            quarter, lane = divmod(i, 32)
            nibble = low[64 * half + lane + 32 * (quarter % 2)] >> (4 * (quarter // 2)) & 15
            top = high[32 * half + lane] >> (2 * quarter) & 3
            quant = int(nibble) + 16 * int(top) - 32
            expected[128 * half + i] = 0.25 * scales[8 * half + 2 * quarter + lane // 16] * quant
    np.testing.assert_allclose(GGUFFile(tmp_path / "a.gguf").read("w")[0], expected, rtol=1e-6)


def test_every_truncation_of_a_gguf_file_is_one_error(llama_gguf, tmp_path):
    data = llama_gguf.read_bytes()
    damaged = tmp_path / "damaged.gguf"
    for size in [0, 3, 4, 7, 20, 100, 1000, 5000, 9000, len(data) // 2, len(data) - 40]:
        damaged.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"damaged\.gguf"):
            GGUFFile(damaged)


def test_a_truncated_tensor_is_named(llama_gguf, tmp_path):
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(llama_gguf.read_bytes()[:-40])
    with pytest.raises(
        CheckpointError, match=r"tensor \S+ ends at byte \d+, but the file has \d+: .* truncated"
    ):
        GGUFFile(damaged)


def test_what_is_no_gguf_file_is_said(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("Dear diary")
    with pytest.raises(
        CheckpointError, match=r"notes\.txt: not a GGUF file: expected it to start with b'GGUF'"
    ):
        load_model(text)
    with pytest.raises(CheckpointError, match=r"no such file or folder, and not one of .*smollm2-135m"):
        load_model(tmp_path / "missing.gguf")
    big_endian = tmp_path / "big.gguf"
    big_endian.write_bytes(b"GGUF" + struct.pack(">IQQ", 3, 0, 0))
    with pytest.raises(CheckpointError, match="little-endian"):
        GGUFFile(big_endian)


def test_an_unknown_architecture_lists_the_known_ones(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "a.gguf", "rwkv7")
    _finish(writer)
    with pytest.raises(CheckpointError, match=r"general\.architecture: expected one of llama, .*'rwkv7'"):
        load_model(tmp_path / "a.gguf")
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(CheckpointError, match=r"model_type: expected one of llama, .*'bert'"):
        load_model(tmp_path)


def test_a_missing_or_misshapen_tensor_is_named(tmp_path):
    _write_safetensors(tmp_path, {"model.embed_tokens.weight": np.zeros((512, 64), np.float32)})
    (tmp_path / "config.json").write_text(json.dumps(tiny_models.config("llama_tiny")))
    with pytest.raises(
        CheckpointError, match=r"model\.embed_tokens\.weight: expected shape \[512, 128\], found \[512, 64\]"
    ):
        load_model(tmp_path)
    _write_safetensors(tmp_path, {"model.embed_tokens.weight": np.zeros((512, 128), np.float32)})
    with pytest.raises(CheckpointError, match=r"model\.layers\.0\.\S+, which is missing"):
        load_model(tmp_path)


def test_safetensors_of_every_width(tmp_path):
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.array([1.5, -2.0], ml_dtypes.bfloat16),
        "c": np.array([[0.5, 448.0]], ml_dtypes.float8_e4m3fn),
        "d": np.array([3, 250], np.uint8),
        "e": np.zeros((0, 4), np.float16),
        "f": np.array(7, np.int64),
    }
    _write_safetensors(tmp_path, tensors)
    folder = SafetensorsFolder(tmp_path)
    for name, value in tensors.items():
        found = folder.read(name)
        assert (found.dtype, found.shape) == (value.dtype, value.shape)
        np.testing.assert_array_equal(found, value)


def test_shards_are_found_through_the_index(tmp_path):
    _write_safetensors(tmp_path, {"a": np.ones(2, np.float32)}, "one.safetensors")
    _write_safetensors(tmp_path, {"b": np.zeros(3, np.float32)}, "two.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "two.safetensors"}}))
    assert SafetensorsFolder(tmp_path).read("b").tolist() == [0, 0, 0]
    index.write_text(json.dumps({"weight_map": {"a": "two.safetensors", "b": "two.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"the index places a in two\.safetensors, which lacks it"):
        SafetensorsFolder(tmp_path)
    index.write_text(json.dumps({"weight_map": {"a": "three.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"three\.safetensors: no such file"):
        SafetensorsFolder(tmp_path)
    index.write_text("{")
    with pytest.raises(CheckpointError, match="damaged index"):
        SafetensorsFolder(tmp_path)


def test_damaged_safetensors_are_one_error(tmp_path):
    path = tmp_path / "model.safetensors"
    with pytest.raises(CheckpointError, match=r"expected at least one \.safetensors file, found none"):
        SafetensorsFolder(tmp_path)
    _write_safetensors(tmp_path, {"a": np.ones(20, np.float32)})
    data = path.read_bytes()
    for size in (0, 5, 30, len(data) - 1):
        path.write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            SafetensorsFolder(tmp_path)
    path.write_bytes(data.replace(b'"F32"', b'"F33"'))
    with pytest.raises(CheckpointError, match="tensor a has the dtype F33; expected one of"):
        SafetensorsFolder(tmp_path)
    path.write_bytes(data.replace(b"[20]", b"[21]"))
    with pytest.raises(CheckpointError, match="needs 84 bytes, the header gives it 80"):
        SafetensorsFolder(tmp_path)


def _finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


_NAMES = {
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "uint8": "U8",
    "int64": "I64",
}


def _write_safetensors(folder, tensors, filename="model.safetensors"):
    header, offset = {}, 0
    for name, value in tensors.items():
        ends = [offset, offset + value.nbytes]
        header[name] = {"dtype": _NAMES[value.dtype.name], "shape": list(value.shape), "data_offsets": ends}
        offset = ends[1]
    text = json.dumps({"__metadata__": {"format": "pt"}, **header}).encode()
    body = b"".join(value.tobytes() for value in tensors.values())
    (folder / filename).write_bytes(struct.pack("<Q", len(text)) + text + body)
