"""What JAX's transformations do with a kernel launch."""

from collections.abc import Callable

import jax

from jaxattn.errors import UnsupportedError


def sealed(launch: Callable, implementation: str) -> Callable:
    """Return `launch` so that `vmap` runs it for one element of the mapped axis after the other.

    Args:
        launch: takes and returns arrays.
        implementation: what the refusal calls it.

    Raises:
        UnsupportedError: differentiated (the returned function).
    """

    @jax.custom_jvp
    def run(*operands):
        return jax.custom_batching.sequential_vmap(launch)(*operands)

    @run.defjvp
    def _refuse(primals, tangents):
        raise UnsupportedError(
            f"implementation={implementation!r} has no derivative; differentiate implementation='reference', "
            "which is dense"
        )

    return run
