"""Attention by the Pallas kernels."""

import dataclasses
import inspect

import jax
from jaxtyping import Array, Float32, Num

from jaxattn.kernels import _launches, tuning
from jaxattn.kernels._constants import AttentionConstants
from jaxattn.kernels.pallas.attention_kernel import attention_kernel
from jaxattn.kernels.pallas.launch import launch
from jaxattn.kernels.pallas.reduce_kernel import reduce_kernel
from jaxattn.plan import build_schedule
from jaxattn.problem import AttentionProblem


def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention by one or two launches, whose results share the output."""
    return _launches.run(problem, _BACKEND)


def _specialise(constants: AttentionConstants) -> AttentionConstants:
    """Load single values on CDNA, where the code for pairs of them spills scalar registers in its loop."""
    if tuning.device().architecture.startswith("gfx"):
        return dataclasses.replace(constants, paired_values=False, v_unpack="")
    return constants


def _launch(kernel, inputs, outputs, *, C: AttentionConstants, **options) -> list[jax.Array]:
    """Launch with the 8-bit caches that the kernel reads in pairs handed over so."""
    paired = []
    if kernel is attention_kernel:
        names = list(inspect.signature(kernel).parameters)
        wanted = {"k_cache": bool(C.k_unpack), "v_cache": C.paired_values}
        paired = [names.index(name) for name, pairs in wanted.items() if pairs]
    return launch(kernel, inputs, outputs, paired=paired, C=C, **options)


_BACKEND = _launches.Backend(
    attention_kernel=attention_kernel,
    reduce_kernel=reduce_kernel,
    launch=_launch,
    build_schedule=build_schedule,
    unconverted=("float8_e4m3fnuz", "float8_e5m2fnuz"),
    specialise=_specialise,
)
