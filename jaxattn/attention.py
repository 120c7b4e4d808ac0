"""unified_attention: validate, choose an implementation, run it."""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Num

from jaxattn import checks
from jaxattn.errors import UnsupportedError
from jaxattn.index64 import index64
from jaxattn.problem import AttentionProblem

if TYPE_CHECKING:
    from jaxattn.metadata import AttentionMetadata
    from jaxattn.routing import AttentionConfig

IMPLEMENTATIONS = ("triton", "pallas", "xla", "reference")


@index64
def unified_attention(
    q: Num[Array, "T H D"],
    k_cache: Num[Array, "N P K D"],
    v_cache: Num[Array, "N P K Dv"],
    metadata: "AttentionMetadata",
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    output_scale=None,
    out_dtype=None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: str | Sequence[str] | None = None,
    config: "AttentionConfig | None" = None,
) -> Num[Array, "T H Dv"] | tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Attend from query rows to the paged keys of their sequences, in every forward mode."""
    problem = checks.attention_problem(
        q,
        k_cache,
        v_cache,
        metadata,
        softmax_scale=softmax_scale,
        causal=causal,
        sliding_window=sliding_window,
        softcap=softcap,
        sinks=sinks,
        alibi_slopes=alibi_slopes,
        q_descale=q_descale,
        k_descale=k_descale,
        v_descale=v_descale,
        output_scale=output_scale,
        out_dtype=out_dtype,
        batch_invariant=batch_invariant,
    )
    names = _candidates(implementation)
    if config is not None:
        names = _routed(names, implementation, metadata.mode, config)
    out, lse = _run(problem, _choose(problem, names))
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames="name")
def _run(problem: AttentionProblem, name: str) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    return _load(name).run(problem)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"jaxattn.kernels.{name}")


def _candidates(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the implementations to try, in order."""
    if implementation is None:
        return ("triton", "pallas", "xla") if jax.default_backend() == "gpu" else ("xla",)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(
            f"implementation: expected None or some of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    return names


def _routed(names: tuple[str, ...], implementation, mode: str, config: "AttentionConfig") -> tuple[str, ...]:
    from jaxattn.routing import route

    decision = route(mode, config)
    if decision.path == "unsupported":
        raise UnsupportedError(f"config: mode {mode!r} cannot be computed: {decision.reason}")
    if decision.path != "dense":
        return names
    if implementation is not None and "reference" not in names:
        raise UnsupportedError(
            f"implementation={implementation!r}: mode {mode!r} is routed to the dense path ({decision.reason}), "
            "which is implementation='reference'; leave implementation out or change the config"
        )
    return ("reference",)


def _refusal(problem: AttentionProblem, name: str) -> str | None:
    """Return why an implementation cannot compute the problem; a missing optional package is a reason."""
    try:
        module = _load(name)
    except ImportError as error:
        return f"cannot be imported ({error})"
    return module.supports(problem)


def _choose(problem: AttentionProblem, names: tuple[str, ...]) -> str:
    refusals = {}
    for name in names:
        reason = _refusal(problem, name)
        if reason is None:
            return name
        refusals[name] = reason
    reasons = "".join(f"\n  {name}: {reason}" for name, reason in refusals.items())
    raise UnsupportedError(f"implementation: none of those tried can compute this call{reasons}")


@index64
def implementations() -> dict[str, str | None]:
    """Say of each implementation why it cannot run a plain bfloat16 decode here, or None where it can.

    Example:
        >>> from jaxattn.attention import implementations
        >>> implementations()["xla"] is None
        True
    """
    problem = AttentionProblem(
        q=jax.ShapeDtypeStruct((1, 1, 64), jnp.bfloat16),
        k_cache=jax.ShapeDtypeStruct((1, 16, 1, 64), jnp.bfloat16),
        v_cache=jax.ShapeDtypeStruct((1, 16, 1, 64), jnp.bfloat16),
        page_table=jax.ShapeDtypeStruct((1, 1), jnp.int64),
        cu_seqlens_q=jax.ShapeDtypeStruct((2,), jnp.int64),
        seqused_k=jax.ShapeDtypeStruct((1,), jnp.int64),
        softmax_scale=0.125,
        max_seqlen_q=1,
        out_dtype=jnp.dtype(jnp.bfloat16),
    )
    return {name: _refusal(problem, name) for name in IMPLEMENTATIONS}
