"""Kernel modules, imported as `jaxattn.kernels`.

A kernel module exports `supports(problem) -> str | None`, the reason why it cannot compute the
problem or None, and `run(problem) -> (out, lse)`. `problem` is a `jaxattn.problem.AttentionProblem`
whose indices are int64; `run` is called inside the x64 scope, so floats in it carry explicit dtypes.
`out` is `[T, H, Dv]` in `problem.out_dtype`, `lse` is `[T, H]` in float32; a row that sees no key, and a
row of the token buffer that belongs to no sequence, has `out = 0` and `lse = -inf`. An option that a
module cannot honour is refused by `supports`, never ignored.
"""

import importlib

import jax


def bookkeeping() -> str | None:
    """Name the package whose kernels build tables, plans and cache writes here; None where XLA does, as on a CPU."""
    if jax.default_backend() != "gpu":
        return None
    usable = (
        name
        for name in ("triton", "pallas")
        if importlib.import_module(f"{__name__}.{name}").refuse_device() is None
    )
    return next(usable, None)
