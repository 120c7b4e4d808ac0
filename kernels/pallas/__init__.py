"""Kernels through `pallas_call`, compiled by its Triton backend on GPUs and interpreted on a CPU.

They need no `triton` package.
"""

from jaxtyping import Array, Float32, Num

from jaxattn.kernels import tuning
from jaxattn.kernels._launches import refuse_capacity
from jaxattn.kernels.pallas.backend import refuse_backend
from jaxattn.kernels.triton.compat import refuse_architecture
from jaxattn.problem import AttentionProblem

# Pallas computes offsets in 32 bits within an array of up to 4 GiB, which wraps for elements of one byte.
_NARROW_BYTES, _NARROW_ELEMENTS = 2**32, 2**31


def refuse_device() -> str | None:
    """Return why no kernel can run here, or None."""
    architecture = tuning.device().architecture
    if architecture == "interpreter":
        return refuse_backend()
    return refuse_backend() or refuse_architecture(architecture)


def supports(problem: AttentionProblem) -> str | None:
    """Return why the problem cannot be computed here, or None."""
    if reason := refuse_device():
        return reason
    if tuning.device().architecture != "interpreter":
        for name in ("q", "k_cache", "v_cache"):
            array = getattr(problem, name)
            if array.size > _NARROW_ELEMENTS and array.size * array.dtype.itemsize <= _NARROW_BYTES:
                return (
                    f"{name}: {array.size} elements of one byte; Pallas computes 32-bit offsets in arrays of up to "
                    f"4 GiB, which hold no more than {_NARROW_ELEMENTS}; a larger or a smaller pool has no such limit"
                )
    return refuse_capacity(problem)


def run(problem: AttentionProblem) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Compute attention. Shapes and edge rules are those of `jaxattn.kernels`.

    Under `vmap` the mapped calls run one after the other.

    Raises:
        UnsupportedError: differentiated.
    """
    from jaxattn.kernels.pallas import attention

    return attention.run(problem)
