"""Weights from a safetensors folder straight into device buffers, one tensor at a time.

A model declares its parameter tree as a tree of `WeightSpec`; `plan_weights` holds every one of them against the
headers, and only then does `load_tree` allocate and read.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float32, Shaped

from jaxattn.errors import CheckpointError
from jaxattn.models.safetensors import StoredTensor
from jaxattn.quantization import forms
from jaxattn.quantization.config import FP8, MXFP4, PLAIN, QuantizationConfig
from jaxattn.quantization.exclude import spellings
from jaxattn.quantization.fp8 import Fp8Weight
from jaxattn.quantization.mxfp4_tiles import Mxfp4Tiles, tiles_are_faster
from jaxattn.quantization.mxfp4_weight import Mxfp4Weight

# What is read at a time where only a part of each row is kept.
BLOCK_BYTES = 1 << 26
Rows = slice | tuple[int, ...]
# From the path of a weight in the tree and its logical shape, its sharding; a packed weight is sharded like the
# matrix that it stands for.
Sharding = Callable[[str, tuple[int, ...]], jax.sharding.Sharding | None]


@dataclasses.dataclass(frozen=True)
class Source:
    """A tensor of the file that fills a weight or one of its experts.

    Attributes:
        name: the tensor's name, up to wrapper prefixes.
        shape: the logical shape that the file must have it in.
        rows: which rows (axis -2, or the only axis) it contributes; all by default.
    """

    name: str
    shape: tuple[int, ...]
    rows: Rows | None = None


@dataclasses.dataclass(frozen=True)
class WeightSpec:
    """One weight of a parameter tree.

    Attributes:
        shape: logical shape in the tree.
        sources: the tensor that it is, or one tensor per entry of its first axis.
        dtype: of a plain weight; None for the dtype of the model.
        linear: whether it may be quantised.
        transform: what turns the stored tensor into the weight, on the host; for plain weights.
    """

    shape: tuple[int, ...]
    sources: tuple[Source, ...]
    dtype: Any = None
    linear: bool = False
    transform: Callable[[Shaped[np.ndarray, "..."]], Shaped[np.ndarray, "..."]] | None = None

    def __post_init__(self):
        if len(self.sources) > 1 and (self.transform or any(source.rows for source in self.sources)):
            raise ValueError(
                "sources: expected whole tensors where there are several, got rows or a transform"
            )


@dataclasses.dataclass(frozen=True)
class PlannedWeight:
    """A weight whose tensors were found: their form, and for each source the leaf of the file."""

    spec: WeightSpec
    form: str
    leaves: tuple[forms.Leaf, ...]


def plan_weights(specs: Any, tensors: Mapping[str, StoredTensor], config: QuantizationConfig) -> Any:
    """Find the tensors of every weight and decide its form, from the headers alone.

    Args:
        specs: a tree of `WeightSpec`.
        tensors: the headers of all shards.
        config: the quantisation config.

    Returns:
        The tree with a `PlannedWeight` in the place of each spec.

    Raises:
        CheckpointError: a tensor is missing, has another shape than the model, fits no form, has scales that do not
            fit it, is quantised where the model has no linear weight, or the tensors of one weight differ in form.
    """
    return jax.tree.map(lambda spec: _plan(spec, tensors, config), specs)


def find(name: str, tensors: Collection[str]) -> str | None:
    """The spelling of `name` that the file uses, with or without wrapper prefixes."""
    return next((spelling for spelling in (name, *spellings(name)) if spelling in tensors), None)


def _plan(spec: WeightSpec, tensors: Mapping[str, StoredTensor], config: QuantizationConfig) -> PlannedWeight:
    leaves = []
    for source in spec.sources:
        name = find(source.name, tensors)
        if name is None:
            folder = next(iter(tensors.values())).path.parent
            raise CheckpointError(f"{folder}: expected the tensor {source.name}, which is missing")
        leaf = forms.leaf(tensors, name, config)
        if leaf.shape != source.shape:
            raise CheckpointError(
                f"{tensors[name].path}: tensor {name}: expected shape {list(source.shape)}, found {list(leaf.shape)} "
                f"({leaf.why})"
            )
        if leaf.form != PLAIN and not spec.linear:
            raise CheckpointError(
                f"{tensors[name].path}: tensor {name}: expected floating point values without scales, found {leaf.why}"
            )
        leaves.append(leaf)
    for leaf in leaves[1:]:
        if leaf.form != leaves[0].form or (leaf.form != PLAIN and leaf.dtype != leaves[0].dtype):
            raise CheckpointError(
                f"expected the tensors of one weight in one form, found {leaves[0].name} in {leaves[0].form} "
                f"({leaves[0].why}) and {leaf.name} in {leaf.form} ({leaf.why}); they cannot be fused"
            )
    return PlannedWeight(spec, leaves[0].form, tuple(leaves))


def load_tree(
    planned: Any,
    tensors: Mapping[str, StoredTensor],
    *,
    dtype=jnp.bfloat16,
    sharding: Sharding | None = None,
    loaded: Callable[[int], None] = lambda count: None,
    emulate_activations: bool = False,
    on_load: QuantizationConfig | None = None,
) -> Any:
    """Read every planned weight into device buffers, one tensor at a time.

    The host holds at most one tensor, read from its shard into a buffer that serves all of them, and of a sharded
    weight one device's rows.

    Args:
        planned: what `plan_weights` returned.
        tensors: the headers that it was planned with.
        dtype: of the plain weights whose spec names none.
        sharding: chooses the sharding of each weight; None for the default device.
        loaded: called with the number of elements of each weight that is on the device.
        emulate_activations: round the inputs of quantised layers too, as the quantiser simulated them.
        on_load: quantise plain linear weights to the form that this config declares.

    Returns:
        The tree of arrays, `Mxfp4Weight` and `Fp8Weight`. Single MXFP4 matrices on one device become `Mxfp4Tiles`
        where its kernel is tuned for the device.
    """
    place, host = sharding or (lambda path, shape: None), HostBuffer()
    in_tiles = sharding is None and dtype == jnp.bfloat16 and tiles_are_faster()

    def load(path, weight: PlannedWeight):
        name = "/".join(
            str(getattr(key, "name", getattr(key, "idx", getattr(key, "key", key)))) for key in path
        )
        reader = _Reader(weight, tensors, place(name, weight.spec.shape), host)
        value = reader.read_as(weight.form, weight.spec.dtype or dtype, emulate_activations)
        form = _form_on_load(weight, on_load)
        if form is not None:
            value = (Mxfp4Weight if form == MXFP4 else Fp8Weight).from_array(value)
        if in_tiles and isinstance(value, Mxfp4Weight) and len(value.shape) == 2:
            value = Mxfp4Tiles.from_weight(value)
        loaded(math.prod(weight.spec.shape))
        return value

    return jax.tree_util.tree_map_with_path(load, planned)


def _form_on_load(weight: PlannedWeight, config: QuantizationConfig | None) -> str | None:
    if config is None or not config.on_load or not weight.spec.linear or weight.form != PLAIN:
        return None
    form = config.declared(forms.module_of(weight.leaves[0].name)).form
    return None if form == PLAIN else form


class HostBuffer:
    """One buffer that tensor after tensor is read into, so that the host holds the largest of them and no more.

    Arrays of their own would pile up: JAX gives up its hold on a host array some calls after it has copied it.
    """

    def __init__(self):
        self._bytes = np.empty(0, np.uint8)

    def view(self, shape: tuple[int, ...], dtype: np.dtype) -> Shaped[np.ndarray, "..."]:
        """An array over the buffer, which the next one overwrites."""
        size = math.prod(shape) * dtype.itemsize
        if self._bytes.size < size + 16:
            del self._bytes
            self._bytes = np.empty(size + 16, np.uint8)
        # On a CPU JAX takes an array at a multiple of 16 bytes over as it is instead of copying it.
        start = (8 - self._bytes.ctypes.data) % 16
        return self._bytes[start : start + size].view(dtype).reshape(shape)


def read_stored(
    tensor: StoredTensor, index: tuple[slice, ...] = (), host: HostBuffer | None = None
) -> Shaped[np.ndarray, "..."]:
    """Read a tensor, or a part of it, from its shard into host memory.

    Args:
        tensor: where it lies.
        index: a range of each leading axis, in steps of 1. Of the file only what the range of the first axis covers
            is read, and in blocks where the other ranges leave something out.
        host: what to read into; an array of its own by default.

    Raises:
        CheckpointError: the shard ends before the tensor does.
    """
    ranges = [range(*span.indices(size)) for span, size in zip(index, tensor.shape, strict=False)]
    shape = (*map(len, ranges), *tensor.shape[len(ranges) :])
    array = np.empty(shape, tensor.dtype) if host is None else host.view(shape, tensor.dtype)
    row_bytes = tensor.nbytes // max(1, tensor.shape[0]) if tensor.shape else tensor.nbytes
    first = ranges[0].start if ranges else 0
    with tensor.path.open("rb", buffering=0) as file:
        if shape[1:] == tensor.shape[1:]:
            file.seek(tensor.offset + first * row_bytes)
            _fill(array, file, tensor)
            return array
        rows = max(1, BLOCK_BYTES // row_bytes)
        for start in range(0, shape[0], rows):
            block = np.empty((min(rows, shape[0] - start), *tensor.shape[1:]), tensor.dtype)
            file.seek(tensor.offset + (first + start) * row_bytes)
            _fill(block, file, tensor)
            array[start : start + rows] = block[(slice(None), *index[1:])]
    return array


def _fill(array: Shaped[np.ndarray, "..."], file, tensor: StoredTensor) -> None:
    view, done = memoryview(array.reshape(-1).view(np.uint8)), 0
    while done < array.nbytes:
        count = file.readinto(view[done:])
        if not count:
            raise CheckpointError(f"{tensor.path}: truncated inside the tensor {tensor.name}; fetch it again")
        done += count


@dataclasses.dataclass(frozen=True)
class _Reader:
    """Reads the tensors of one weight."""

    weight: PlannedWeight
    tensors: Mapping[str, StoredTensor]
    sharding: jax.sharding.Sharding | None
    host: HostBuffer

    def read_as(self, form: str, dtype, emulate: bool) -> Array | Mxfp4Weight | Fp8Weight:
        if form == MXFP4:
            return self.mxfp4(emulate)
        return self.fp8(emulate) if form == FP8 else self.plain(dtype)

    def plain(self, dtype) -> Array:
        spec = self.weight.spec
        array = self._assemble([leaf.name for leaf in self.weight.leaves], spec.shape)
        return array if array.dtype == dtype else _convert(array, dtype=jnp.dtype(dtype).name)

    def mxfp4(self, emulate: bool) -> Mxfp4Weight:
        *batch, rows, columns = self.weight.spec.shape
        packed = self._assemble([leaf.name for leaf in self.weight.leaves], (*batch, rows, columns // 2))
        groups = self.tensors[self.weight.leaves[0].scale].shape[-1]
        scale = self._assemble([leaf.scale for leaf in self.weight.leaves], (*batch, rows, groups))
        if scale.dtype != jnp.uint8:
            scale = lax.bitcast_convert_type(scale, jnp.uint8)
        return Mxfp4Weight(packed, scale, rows, columns, quantize_input=emulate)

    def fp8(self, emulate: bool) -> Fp8Weight:
        rows = self.weight.spec.shape[-2]
        values = self._assemble([leaf.name for leaf in self.weight.leaves], self.weight.spec.shape)
        scales = [self._row_scales(leaf, source) for leaf, source in self._pairs()]
        per_row = any(scale.shape[-1] > 1 for scale in scales)
        scales = [np.broadcast_to(s, (*s.shape[:-1], rows if per_row else 1)) for s in scales]
        scale = jnp.asarray(np.stack(scales) if len(scales) > 1 else scales[0])
        if not emulate:
            return Fp8Weight(values, scale)
        return Fp8Weight(values, scale, self._input_scale())

    def _pairs(self):
        return zip(self.weight.leaves, self.weight.spec.sources, strict=True)

    def _row_scales(self, leaf: forms.Leaf, source: Source) -> np.ndarray:
        """The weight scale as float32 `[..., rows]` or `[..., 1]`."""
        batch, rows = leaf.shape[:-2], leaf.shape[-2]
        stored = self._small(leaf.scale)
        per_row = stored.size == rows * max(1, int(np.prod(batch))) and rows > 1
        scale = stored.reshape(*batch, rows if per_row else 1)
        return scale[..., _selector(source.rows)] if per_row and source.rows is not None else scale

    def _input_scale(self) -> Array | None:
        """The static input scale, one for each entry of the first axis where several tensors fill it."""
        names = [leaf.input_scale for leaf in self.weight.leaves]
        if not any(names):
            return None
        if not all(names):
            missing = self.weight.leaves[names.index(None)].name
            raise CheckpointError(
                f"expected an input_scale for each tensor of one weight, found none for {missing}"
            )
        scales = np.stack([self._small(name).reshape(()) for name in names])
        return jnp.asarray(scales if len(names) > 1 else scales[0])

    def _small(self, name: str) -> Float32[np.ndarray, "..."]:
        return read_stored(self.tensors[name]).astype(np.float32)

    def _assemble(self, names: list[str], shape: tuple[int, ...]) -> Array:
        """One device array of `shape` from the tensors `names`, one for each entry of its first axis or one in all."""
        rows, transform = self.weight.spec.sources[0].rows, self.weight.spec.transform
        if transform is not None:
            return jax.device_put(transform(read_stored(self.tensors[names[0]])), self.sharding)
        sharding = self.sharding or jax.device_put(0).sharding
        if rows is not None:
            return jax.device_put(_select(self._copy(names[0], (), None), rows), sharding)
        spans: dict[jax.Device, tuple[slice, ...]] = {
            device: tuple(slice(*span.indices(size)[:2]) for span, size in zip(index, shape, strict=True))
            for device, index in sharding.addressable_devices_indices_map(shape).items()
        }
        if len(names) == 1:
            parts = [self._copy(names[0], index, device) for device, index in spans.items()]
        else:
            parts = self._stack(names, spans)
        return jax.make_array_from_single_device_arrays(shape, sharding, parts)

    def _stack(self, names: list[str], spans: dict[jax.Device, tuple[slice, ...]]) -> list[Array]:
        """On each device its part of the stacked tensors, inserted one after another."""
        dtype, parts = self.tensors[names[0]].dtype, []
        for device, (entries, *index) in spans.items():
            buffer = jnp.zeros([span.stop - span.start for span in (entries, *index)], dtype, device=device)
            for i, name in enumerate(names[entries]):
                buffer = _insert(buffer, self._copy(name, tuple(index), device), np.int32(i))
            parts.append(buffer)
        return parts

    def _copy(self, name: str, index: tuple[slice, ...], device: jax.Device | None) -> Array:
        """The part of a tensor at `index`, on a device; the host buffer is free again."""
        return jax.device_put(read_stored(self.tensors[name], index, self.host), device).block_until_ready()


def _selector(rows: Rows) -> slice | np.ndarray:
    return rows if isinstance(rows, slice) else np.asarray(rows, np.int32)


def _select(array: Array, rows: Rows) -> Array:
    """Pick rows: of axis -2, or of the only axis."""
    index = _selector(rows)
    return array[index] if array.ndim == 1 else array[..., index, :]


@functools.partial(jax.jit, static_argnames="dtype")
def _convert(array: Array, dtype: str) -> Array:
    return array.astype(dtype)


@functools.partial(jax.jit, donate_argnums=0)
def _insert(buffer: Array, part: Array, index: Array) -> Array:
    return lax.dynamic_update_index_in_dim(buffer, part, index, 0)
