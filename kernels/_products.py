"""The two products of attention in plain XLA: rows with keys, and weights with values.

XLA's CPU product per KV head works on keys that are first copied into an order of heads, then keys. Few rows are
cheaper as one product over all heads: keys stay as they lie in their pages, and rows are zero outside their own head.
A NaN or an infinity in one head of a key then reaches that row's other heads.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float32

# A product pads its rows to a vector of 4. Measured at 2,048 keys on a CPU: 0.26 in place of 0.33 ms with 3 heads of
# 3 rows, 0.42 for 0.74 with 8 of 1; with 4 rows a head or 8 heads of 2, no gain.
_FEW_ROWS_OF_HEAD, _FEW_ROWS = 3, 16


def heads_together_pay(heads: int, rows_of_head: int) -> bool:
    """Whether one product over all KV heads is the faster one here.

    On a CPU only: over several devices the heads may lie apart, and a product over all of them would gather them.
    """
    few = rows_of_head <= _FEW_ROWS_OF_HEAD and heads * rows_of_head <= _FEW_ROWS
    return heads > 1 and few and jax.default_backend() == "cpu"


def scores(
    q: Float32[Array, "B K G Q D"], k: Float32[Array, "B L K D"], heads_together: bool = False
) -> Float32[Array, "B K G Q L"]:
    """Products of each row with the keys of its head."""
    rows = q.reshape(*q.shape[:2], -1, q.shape[4])  # [B, K, G*Q, D]
    if heads_together:
        batch, heads, count, width = rows.shape
        own = jnp.eye(heads, dtype=jnp.float32)[:, None, :, None]
        rows = (own * rows[:, :, :, None]).reshape(batch, heads * count, heads * width)
        product = _product(k.reshape(*k.shape[:2], -1), rows, (((2,), (2,)), ((0,), (0,))))  # [B, L, K*G*Q]
        product = product.swapaxes(1, 2)
    else:
        # Keys on the left: XLA's CPU product is faster that way round.
        product = _product(k, rows, (((3,), (3,)), ((0, 2), (0, 1)))).swapaxes(2, 3)  # [B, K, G*Q, L]
    return product.reshape(*q.shape[:4], -1)


def weighted_values(
    weights: Float32[Array, "B K G Q L"], v: Float32[Array, "B L K Dv"], heads_together: bool = False
) -> Float32[Array, "B K G Q Dv"]:
    """Sums of the values of each row's head, by its weights."""
    rows = weights.reshape(*weights.shape[:2], -1, weights.shape[4])  # [B, K, G*Q, L]
    if heads_together:
        batch, heads, count, length = rows.shape
        product = _product(
            rows.reshape(batch, -1, length), v.reshape(*v.shape[:2], -1), (((2,), (1,)), ((0,), (0,)))
        )  # [B, K*G*Q, K*Dv]
        own = jnp.arange(heads)
        product = product.reshape(batch, heads, count, heads, -1)[:, own, :, own].swapaxes(0, 1)
    else:
        product = jnp.einsum("bkrl,blkd->bkrd", rows, v, precision=jax.lax.Precision.HIGHEST)
    return product.reshape(*weights.shape[:4], -1)


def _product(left, right, dimension_numbers):
    return jax.lax.dot_general(left, right, dimension_numbers, precision=jax.lax.Precision.HIGHEST)
