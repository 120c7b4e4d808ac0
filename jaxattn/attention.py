"""unified_attention: validate, choose an implementation, run it."""

import functools
import importlib
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Float32, Num

from jaxattn import checks
from jaxattn.errors import UnsupportedError
from jaxattn.index64 import index64
from jaxattn.metadata import AttentionMetadata
from jaxattn.problem import AttentionProblem
from jaxattn.routing import AttentionConfig, route

Scale = Float[Array, "..."] | Float[np.ndarray, "..."] | float | np.floating
IMPLEMENTATIONS = ("triton", "pallas", "xla", "reference")
# What is tried on a GPU, in order.
PREFERRED = ("triton", "pallas", "xla")


@index64
def unified_attention(
    q: Num[Array, "T H D"],
    k_cache: Num[Array, "N P K D"],
    v_cache: Num[Array, "N P K Dv"],
    metadata: AttentionMetadata,
    *,
    softmax_scale: float | None = None,
    causal: bool = True,
    sliding_window: int | None = None,
    softcap: float | None = None,
    sinks: Float[Array, "H"] | None = None,
    alibi_slopes: Float[Array, "H"] | None = None,
    q_descale: Scale | None = None,
    k_descale: Scale | None = None,
    v_descale: Scale | None = None,
    output_scale: Scale | None = None,
    out_dtype: DTypeLike | None = None,
    return_lse: bool = False,
    batch_invariant: bool = False,
    implementation: str | Sequence[str] | None = None,
    config: AttentionConfig | None = None,
) -> Num[Array, "T H Dv"] | tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    """Attend from query rows to the paged keys of their sequences, in every forward mode.

    Row i of a sequence sits at position `seqused_k - q_len + i` (in a tree: context + depth) and sees the keys at
    or before it, within the window and among its ancestors. `score = softmax_scale * q_descale * k_descale * q.k`,
    then the softcap, then ALiBi; `out = softmax(score) @ v * v_descale / output_scale`. The options mean the same
    in every mode. The keys of this call's own tokens must be in the cache already.

    Args:
        q: `[T, H, D]` query rows of all sequences, one sequence after the other; float32, bfloat16, float16,
            float8 or int8. Rows behind the last sequence may hold anything.
        k_cache: `[N, P, K, D]` pages; `H` is a multiple of `K`, and head h reads KV head `h // (H // K)`. The
            format may differ from that of q. Slots that no row sees may hold anything.
        v_cache: `[N, P, K, Dv]` pages; `Dv` may differ from `D`.
        metadata: page table, lengths and tree, from a builder of `jaxattn.metadata`. A page id outside
            `[0, N)` masks its keys; `jaxattn.debug` reports it.
        softmax_scale: `D ** -0.5` by default.
        causal: False lets a row see every key of its sequence that its window allows; not with a tree.
        sliding_window: keys that a row sees, itself counted; None for no window.
        softcap: c in `c * tanh(score / c)`; None for none.
        sinks: float32 `[H]`, a logit for each head that joins the denominator and has no value.
        alibi_slopes: float32 `[H]`; `slope * |distance|` is subtracted from the score.
        q_descale: float32 scalar or `[K]`; value = stored * descale, whatever the format. None for 1.
        k_descale: like `q_descale`.
        v_descale: like `q_descale`.
        output_scale: float32 scalar; the stored output is value / scale.
        out_dtype: dtype of the output; by default that of q, bfloat16 where q has one byte. One-byte formats
            saturate, int8 rounds to nearest even.
        return_lse: also return the natural log-sum-exp of each row, the sink included.
        batch_invariant: make the bits of a row independent of its batch, and of whether decode, verify or draft
            extend computes it. A row of a draft tree has the bits that decode gives it once its path follows the
            prefix; rows of a tree do not share the keys that they read then. Rows of a prefill, which takes other
            tiles, may differ from those in the last bit.
        implementation: `"triton"`, `"pallas"`, `"xla"`, `"reference"`, or several of them to be tried in order.
            By default Triton, else Pallas, else XLA, on a GPU and XLA on a CPU.
        config: switches that may route a mode to the dense path, see `jaxattn.routing`; None for no routing.

    Returns:
        `out` of `[T, H, Dv]`, or `(out, lse)` with float32 `[T, H]`. A row that sees no key and a row that
        belongs to no sequence have `out = 0` and `lse = -inf`, sink or not.

    Raises:
        ValueError: an argument has a wrong shape or is out of range.
        TypeError: an argument has a dtype that is not accepted, or is traced where it must be static.
        UnsupportedError: none of the implementations can compute the call (the message has each one's reason),
            or a derivative of one is asked for; only `"reference"` has one.

    Example:
        >>> import jax.numpy as jnp, numpy as np
        >>> from jaxattn import decode_metadata, unified_attention
        >>> step = decode_metadata(
        ...     seqused_k=np.array([3, 1]), page_size=2, req_pool_indices=np.array([0, 1]),
        ...     req_to_token=np.array([[4, 5, 6, 7], [2, 3, 0, 0]]),
        ... )
        >>> k_cache = jnp.zeros((4, 2, 1, 8))
        >>> v_cache = jnp.broadcast_to(jnp.arange(8.0).reshape(4, 2, 1, 1), (4, 2, 1, 8))
        >>> out, lse = unified_attention(jnp.ones((2, 2, 8)), k_cache, v_cache, step, return_lse=True)
        >>> out[:, 0, 0].tolist()  # the mean of slots 4, 5, 6, and slot 2
        [5.0, 2.0]
    """
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
    names = candidates(implementation)
    if config is not None:
        names = _routed(names, implementation, metadata.mode, config)
    out, lse = _run(problem, _choose(problem, names))
    return (out, lse) if return_lse else out


