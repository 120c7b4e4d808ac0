"""Attention by the Pallas kernels."""

from jaxtyping import Array, Float32, Num

from jaxattn.kernels import _launches
from jaxattn.kernels.pallas.attention_kernel import attention_kernel
from jaxattn.kernels.pallas.launch import launch
from jaxattn.kernels.pallas.reduce_kernel import reduce_kernel
from jaxattn.plan import build_schedule
from jaxattn.problem import AttentionProblem


def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention by one or two launches, whose results share the output."""
    return _launches.run(problem, _BACKEND)


_BACKEND = _launches.Backend(
    attention_kernel=attention_kernel,
    reduce_kernel=reduce_kernel,
    launch=launch,
    build_schedule=build_schedule,
    unconverted=("float8_e4m3fnuz", "float8_e5m2fnuz"),
    specialise=lambda constants: constants,
)
