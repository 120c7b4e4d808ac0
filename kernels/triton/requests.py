"""CompileRequest: one kernel with everything that its compiler needs, so that it can be audited without a GPU."""

import dataclasses
from typing import Any


@dataclasses.dataclass(frozen=True)
class CompileRequest:
    """One kernel as `jax_triton.triton_call` would compile it.

    Args:
        name: what a person calls this configuration, for example `"decode D128 bf16"`.
        fn: the `triton.jit` function.
        signature: argument name -> Triton's type name (`"*bf16"`, `"i64"`, `"constexpr"`).
        constexprs: value of each constexpr argument, and of each argument that is None.
        attrs: argument index, as a one-element tuple -> attributes, for example
            `[["tt.divisibility", 16]]` for an array, which jax-triton always takes to be aligned.
        num_warps: waves of a program.
        num_stages: depth of the software pipeline.
    """

    name: str
    fn: Any
    signature: dict[str, str]
    constexprs: dict[str, Any]
    attrs: dict[tuple[int, ...], Any]
    num_warps: int
    num_stages: int
