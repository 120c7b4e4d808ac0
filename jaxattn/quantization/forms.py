"""The form of each weight, decided leaf by leaf from the headers; the config is only compared with it.

A weight that comes with a `weight_scale` and a packed dtype is quantised, one that comes without is not. The
exclude list cannot decide: exporters leave tensors out of it that they did not quantise.
"""

import dataclasses
from collections.abc import Iterator, Mapping

from jaxattn.errors import CheckpointError
from jaxattn.models.safetensors import StoredTensor
from jaxattn.quantization.config import FP8, MXFP4, PLAIN, Declared, QuantizationConfig
from jaxattn.quantization.mxfp4 import GROUP_SIZE

FLOATS = ("bfloat16", "float16", "float32", "float64")
FP8_DTYPES = ("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2")
E8M0_DTYPES = ("uint8", "float8_e8m0fnu")
WEIGHT_SCALE, INPUT_SCALE = "_scale", "input_scale"
SCALE_SUFFIXES = (
    "weight_scale",
    "input_scale",
    "output_scale",
    "k_scale",
    "v_scale",
    "q_scale",
    "prob_scale",
)
SCALE = "scale"


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One tensor of a checkpoint and the form that it is in.

    Attributes:
        name: the tensor's name in the file.
        shape: logical shape; a packed row of 64 bytes counts as 128 columns.
        dtype: the file's dtype of the (packed) values.
        form: plain, fp8, mxfp4, or scale for the scales of activations and of the KV cache.
        why: what in the file decided, and what the config says.
        agrees: whether the config declares the same form.
        scale: name of the tensor with the weight's scales, or None.
        input_scale: name of the tensor with the static scale of the layer's input, or None.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    form: str
    why: str
    agrees: bool = True
    scale: str | None = None
    input_scale: str | None = None


def module_of(name: str) -> str:
    """The module that a tensor belongs to; a tensor that is not a `.weight` is its own."""
    return name.removesuffix(".weight")


def is_scale(name: str) -> bool:
    """Whether a tensor holds scales of another one."""
    return name.rsplit(".", 1)[-1] in SCALE_SUFFIXES


def leaves(tensors: Mapping[str, StoredTensor], config: QuantizationConfig) -> Iterator[Leaf]:
    """Every tensor of a checkpoint with its form, weight scales being part of their weight.

    Raises:
        CheckpointError: as `leaf`, or a weight scale has no weight.
    """
    for name, stored in tensors.items():
        if name.endswith("weight_scale"):
            weight = name.removesuffix(WEIGHT_SCALE)
            if weight not in tensors:
                raise CheckpointError(
                    f"{stored.path}: expected the tensor {weight} for {name}, found none of that name"
                )
        elif is_scale(name):
            yield Leaf(
                name, stored.shape, stored.dtype.name, SCALE, "scale of an activation or of the KV cache"
            )
        else:
            yield leaf(tensors, name, config)


def leaf(tensors: Mapping[str, StoredTensor], name: str, config: QuantizationConfig) -> Leaf:
    """The form of the tensor `name`.

    Raises:
        CheckpointError: it fits none of the forms, or its scales do not fit its shape.
    """
    stored, scale = tensors[name], tensors.get(name + WEIGHT_SCALE)
    if scale is None:
        return _plain(stored, tensors, config)
    input_scale = f"{module_of(name)}.{INPUT_SCALE}"
    if stored.dtype.name == "uint8" and scale.dtype.name in E8M0_DTYPES and stored.shape:
        shape, form = (*stored.shape[:-1], 2 * stored.shape[-1]), MXFP4
        expected = [(*stored.shape[:-1], -(-shape[-1] // GROUP_SIZE))]
        rule = f"one e8m0 byte per {GROUP_SIZE} of the {shape[-1]} columns"
    elif stored.dtype.name in FP8_DTYPES and scale.dtype.name in FLOATS and len(stored.shape) > 1:
        shape, form = stored.shape, FP8
        batch, rows = shape[:-2], shape[-2]
        expected = [batch, (*batch, 1), (*batch, rows), (*batch, rows, 1)]
        rule = f"one scale for the tensor or one for each of the {rows} rows"
    else:
        raise CheckpointError(
            f"{stored.path}: {name} fits no known form: expected uint8 values with e8m0 bytes (MXFP4), float8 values "
            f"with a floating point weight_scale (FP8) or floating point values without one, found {stored.dtype} "
            f"{list(stored.shape)} with a {scale.dtype} weight_scale {list(scale.shape)}"
        )
    if scale.shape not in expected:
        raise CheckpointError(
            f"{scale.path}: {scale.name}: expected shape {' or '.join(str(list(e)) for e in expected)}, {rule} of "
            f"{name}, found {list(scale.shape)}"
        )
    declared = config.declared(module_of(name))
    found = f"{stored.dtype} with {scale.dtype} weight_scale"
    why = f"{found}; {declared.why}" if declared.form == form else f"{found}, though {_says(declared)}"
    return Leaf(
        name,
        shape,
        stored.dtype.name,
        form,
        why,
        agrees=declared.form == form,
        scale=scale.name,
        input_scale=input_scale if input_scale in tensors else None,
    )


def _plain(stored: StoredTensor, tensors: Mapping[str, StoredTensor], config: QuantizationConfig) -> Leaf:
    name = stored.name
    if name.endswith(".weight") and stored.dtype.name not in FLOATS:
        blocks = f"{name}_scale_inv"
        hint = "; scales of blocks (weight_scale_inv) are not supported" if blocks in tensors else ""
        raise CheckpointError(
            f"{stored.path}: {name} fits no known form: expected floating point values ({', '.join(FLOATS)}) or a "
            f"{name}_scale beside it, found {stored.dtype} {list(stored.shape)} without one{hint}"
        )
    if not _is_linear(name, stored.shape):
        return Leaf(name, stored.shape, stored.dtype.name, PLAIN, f"{stored.dtype}; not a linear weight")
    declared = config.declared(module_of(name))
    found = f"{stored.dtype} without weight_scale"
    if declared.form == PLAIN or config.on_load:
        return Leaf(name, stored.shape, stored.dtype.name, PLAIN, f"{found}; {declared.why}")
    return Leaf(
        name, stored.shape, stored.dtype.name, PLAIN, f"{found}, though {_says(declared)}", agrees=False
    )


def _says(declared: Declared) -> str:
    return declared.why if declared.form == PLAIN else f"{declared.why} declares {declared.form}"


def _is_linear(name: str, shape: tuple[int, ...]) -> bool:
    last = module_of(name).rsplit(".", 1)[-1]
    if not name.endswith(".weight"):
        return last.endswith("_proj") and len(shape) == 3
    return len(shape) == 2 and "embed" not in last
