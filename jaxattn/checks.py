"""Trace-time validation: from the arguments of `unified_attention` to an `AttentionProblem`."""

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float32, UInt64

from jaxattn.index64 import as_index
from jaxattn.problem import AttentionProblem
from jaxattn.tree import depths

STORED_DTYPES = (
    "float32",
    "bfloat16",
    "float16",
    "float8_e4m3fn",
    "float8_e4m3fnuz",
    "float8_e5m2",
    "float8_e5m2fnuz",
    "int8",
)
_LARGEST_WINDOW = 2**62


def attention_problem(
    q,
    k_cache,
    v_cache,
    metadata,
    *,
    softmax_scale=None,
    causal=True,
    sliding_window=None,
    softcap=None,
    sinks=None,
    alibi_slopes=None,
    q_descale=None,
    k_descale=None,
    v_descale=None,
    output_scale=None,
    out_dtype=None,
    batch_invariant=False,
) -> AttentionProblem:
    """Check the arguments of `jaxattn.unified_attention` and bring them into canonical form.

    Call it inside the x64 scope. Only shapes, dtypes and static values are looked at; values of arrays are
    checked by `jaxattn.debug`.

    Raises:
        ValueError: a shape or a static value is not what the argument needs.
        TypeError: a dtype is not.
    """
    q = _stored(q, "q", "[T, H, D] query rows", 3)
    k_cache = _stored(k_cache, "k_cache", "[N, P, K, D] pages", 4)
    v_cache = _stored(v_cache, "v_cache", "[N, P, K, Dv] pages", 4)
    tokens, heads, width = q.shape
    kv_heads = k_cache.shape[2]
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(
            "v_cache: expected the pages, page size and KV heads of k_cache, "
            f"{k_cache.shape[:3]}, got {v_cache.shape[:3]}"
        )
    if k_cache.shape[3] != width:
        raise ValueError(
            f"k_cache: expected keys of width {width}, as q has, got {k_cache.shape[3]} "
            "(the layout is [N, P, K, D])"
        )
    if 0 in (heads, width, kv_heads, k_cache.shape[1], v_cache.shape[3]):
        raise ValueError(
            "q, k_cache, v_cache: expected at least one head, one column and one token in a page, "
            f"got q {q.shape}, k_cache {k_cache.shape}, v_cache {v_cache.shape}"
        )
    if heads % kv_heads:
        raise ValueError(
            f"q: expected a number of query heads that is a multiple of the {kv_heads} KV heads, got {heads}; "
            "pass the cache with its true number of KV heads"
        )

    page_table, cu_seqlens_q, seqused_k = _tables(metadata, k_cache.shape[1])
    ancestors = _ancestors(metadata.ancestors, tokens, metadata.max_seqlen_q, causal)
    return AttentionProblem(
        q=q,
        k_cache=k_cache,
        v_cache=v_cache,
        page_table=page_table,
        cu_seqlens_q=cu_seqlens_q,
        seqused_k=seqused_k,
        ancestors=ancestors,
        depths=None if ancestors is None else depths(ancestors),
        sinks=_per_head(sinks, "sinks", heads),
        alibi_slopes=_per_head(alibi_slopes, "alibi_slopes", heads),
        q_descale=per_kv_head(q_descale, "q_descale", kv_heads),
        k_descale=per_kv_head(k_descale, "k_descale", kv_heads),
        v_descale=per_kv_head(v_descale, "v_descale", kv_heads),
        output_scale=_scalar(output_scale, "output_scale"),
        plan=metadata.plan,
        softmax_scale=_softmax_scale(softmax_scale, width),
        max_seqlen_q=metadata.max_seqlen_q,
        out_dtype=_out_dtype(out_dtype, q.dtype),
        causal=_flag(causal, "causal"),
        sliding_window=_sliding_window(sliding_window),
        softcap=_softcap(softcap),
        batch_invariant=_flag(batch_invariant, "batch_invariant"),
    )


def _stored(value, name: str, layout: str, ndim: int) -> Array:
    if not hasattr(value, "dtype") or not hasattr(value, "shape"):
        raise TypeError(f"{name}: expected an array of {layout}, got {type(value).__name__}")
    if str(value.dtype) not in STORED_DTYPES:
        raise TypeError(
            f"{name}: expected one of {', '.join(STORED_DTYPES)}, got {value.dtype}; cast it first"
        )
    if len(value.shape) != ndim:
        raise ValueError(f"{name}: expected {layout}, got shape {value.shape}")
    return jnp.asarray(value)


