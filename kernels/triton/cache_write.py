"""The quantising cache write in one launch, in place, equal to `jaxattn.kv_cache.write_kv` bit for bit."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import triton
import triton.language as tl
from jaxtyping import Array, Float, Float32, Int64, Num

from jaxattn.kernels._constants import CODES, padded
from jaxattn.kernels.triton.formats import encode, stored_pointer
from jaxattn.kernels.triton.launch import launch

_TRITON_DTYPES = {"float32": tl.float32, "float16": tl.float16, "bfloat16": tl.bfloat16}
_WIDEST = 4096


@dataclasses.dataclass(frozen=True, kw_only=True)
class WriteConstants:
    """Static facts of one launch; a row is all heads of one token."""

    num_slots: int
    head_dim: int
    value_dim: int
    k_row: int
    v_row: int
    # Number of the stored format, -1 where rows are copied as they are.
    k_format: int
    v_format: int
    k_dtype: Any
    v_dtype: Any
    k_descale: bool
    v_descale: bool
    k_block: int
    v_block: int


def supports(k_cache, v_cache, k, v) -> str | None:
    """Return why the write cannot be done here, or None."""
    for name, values in (("k", k), ("v", v)):
        if values.dtype.name not in _TRITON_DTYPES:
            return f"{name}: the kernel takes float32, float16 and bfloat16, got {values.dtype}"
    return None


def write_kv(
    k_cache: Num[Array, "N P K D"],
    v_cache: Num[Array, "N P K Dv"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"],
    slots: Int64[Array, "T"],
    k_descale: Float32[Array, "K"] | None,
    v_descale: Float32[Array, "K"] | None,
) -> tuple[Num[Array, "N P K D"], Num[Array, "N P K Dv"]]:
    """Store `saturate(k / k_descale)` and `saturate(v / v_descale)` at the slots of the pool.

    Arguments are checked; call it inside an `index64` scope. The results take the memory of donated caches.
    """
    if 0 in (k.size, v.size, k_cache.size, v_cache.size):
        return k_cache, v_cache
    constants = WriteConstants(
        num_slots=k_cache.shape[0] * k_cache.shape[1],
        head_dim=k.shape[2],
        value_dim=v.shape[2],
        k_row=k.shape[1] * k.shape[2],
        v_row=v.shape[1] * v.shape[2],
        k_format=_format(k, k_cache, k_descale),
        v_format=_format(v, v_cache, v_descale),
        k_dtype=_TRITON_DTYPES.get(k_cache.dtype.name, tl.float32),
        v_dtype=_TRITON_DTYPES.get(v_cache.dtype.name, tl.float32),
        k_descale=k_descale is not None,
        v_descale=v_descale is not None,
        k_block=min(_WIDEST, padded(k.shape[1] * k.shape[2])),
        v_block=min(_WIDEST, padded(v.shape[1] * v.shape[2])),
    )
    shapes = [jax.ShapeDtypeStruct(cache.shape, cache.dtype) for cache in (k_cache, v_cache)]
    new_k, new_v = launch(
        cache_write_kernel,
        (slots, k, v, k_descale, v_descale, k_cache, v_cache),
        shapes,
        grid=slots.shape[0],
        num_warps=4,
        aliases={5: 0, 6: 1},
        C=constants,
    )
    return new_k, new_v


def _format(values, cache, descale) -> int:
    if descale is None and values.dtype == cache.dtype:
        return -1
    return CODES[jnp.dtype(cache.dtype).name]


@triton.jit
def _write_row(
    cache_ptr,
    new_ptr,
    descale_ptr,
    slot,
    token,
    ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
    DESCALE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    for first in range(0, ROW, BLOCK):
        lane = first + tl.arange(0, BLOCK)
        value = tl.load(new_ptr + token * ROW + lane, mask=lane < ROW, other=0.0)
        if FORMAT >= 0:
            value = value.to(tl.float32)
            if DESCALE:
                descale = tl.load(descale_ptr + lane // WIDTH, mask=lane < ROW, other=1.0)
                value = value * tl.div_rn(1.0, descale)
            value = encode(value, FORMAT, DTYPE)
        tl.store(stored_pointer(cache_ptr, FORMAT) + slot * ROW + lane, value, mask=lane < ROW)


@triton.jit
def cache_write_kernel(
    slots_ptr,
    k_ptr,
    v_ptr,
    k_descale_ptr,
    v_descale_ptr,
    _k_cache_ptr,
    _v_cache_ptr,
    k_cache_ptr,
    v_cache_ptr,
    C: tl.constexpr,
):
    """Write the row of one token, unless its slot is not in the pool."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if (slot >= 0) & (slot < C.num_slots):
        _write_row(
            k_cache_ptr, k_ptr, k_descale_ptr, slot, token,
            C.k_row, C.head_dim, C.k_format, C.k_dtype, C.k_descale, C.k_block,
        )  # fmt: skip
        _write_row(
            v_cache_ptr, v_ptr, v_descale_ptr, slot, token,
            C.v_row, C.value_dim, C.v_format, C.v_dtype, C.v_descale, C.v_block,
        )  # fmt: skip
