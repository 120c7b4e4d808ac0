"""Merging of partial attention results over disjoint sets of keys."""

from collections.abc import Sequence

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32


def merge_states(
    out: Float[Array, "N *rows Dv"] | Sequence[Float[Array, "*rows Dv"]],
    lse: Float[Array, "N *rows"] | Sequence[Float[Array, "*rows"]],
) -> tuple[Float[Array, "*rows Dv"], Float32[Array, "*rows"]]:
    """Merge attention results over disjoint sets of keys into the result over all of them.

    `lse = log sum_n exp(lse_n)` and `out = sum_n exp(lse_n - lse) out_n`, in float32. A state with
    `lse = -inf` saw no key and has no effect, whatever its `out` holds; where all states are such, the result
    is `(0, -inf)`. A sink may take part in one of the states only, and `v_descale` and `output_scale` in all.

    Args:
        out: `[N, ..., Dv]` stacked, or N arrays of `[..., Dv]`; the result has their dtype.
        lse: `[N, ...]` stacked, or N arrays of `[...]`; natural logarithms.

    Raises:
        ValueError: there is no state, or the shapes of `out` and `lse` differ before the last axis of `out`.
        TypeError: `out` or `lse` is not of a floating point dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.merge import merge_states
        >>> out, lse = merge_states([jnp.ones((1, 2)), jnp.zeros((1, 2))], [jnp.zeros(1), jnp.zeros(1)])
        >>> out.tolist(), round(float(lse[0]), 4)
        ([[0.5, 0.5]], 0.6931)
    """
    out, lse = _stacked(out, "out"), _stacked(lse, "lse")
    if out.shape[:-1] != lse.shape:
        raise ValueError(
            f"lse: expected shape {out.shape[:-1]}, that of out without its last axis, got {lse.shape}"
        )
    lse = lse.astype(jnp.float32)
    maximum = lse.max(axis=0)
    shift = jnp.where(maximum == -jnp.inf, jnp.float32(0), maximum)
    weight = jnp.exp(lse - shift)
    total = weight.sum(axis=0)
    divisor = jnp.where(total == 0, jnp.float32(1), total)
    seen = (lse != -jnp.inf)[..., None]
    values = jnp.where(seen, weight[..., None] * out.astype(jnp.float32), jnp.float32(0)).sum(axis=0)
    return (values / divisor[..., None]).astype(out.dtype), shift + jnp.log(total)


def _stacked(states, name: str) -> Array:
    if not hasattr(states, "shape"):
        if len(states) == 0:
            raise ValueError(f"{name}: expected at least one state, got none")
        states = jnp.stack([jnp.asarray(state) for state in states])
    if not jnp.issubdtype(states.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a floating point dtype, got {states.dtype}")
    if states.ndim == 0 or states.shape[0] == 0:
        raise ValueError(f"{name}: expected at least one state, got shape {states.shape}")
    return jnp.asarray(states)
