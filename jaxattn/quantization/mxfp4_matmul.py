"""The product with an MXFP4 weight: by a kernel that expands it in registers, or a dequantised tile at a time."""

import importlib
import importlib.util
from collections.abc import Sequence
from types import ModuleType

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, UInt8

from jaxattn.errors import UnsupportedError
from jaxattn.index64 import index64
from jaxattn.quantization.mxfp4 import dequantize
from jaxattn.quantization.weights import dot

IMPLEMENTATIONS = ("triton", "pallas", "xla")
# Elements of the weight that the XLA product holds dequantised at a time.
TILE_ELEMENTS = 1 << 21


@index64
def matmul(
    x: Float[Array, "tokens columns"],
    packed: UInt8[Array, "padded_rows half"],
    scale: UInt8[Array, "padded_rows groups"],
    rows: int,
    *,
    implementation: str | Sequence[str] | None = None,
) -> Float32[Array, "tokens rows"]:
    """`x @ weight.T` in float32 sums, without a dequantised copy of the weight.

    Args:
        x: rows in the dtype of the computation.
        packed: two codes a byte along the columns; see `jaxattn.quantization.mxfp4`.
        scale: e8m0 bytes, one per 32 columns.
        rows: rows of the weight; the arrays may be larger, and may have more columns than `x`, filled with zeros.
        implementation: `triton`, `pallas` or `xla`, or several in order of preference. By default the first that
            can: `xla` on a CPU.

    Raises:
        ValueError: there is no such implementation.
        UnsupportedError: none of those named can multiply these.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.quantization import mxfp4
        >>> from jaxattn.quantization.mxfp4_matmul import matmul
        >>> matmul(jnp.ones((1, 32)), *mxfp4.quantize(jnp.full((2, 32), 0.5)), rows=2).tolist()
        [[16.0, 16.0]]
    """
    names = _candidates(implementation)
    reasons = []
    for name in names:
        if name == "xla":
            return tiled_product(x, packed, scale, rows)
        module = _load(name)
        reason = module if isinstance(module, str) else module.supports(x, packed)
        if not isinstance(module, str) and reason is None:
            return module.run(x, packed, scale, rows)
        reasons.append(f"{name}: {reason}")
    raise UnsupportedError(
        f"implementation: no one of {', '.join(names)} can multiply these: {'; '.join(reasons)}"
    )


def tiled_product(
    x: Float[Array, "tokens columns"],
    packed: UInt8[Array, "padded_rows half"],
    scale: UInt8[Array, "padded_rows groups"],
    rows: int,
) -> Float32[Array, "tokens rows"]:
    """The product in XLA, dequantising a tile of rows after the other."""
    tile = max(1, TILE_ELEMENTS // (2 * packed.shape[-1]))
    whole = rows // tile * tile

    def product(packed, scale):
        return dot(x, dequantize(packed, scale, x.dtype)[:, : x.shape[1]])  # [tokens, tile]

    parts = []
    if whole:
        tiles = tuple(a[:whole].reshape(-1, tile, a.shape[-1]) for a in (packed, scale))
        out = lax.map(lambda arrays: product(*arrays), tiles)  # [tiles, tokens, tile]
        parts.append(jnp.moveaxis(out, 0, 1).reshape(x.shape[0], whole))
    if whole < rows:
        parts.append(product(packed[whole:rows], scale[whole:rows]))
    return jnp.concatenate(parts, axis=1)


def _candidates(implementation: str | Sequence[str] | None) -> tuple[str, ...]:
    if implementation is None:
        return ("xla",) if jax.default_backend() == "cpu" else IMPLEMENTATIONS
    names = (implementation,) if isinstance(implementation, str) else tuple(implementation)
    for name in names:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"implementation: expected one of {', '.join(IMPLEMENTATIONS)}, got {name!r}")
    return names


def _load(name: str) -> ModuleType | str:
    """The module of an implementation, or the reason why it cannot be used here."""
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed; install jaxattn[triton]"
        from jaxattn.kernels.triton.compat import jax_triton_status

        if jax.default_backend() != "cpu" and (reason := jax_triton_status()):
            return reason
    return importlib.import_module(f"jaxattn.kernels.{name}.mxfp4")
