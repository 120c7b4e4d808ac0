"""Triton kernels: the main path on CUDA and ROCm, and the same source in Triton's interpreter on a CPU."""

import importlib.util

from jaxtyping import Array, Float32, Num

from jaxattn.kernels import tuning
from jaxattn.kernels.triton.compat import jax_triton_status, refuse_architecture
from jaxattn.problem import AttentionProblem

# Positions within a sequence are 32-bit in the kernels.
_LARGEST_CAPACITY = 2**31 - 2**16


def supports(problem: AttentionProblem) -> str | None:
    """Return why the problem cannot be computed here, or None."""
    architecture = tuning.device().architecture
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed; install jaxattn[triton]"
    if architecture != "interpreter":
        reason = refuse_architecture(architecture) or jax_triton_status()
        if reason is not None:
            return reason
    capacity = problem.page_table.shape[1] * problem.page_size
    if capacity > _LARGEST_CAPACITY:
        return (
            f"page_table: rows of {capacity} keys; the kernels count the keys of one sequence in 32 bits, "
            f"up to {_LARGEST_CAPACITY}"
        )
    return None


def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention. Shapes and edge rules are those of `jaxattn.kernels`.

    Under `vmap` the mapped calls run one after the other.

    Raises:
        UnsupportedError: differentiated.
    """
    from jaxattn.kernels.triton import attention

    return attention.run(problem)
