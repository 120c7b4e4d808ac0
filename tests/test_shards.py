"""Shards into device buffers: damaged files, host memory, sharding, progress."""

import dataclasses
import json
import tracemalloc

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from checkpoints import DATA, edited, read_tensors, same, trees, write_tensors

from jaxattn.errors import CheckpointError
from jaxattn.models import streaming
from jaxattn.models.load import load_model
from jaxattn.models.safetensors import SafetensorsFolder
from jaxattn.models.streaming import Source, WeightSpec, load_tree, plan_weights
from jaxattn.quantization import Mxfp4Weight, QuantizationConfig

MIXED, MOE = "quark_mxfp4_qwen3_5_mtp", "quark_f2f_mxfp4_qwen3_5_moe_mtp"
PLAIN = QuantizationConfig()


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda t: t.pop("mtp.norm.weight"), r"expected the tensor mtp\.norm\.weight, which is missing"),
        (lambda t: (t.pop(UP), t.pop(f"{UP}_scale")), rf"expected the tensor {UP}, which is missing"),
        (
            lambda t: t.update({f"{UP}_scale": t[f"{UP}_scale"][:, :3]}),
            rf"{UP}_scale: expected shape \[256, 4\]",
        ),
        (
            lambda t: t.update({UP: t[UP][:, :32], f"{UP}_scale": t[f"{UP}_scale"][:, :2]}),
            rf"{UP}: expected shape \[256, 128\], found \[256, 64\]",
        ),
    ],
)
def test_damaged_checkpoints_are_refused_by_name_before_anything_is_read(tmp_path, monkeypatch, edit, text):
    monkeypatch.setattr(streaming, "read_stored", None)
    with pytest.raises(CheckpointError, match=text):
        load_model(edited(MIXED, tmp_path, edit))


def split(folder):
    """The checkpoint in two shards with an index."""
    tensors = read_tensors(folder)
    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, held in shards.items():
        write_tensors(folder / shard, {name: tensors[name] for name in held})
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {name: shard for shard, held in shards.items() for name in held}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return folder


def test_shards_are_all_checked_before_any_is_read(tmp_path, monkeypatch):
    folder = split(edited(MIXED, tmp_path))
    assert same(trees(load_model(folder)), trees(load_model(DATA / MIXED)))
    size = (folder / "b.safetensors").stat().st_size
    with (folder / "b.safetensors").open("r+b") as file:
        file.truncate(size - 100)
    monkeypatch.setattr(streaming, "read_stored", None)
    with pytest.raises(CheckpointError, match=r"b\.safetensors: tensor [\w.]+ ends at byte .* truncated"):
        load_model(folder)
    (folder / "b.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"b\.safetensors"):
        load_model(folder)


def test_a_shard_that_shrinks_while_it_is_read_is_an_error(tmp_path):
    write_tensors(tmp_path / "model.safetensors", {"w": np.ones((4, 4), np.float32)})
    tensor = SafetensorsFolder(tmp_path).tensors["w"]
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(tensor.offset + 8)
    with pytest.raises(CheckpointError, match="truncated inside the tensor w"):
        streaming.read_stored(tensor)


def spec(name, *shape, **options):
    return WeightSpec(shape, (Source(name, shape),), **options)


@pytest.mark.parametrize("experts", [False, True])
def test_the_host_never_holds_more_than_one_tensor(tmp_path, experts):
    count, shape = 24, (1024, 1024)
    tensors = {f"{i}.weight": np.full(shape, i, ml_dtypes.bfloat16) for i in range(count)}
    write_tensors(tmp_path / "model.safetensors", tensors)
    largest = next(iter(tensors.values())).nbytes
    del tensors
    specs = [spec(f"{i}.weight", *shape) for i in range(count)]
    if experts:
        sources = tuple(source for one in specs for source in one.sources)
        specs = [WeightSpec((count, *shape), sources)]
    files = SafetensorsFolder(tmp_path).tensors
    planned = plan_weights(specs, files, PLAIN)
    # To another dtype, so that no device array is a host buffer taken over as it is.
    tracemalloc.start()
    loaded = load_tree(planned, files, dtype=jnp.float32)
    jax.block_until_ready(loaded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert largest <= peak < 1.5 * largest
    values = loaded[0] if experts else jnp.stack(loaded)
    assert (values[:, 0, 0] == jnp.arange(count)).all()


def test_each_device_gets_its_rows_and_only_those_are_read(monkeypatch):
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])

    def sharding(path, shape):
        rows_split = jax.sharding.PartitionSpec(*[None] * (len(shape) - 2), "x", None)
        return jax.sharding.NamedSharding(
            mesh, rows_split if len(shape) > 1 and shape[-2] % 2 == 0 else jax.sharding.PartitionSpec()
        )

    reads = []
    read = streaming.read_stored
    monkeypatch.setattr(streaming, "read_stored", lambda *args: reads.append((*args, ())[:2]) or read(*args))
    model = load_model(DATA / MOE, sharding=sharding)
    assert same(trees(model), trees(load_model(DATA / MOE)))
    gate = model.weights.layers[0].mlp.experts.gate
    assert gate.packed.sharding.spec == jax.sharding.PartitionSpec(None, "x", None)
    assert {shard.data.shape for shard in gate.packed.addressable_shards} == {(4, 16, 32)}
    assert {shard.data.shape for shard in gate.scale.addressable_shards} == {(4, 16, 2)}
    assert [shard.data.shape for shard in model.weights.head.addressable_shards] == [(128, 64)] * 2
    parts = [index[0] for tensor, index in reads if tensor.name == "lm_head.weight" and index]
    assert parts == [slice(0, 128), slice(128, 256), slice(0, 256)]


