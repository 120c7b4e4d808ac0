"""Triton kernels: the main path on CUDA and ROCm, and the same source in Triton's interpreter on a CPU."""

import importlib.util

from jaxtyping import Array, Float32, Num

from jaxattn.kernels import tuning
from jaxattn.kernels._launches import refuse_capacity
from jaxattn.kernels.triton.compat import jax_triton_status, refuse_architecture
from jaxattn.problem import AttentionProblem


def refuse_device() -> str | None:
    """Return why no kernel can run here, or None."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install jaxattn[triton]"
    architecture = tuning.device().architecture
    if architecture == "interpreter":
        return None
    return refuse_architecture(architecture) or jax_triton_status()


def supports(problem: AttentionProblem) -> str | None:
    """Return why the problem cannot be computed here, or None."""
    return refuse_device() or refuse_capacity(problem)


def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention. Shapes and edge rules are those of `jaxattn.kernels`.

    Under `vmap` the mapped calls run one after the other.

    Raises:
        UnsupportedError: differentiated.
    """
    from jaxattn.kernels.triton import attention

    return attention.run(problem)