def _tables(metadata, page_size: int):
    page_table = as_index(metadata.page_table, "metadata.page_table")
    cu_seqlens_q = as_index(metadata.cu_seqlens_q, "metadata.cu_seqlens_q")
    seqused_k = as_index(metadata.seqused_k, "metadata.seqused_k")
    if page_table.ndim != 2:
        raise ValueError(f"metadata.page_table: expected [S, M], got shape {page_table.shape}")
    sequences = page_table.shape[0]
    if seqused_k.shape != (sequences,):
        raise ValueError(
            f"metadata.seqused_k: expected shape ({sequences},), one length for each row of the page table, "
            f"got {seqused_k.shape}"
        )
    if cu_seqlens_q.shape != (sequences + 1,):
        raise ValueError(
            f"metadata.cu_seqlens_q: expected shape ({sequences + 1},), the start of each of {sequences} "
            f"sequences and the end of the last, got {cu_seqlens_q.shape}"
        )
    if metadata.page_size != page_size:
        raise ValueError(
            f"metadata.page_size: expected {page_size}, the page size of k_cache, got {metadata.page_size}; "
            "build the metadata with the page size of the cache"
        )
    if metadata.max_seqlen_q < 0:
        raise ValueError(f"metadata.max_seqlen_q: expected a length, got {metadata.max_seqlen_q}")
    return page_table, cu_seqlens_q, seqused_k


def _ancestors(ancestors, tokens: int, max_seqlen_q: int, causal: bool) -> UInt64[Array, "T W"] | None:
    if ancestors is None:
        return None
    if ancestors.dtype != np.uint64:
        raise TypeError(
            f"metadata.ancestors: expected uint64 bit words, got {ancestors.dtype}; build them with jaxattn.tree"
        )
    if len(ancestors.shape) != 2 or ancestors.shape[0] != tokens:
        raise ValueError(
            f"metadata.ancestors: expected [T, W] with one row for each of the {tokens} rows of q, "
            f"got {ancestors.shape}"
        )
    if ancestors.shape[1] * 64 < max_seqlen_q:
        raise ValueError(
            f"metadata.ancestors: expected at least {-(-max_seqlen_q // 64)} words a row for trees of up to "
            f"{max_seqlen_q} nodes, got {ancestors.shape[1]}"
        )
    if not causal:
        raise ValueError("causal: expected True with a draft tree (metadata.ancestors), got False")
    return jnp.asarray(ancestors)


def _float_array(value, name: str) -> Array:
    dtype = value.dtype if hasattr(value, "dtype") else np.asarray(value).dtype
    if not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"{name}: expected float32 values, got {dtype}")
    return jnp.asarray(value, dtype=jnp.float32)


def _per_head(value, name: str, heads: int) -> Float32[Array, "H"] | None:
    if value is None:
        return None
    array = _float_array(value, name)
    if array.shape != (heads,):
        raise ValueError(
            f"{name}: expected shape ({heads},), one value for each query head, got {array.shape}"
        )
    return array


def per_kv_head(value, name: str, kv_heads: int) -> Float32[Array, "K"] | None:
    """Bring a descale, scalar or one for each KV head, into `[K]` float32; None stays None."""
    if value is None:
        return None
    array = _float_array(value, name)
    if array.shape not in ((), (1,), (kv_heads,)):
        raise ValueError(
            f"{name}: expected a scalar or shape ({kv_heads},), one value for each KV head, got {array.shape}"
        )
    return jnp.broadcast_to(array, (kv_heads,))


def _scalar(value, name: str) -> Float32[Array, ""] | None:
    if value is None:
        return None
    array = _float_array(value, name)
    if array.shape not in ((), (1,)):
        raise ValueError(f"{name}: expected a scalar, got shape {array.shape}")
    return array.reshape(())


def _static_number(value, name: str, kinds: tuple[type, ...], expected: str):
    """Return a Python number; a tracer or an array cannot select a kernel and is refused."""
    if isinstance(value, bool | np.bool_) or not isinstance(value, kinds):
        raise TypeError(
            f"{name}: expected {expected}, known when the call is traced, got {type(value).__name__}"
        )
    return value


def _softmax_scale(value, width: int) -> float:
    if value is None:
        return width**-0.5
    number = _static_number(
        value, "softmax_scale", (int, float, np.number), "a Python float or None for D**-0.5"
    )
    if not np.isfinite(number):
        raise ValueError(f"softmax_scale: expected a finite number, got {number}")
    return float(number)


def _sliding_window(value) -> int | None:
    if value is None:
        return None
    number = _static_number(value, "sliding_window", (int, np.integer), "a Python int or None for no window")
    if not 1 <= number <= _LARGEST_WINDOW:
        raise ValueError(
            "sliding_window: expected the number of keys that a query sees, itself counted, so at least 1, "
            f"or None for no window, got {number}"
        )
    return int(number)


def _softcap(value) -> float | None:
    if value is None:
        return None
    number = _static_number(value, "softcap", (int, float, np.number), "a Python float or None for no cap")
    if not (np.isfinite(number) and number > 0):
        raise ValueError(f"softcap: expected a positive number, or None for no cap, got {number}")
    return float(number)


def _flag(value, name: str) -> bool:
    if not isinstance(value, bool | np.bool_):
        raise TypeError(
            f"{name}: expected True or False, known when the call is traced, got {type(value).__name__}"
        )
    return bool(value)


def _out_dtype(out_dtype, q_dtype) -> np.dtype:
    if out_dtype is None:
        return jnp.dtype(jnp.bfloat16) if q_dtype.itemsize == 1 else jnp.dtype(q_dtype)
    dtype = jnp.dtype(out_dtype)
    if dtype.name not in STORED_DTYPES:
        raise TypeError(f"out_dtype: expected one of {', '.join(STORED_DTYPES)}, got {dtype}")
    return dtype
