"""Attention by the Triton kernels."""

import dataclasses

import triton.language as tl
from jaxtyping import Array, Float32, Num

from jaxattn.kernels import _launches
from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.triton.attention_kernel import attention_kernel
from jaxattn.kernels.triton.launch import launch
from jaxattn.kernels.triton.plan import build_schedule
from jaxattn.kernels.triton.reduce_kernel import reduce_kernel
from jaxattn.problem import AttentionProblem

_FLOATS = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
_BYTES = {
    "float8_e4m3fn": tl.float8e4nv,
    "float8_e4m3fnuz": tl.float8e4b8,
    "float8_e5m2": tl.float8e5,
    "float8_e5m2fnuz": tl.float8e5b16,
    "int8": tl.int8,
}


def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention by one or two launches, whose results share the output."""
    return _launches.run(problem, _BACKEND)


def _specialise(constants: AttentionConstants) -> AttentionConstants:
    """Put Triton's dtypes in place of names."""
    return dataclasses.replace(
        constants,
        compute=_FLOATS[constants.compute],
        v_dtype=_BYTES.get(constants.v_dtype),
        out_dtype=_FLOATS.get(constants.out_dtype, tl.float32),
    )


_BACKEND = _launches.Backend(
    attention_kernel=attention_kernel,
    reduce_kernel=reduce_kernel,
    launch=launch,
    build_schedule=build_schedule,
    takes_turns=True,
    specialise=_specialise,
)