@functools.partial(jax.jit, static_argnames="name")
def _run(problem: AttentionProblem, name: str) -> tuple[Num[Array, "T H Dv"], Float32[Array, "T H"]]:
    return _load(name).run(problem)


def _load(name: str) -> ModuleType:
    return importlib.import_module(f"jaxattn.kernels.{name}")


def candidates(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    """Return the implementations to try, in order."""
    if implementation is None:
        return PREFERRED if jax.default_backend() == "gpu" else ("xla",)
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    unknown = [name for name in names if name not in IMPLEMENTATIONS]
    if unknown or not names:
        raise ValueError(
            f"implementation: expected None or some of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}"
        )
    return names


def _routed(names: tuple[str, ...], implementation, mode: str, config: AttentionConfig) -> tuple[str, ...]:
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


def automatic_choice(reasons: dict[str, str | None]) -> str:
    """Name the implementation that is taken where none is asked for, given what `implementations` says."""
    return next(name for name in candidates(None) if reasons[name] is None)


@index64
def implementations() -> dict[str, str | None]:
    """Say of each implementation why it cannot run a plain bfloat16 decode here, or None where it can.

    Example:
        >>> from jaxattn.attention import implementations
        >>> implementations()["xla"] is None
        True
    """
    problem = AttentionProblem(
        q=jnp.zeros((1, 1, 64), jnp.bfloat16),
        k_cache=jnp.zeros((1, 16, 1, 64), jnp.bfloat16),
        v_cache=jnp.zeros((1, 16, 1, 64), jnp.bfloat16),
        page_table=jnp.zeros((1, 1), jnp.int64),
        cu_seqlens_q=jnp.arange(2, dtype=jnp.int64),
        seqused_k=jnp.ones(1, jnp.int64),
        softmax_scale=0.125,
        max_seqlen_q=1,
        out_dtype=jnp.dtype(jnp.bfloat16),
    )
    return {name: _refusal(problem, name) for name in IMPLEMENTATIONS}