@pytest.mark.parametrize(("axis", "block"), [(0, 1 << 26), (1, 1 << 26), (1, 300), (2, 300)])
def test_any_axis_of_a_stored_tensor_may_be_split(tmp_path, monkeypatch, axis, block):
    monkeypatch.setattr(streaming, "BLOCK_BYTES", block)
    value = np.arange(4 * 6 * 8, dtype=np.float32).reshape(4, 6, 8)
    write_tensors(tmp_path / "model.safetensors", {"w": value, "0": value[0], "1": value[1]})
    files = SafetensorsFolder(tmp_path).tensors
    mesh = jax.make_mesh((2,), ("x",), devices=jax.devices()[:2])
    spec_of = [None] * 3
    spec_of[axis] = "x"
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec_of))
    stacked = WeightSpec((2, 6, 8), (Source("0", (6, 8)), Source("1", (6, 8))))
    planned = plan_weights([spec("w", 4, 6, 8), stacked], files, PLAIN)
    whole, stack = load_tree(planned, files, dtype=jnp.float32, sharding=lambda path, shape: sharding)
    assert whole.sharding == stack.sharding == sharding
    assert (np.asarray(whole) == value).all()
    assert (np.asarray(stack) == value[:2]).all()


def test_progress_counts_every_weight_once():
    seen = []
    model = load_model(DATA / MIXED, progress=lambda done, total: seen.append((done, total)))
    assert seen[-1][0] == seen[-1][1]
    assert len({total for _, total in seen}) == 1
    assert [done for done, _ in seen] == sorted({done for done, _ in seen})
    logical = jax.tree.leaves(model.weights, is_leaf=lambda w: isinstance(w, Mxfp4Weight))
    logical += jax.tree.leaves(model.mtp.module)
    assert seen[-1][1] == sum(int(np.prod(w.shape)) for w in logical)


def test_specs_are_data_that_compare():
    assert spec("a", 2, 2) == spec("a", 2, 2)
    assert dataclasses.replace(spec("a", 2, 2), linear=True) != spec("a", 2, 2)
