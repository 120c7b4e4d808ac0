"""The layers that decoder models share: plain functions of arrays and weights."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int64, Num

from jaxattn.attention import candidates, unified_attention
from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import AttentionMetadata
from jaxattn.plan import PLANNED, make_plan


class MatmulWeight(Protocol):
    """A weight that is no plain array, such as a quantised one; a registered pytree."""

    def matmul(self, x: Float[Array, "... I"]) -> Float[Array, "... O"]:
        """`x @ weight.T` in the dtype of `x`."""


# Up to so many rows XLA's CPU product is up to twice as fast with the weight on its left side.
CPU_FEW_ROWS = 16

Weight = Float[Array, "O I"] | MatmulWeight


def linear(
    x: Float[Array, "... I"], weight: Weight, bias: Float[Array, "O"] | None = None, *, out_dtype=None
) -> Float[Array, "... O"]:
    """`x @ weight.T + bias`, accumulated in float32.

    Args:
        x: rows of the input width.
        weight: `[out, in]`, or a quantised weight that brings its own `matmul`.
        bias: `[out]`.
        out_dtype: of the result; the dtype of `x` by default.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.models.layers import linear
        >>> linear(jnp.ones((1, 2)), jnp.array([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])).tolist()
        [[3.0, 7.0, 11.0]]
    """
    out = _matmul(x, weight) if isinstance(weight, jax.Array) else weight.matmul(x)
    if bias is not None:
        out = out + bias
    return out.astype(x.dtype if out_dtype is None else out_dtype)


def _matmul(x: Float[Array, "... I"], weight: Float[Array, "O I"]) -> Float32[Array, "... O"]:
    few = math.prod(x.shape[:-1]) <= CPU_FEW_ROWS and jax.default_backend() == "cpu"
    operands = (weight, x) if few else (x, weight)
    contract = (((operands[0].ndim - 1,), (operands[1].ndim - 1,)), ((), ()))
    out = jax.lax.dot_general(*operands, contract, preferred_element_type=jnp.float32)
    # The barrier keeps XLA from turning the operands round again.
    return jnp.moveaxis(jax.lax.optimization_barrier(out), 0, -1) if few else out


def rms_norm(x: Float[Array, "... E"], weight: Float32[Array, "E"], eps: float) -> Float[Array, "... E"]:
    """`x / rms(x) * weight` along the last axis, computed in float32, in the dtype of `x`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.models.layers import rms_norm
        >>> rms_norm(jnp.array([3.0, 3.0]), jnp.array([1.0, 2.0]), eps=0.0).tolist()
        [1.0, 2.0]
    """
    wide = x.astype(jnp.float32)
    scale = jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + jnp.float32(eps))
    return (wide * scale * weight).astype(x.dtype)


def rotation(
    positions: Int64[Array, "T"], inverse_frequencies: Float32[Array, "half"]
) -> tuple[Float32[Array, "T half"], Float32[Array, "T half"]]:
    """Cosine and sine of each position's rotary angles."""
    angles = positions.astype(jnp.float32)[:, None] * inverse_frequencies
    return jnp.cos(angles), jnp.sin(angles)


def rotate(
    x: Float[Array, "T heads D"], cos: Float32[Array, "T half"], sin: Float32[Array, "T half"]
) -> Float[Array, "T heads D"]:
    """Rotary embedding in the half-split order, on the first `2 * half` of each head; the rest passes.

    Element `j` turns with element `j + half`. Formula: https://arxiv.org/abs/2104.09864, section 3.4.2.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.models.layers import rotate
        >>> quarter_turn = jnp.array([[0.0]]), jnp.array([[1.0]])
        >>> rotate(jnp.array([[[1.0, 2.0, 5.0]]]), *quarter_turn).tolist()
        [[[-2.0, 1.0, 5.0]]]
    """
    half = cos.shape[-1]
    first, second = (x[..., i * half : (i + 1) * half].astype(jnp.float32) for i in range(2))
    cos, sin = cos[:, None, :], sin[:, None, :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate([*(t.astype(x.dtype) for t in turned), x[..., 2 * half :]], axis=-1)


def share_plan(
    metadata: AttentionMetadata,
    q: jax.ShapeDtypeStruct,
    cache: PagedKVCache,
    windows: Mapping[int, int | None],
    *,
    implementation: str | Sequence[str] | None = None,
    batch_invariant: bool = False,
    **_others: Any,
) -> AttentionMetadata:
    """Plan a step once for all layers of a pool, where an implementation may run that reads a plan.

    Args:
        metadata: the batch, with the page tables of the pool.
        q: shape `[T, H, D]` and dtype of the query rows of a layer.
        cache: the cache of all layers.
        windows: sliding window of each layer whose pages live in the pool.
        implementation: as for `unified_attention`.
        batch_invariant: as for `unified_attention`.
        **_others: its other arguments, which no plan depends on.

    Returns:
        The metadata, with a plan if it had none.
    """
    reads_plan = not set(PLANNED).isdisjoint(candidates(implementation))
    if metadata.plan is not None or not windows or 0 in q.shape or not reads_plan:
        return metadata
    layer = min(windows)
    plan = make_plan(
        metadata,
        q,
        cache.k[layer],
        cache.v[layer],
        sliding_windows=tuple(dict.fromkeys(windows.values())),
        batch_invariant=batch_invariant,
    )
    return dataclasses.replace(metadata, plan=plan)


def cached_attention(
    q: Num[Array, "T H D"],
    k: Num[Array, "T K D"],
    v: Num[Array, "T K Dv"],
    cache: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    slots: Int64[Array, "T"],
    **options: Any,
) -> tuple[Num[Array, "T H Dv"], PagedKVCache]:
    """Write this call's keys and values to their slots, then attend from its queries to the whole cache.

    Args:
        q: query rows, rotated.
        k: keys of the same rows, rotated.
        v: values of the same rows.
        cache: the cache of all layers.
        layer: the layer whose pages are written and read.
        metadata: the batch, with the page tables of the pool that this layer's pages live in.
        slots: `metadata.slots(T)`, computed once for all layers of a pool.
        **options: further arguments of `unified_attention`.

    Returns:
        The attention output in the dtype of `q`, and the cache.
    """
    cache = cache.write(layer, k, v, slots)
    out = unified_attention(
        q,
        cache.k[layer],
        cache.v[layer],
        metadata,
        k_descale=cache.k_descale[layer],
        v_descale=cache.v_descale[layer],
        out_dtype=q.dtype,
        **options,
    )
    return out, cache
