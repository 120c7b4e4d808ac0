"""Saturating casts to storage formats, shared by the cache write and the attention output."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Num


def saturating_cast(x: Num[Array, "..."], dtype) -> Num[Array, "..."]:
    """Cast to `dtype`, rounding to nearest even; a finite value beyond its range becomes its largest value.

    JAX's own cast to float8_e4m3fn gives NaN from 465 up, and to int8 it truncates towards zero.

    Args:
        x: floating point values, or values that are already of `dtype`.
        dtype: a floating point format, or int8. An infinity stays one where the format has one and
            saturates where it has none (float8_e4m3fn, float8_e4m3fnuz, int8). NaN stays NaN; int8 has
            none and stores 0.

    Raises:
        TypeError: `x` is not of a floating point dtype, or `dtype` is neither floating point nor int8.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.numerics import saturating_cast
        >>> saturating_cast(jnp.array([0.5, 465.0, -1000.0]), jnp.float8_e4m3fn).tolist()
        [0.5, 448.0, -448.0]
        >>> saturating_cast(jnp.array([0.5, 1.5, 300.0]), jnp.int8).tolist()
        [0, 2, 127]
    """
    dtype = jnp.dtype(dtype)
    if x.dtype == dtype:
        return x
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise TypeError(f"x: expected a floating point dtype, got {x.dtype}; cast it to float32 first")
    x = x.astype(jnp.float64 if x.dtype == jnp.float64 else jnp.float32)
    if dtype == jnp.int8:
        rounded = jnp.clip(jnp.round(x), -128, 127)
        return jnp.where(jnp.isnan(x), 0, rounded).astype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(f"dtype: expected a floating point format or int8, got {dtype}")
    limit = min(float(jnp.finfo(dtype).max), float(jnp.finfo(x.dtype).max))
    clipped = jnp.clip(x, -limit, limit)
    if _has_infinity(dtype):
        clipped = jnp.where(jnp.isinf(x), x, clipped)
    return clipped.astype(dtype)


def _has_infinity(dtype) -> bool:
    return bool(np.isinf(np.array(np.inf).astype(dtype)))
