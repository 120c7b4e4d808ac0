"""PagedKVCache: keys and values of every layer in pages, written by slot with quantisation."""

import dataclasses
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Integer, Num

from jaxattn.checks import STORED_DTYPES, per_kv_head
from jaxattn.index64 import IndexArray, as_index, index64
from jaxattn.kernels import bookkeeping
from jaxattn.numerics import saturating_cast
from jaxattn.paged_array import inside, page_and_offset, read_rows, write_rows


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class PagedKVCache:
    """Keys and values of all layers, one array a layer, so that a donated step updates them in place.

    A stored value times its descale is the value. The pages of a layer in `window_layers` live in the smaller
    window pool: pass that layer the slots of `metadata.for_window_pool()`.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.kv_cache import PagedKVCache
        >>> cache = PagedKVCache.allocate(num_layers=2, num_pages=4, page_size=16, num_kv_heads=1, head_dim=8)
        >>> new = jnp.ones((3, 1, 8))
        >>> cache = cache.write(0, new, 2 * new, jnp.array([16, 17, -1]))
        >>> k, v = cache.gather(0, jnp.array([17, 18]))
        >>> k[:, 0, 0].tolist(), v[:, 0, 0].tolist()
        ([1.0, 0.0], [2.0, 0.0])
    """

    k: tuple[Num[Array, "N P K D"], ...]
    v: tuple[Num[Array, "N P K Dv"], ...]
    k_descale: tuple[Float32[Array, "K"] | None, ...]
    v_descale: tuple[Float32[Array, "K"] | None, ...]
    window_layers: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})

    @classmethod
    def allocate(
        cls,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        num_kv_heads: int,
        head_dim: int,
        v_head_dim: int | None = None,
        dtype=jnp.bfloat16,
        k_descale=None,
        v_descale=None,
        window_layers: Sequence[int] = (),
        num_window_pages: int | None = None,
    ) -> "PagedKVCache":
        """Allocate a cache of zeros.

        Args:
            num_layers: layers of the model.
            num_pages: pages of each layer that is not in `window_layers`; page 0 is for padding rows.
            page_size: tokens in a page.
            num_kv_heads: KV heads, `K`.
            head_dim: width of a key, `D`.
            v_head_dim: width of a value, `Dv`; `head_dim` by default.
            dtype: what is stored: float32, bfloat16, float16, a float8 format or int8.
            k_descale: value of a stored 1, as a scalar or `[K]` for all layers, or as a list of one of these
                (or None) for each layer. None stores values as they are.
            v_descale: the same for the values.
            window_layers: layers whose pages live in the window pool.
            num_window_pages: pages of the window pool; needed with `window_layers` and only then.

        Raises:
            ValueError: a size is below 1, a layer is out of range, int8 has no descale, or
                `num_window_pages` and `window_layers` do not come together.
            TypeError: `dtype` is not a format that a cache can hold.
        """
        v_head_dim = head_dim if v_head_dim is None else v_head_dim
        sizes = {
            "num_layers": num_layers,
            "num_pages": num_pages,
            "page_size": page_size,
            "num_kv_heads": num_kv_heads,
            "head_dim": head_dim,
            "v_head_dim": v_head_dim,
        }
        for name, size in sizes.items():
            if size < 1:
                raise ValueError(f"{name}: expected at least 1, got {size}")
        dtype = _stored_dtype(dtype)
        window_layers = tuple(window_layers)
        for layer in window_layers:
            _check_layer(layer, num_layers, "window_layers")
        if bool(window_layers) != (num_window_pages is not None):
            raise ValueError(
                "num_window_pages: expected a number of pages with window_layers and None without, "
                f"got {num_window_pages} with window_layers={window_layers}"
            )
        if num_window_pages is not None and num_window_pages < 1:
            raise ValueError(f"num_window_pages: expected at least 1, got {num_window_pages}")

        def zeros(layer: int, width: int):
            pages = num_window_pages if layer in window_layers else num_pages
            return jnp.zeros((pages, page_size, num_kv_heads, width), dtype)

        return cls(
            k=tuple(zeros(layer, head_dim) for layer in range(num_layers)),
            v=tuple(zeros(layer, v_head_dim) for layer in range(num_layers)),
            k_descale=_per_layer(k_descale, "k_descale", num_layers, num_kv_heads, dtype),
            v_descale=_per_layer(v_descale, "v_descale", num_layers, num_kv_heads, dtype),
            window_layers=window_layers,
        )

    @property
    def num_layers(self) -> int:
        """Layers of the model."""
        return len(self.k)

    @property
    def page_size(self) -> int:
        """Tokens in a page."""
        return self.k[0].shape[1]

    @index64
    def write(
        self, layer: int, k: Float[Array, "T K D"], v: Float[Array, "T K Dv"], slots: Integer[IndexArray, "T"]
    ) -> "PagedKVCache":
        """Store the keys and values of one layer's new tokens; see `write_kv`.

        Args:
            layer: index of the layer.
            k: keys, `[T, K, D]`.
            v: values, `[T, K, Dv]`.
            slots: `[T]`, where each token goes, in the layer's own pool; -1 for a padding row.

        Raises:
            ValueError: there is no such layer, or a shape does not fit the cache.
            TypeError: `k` or `v` is not floating point, or `slots` is not of an integer dtype.
        """
        _check_layer(layer, self.num_layers, "layer")
        new_k, new_v = write_kv(
            self.k[layer],
            self.v[layer],
            k,
            v,
            slots,
            k_descale=self.k_descale[layer],
            v_descale=self.v_descale[layer],
        )
        return dataclasses.replace(
            self,
            k=(*self.k[:layer], new_k, *self.k[layer + 1 :]),
            v=(*self.v[:layer], new_v, *self.v[layer + 1 :]),
        )

    @index64
    def gather(
        self, layer: int, slots: Integer[IndexArray, "T"]
    ) -> tuple[Float32[Array, "T K D"], Float32[Array, "T K Dv"]]:
        """Read the dequantised keys and values of some slots; zeros for -1 and for a slot outside the pool.

        Raises:
            ValueError: there is no such layer, or `slots` is not one-dimensional.
            TypeError: `slots` is not of an integer dtype.
        """
        _check_layer(layer, self.num_layers, "layer")
        slots = _one_axis(slots, "slots")
        return (
            _load(self.k[layer], slots, self.k_descale[layer]),
            _load(self.v[layer], slots, self.v_descale[layer]),
        )

    @index64
    def copy_pages(
        self, source: Integer[IndexArray, "X"], destination: Integer[IndexArray, "X"], *, window: bool = False
    ) -> "PagedKVCache":
        """Copy whole pages, in all layers of one pool; all pages are read before any is written.

        In place when donated, except on a CPU in the formats that `write_kv` names, where a layer is copied.

        Args:
            source: `[X]`, pages to read.
            destination: `[X]`, pages to write. A pair with -1 or a page outside the pool is dropped; which
                source a page gets that is named twice is undefined.
            window: copy in the window pool, that is in `window_layers`, instead of all other layers.

        Raises:
            ValueError: the lists differ in shape, or `window` is set and the cache has no window layers.
            TypeError: the pages are not of an integer dtype.
        """
        return self._copy(_copy_pages, source, destination, window)

    @index64
    def copy_slots(
        self, source: Integer[IndexArray, "X"], destination: Integer[IndexArray, "X"], *, window: bool = False
    ) -> "PagedKVCache":
        """Copy single tokens, in all layers of one pool; all are read before any is written.

        Arguments and errors are those of `copy_pages`, with slots in the place of pages.
        """
        return self._copy(_copy_slots, source, destination, window)

    def _copy(self, copy, source, destination, window: bool) -> "PagedKVCache":
        if window and not self.window_layers:
            raise ValueError("window: expected False for a cache without window_layers, got True")
        source, destination = _one_axis(source, "source"), _one_axis(destination, "destination")
        if source.shape != destination.shape:
            raise ValueError(
                "source, destination: expected lists of one length, "
                f"got {source.shape[0]} and {destination.shape[0]} entries"
            )

        def apply(arrays):
            return tuple(
                copy(array, source, destination) if (layer in self.window_layers) == window else array
                for layer, array in enumerate(arrays)
            )

        return dataclasses.replace(self, k=apply(self.k), v=apply(self.v))


@index64
def write_kv(
    k_cache: Num[Array, "N P K D"],
    v_cache: Num[Array, "N P K Dv"],
    k: Float[Array, "T K D"],
    v: Float[Array, "T K Dv"],
    slots: Integer[IndexArray, "T"],
    *,
    k_descale=None,
    v_descale=None,
) -> tuple[Num[Array, "N P K D"], Num[Array, "N P K Dv"]]:
    """Store `saturate(k / k_descale)` and `saturate(v / v_descale)` at the slots, in place when donated.

    XLA on a CPU has no scatter of its own for float8, nor for bfloat16 before jaxlib 0.11.2: there a write passes
    over the whole array once, still in place. A float32 cache on a CPU is written at the cost of its new rows.

    Args:
        k_cache: `[N, P, K, D]`. Its dtype decides the format: float8_e4m3fn and float8_e4m3fnuz differ.
        v_cache: `[N, P, K, Dv]`.
        k: keys, `[T, K, D]`.
        v: values, `[T, K, Dv]`.
        slots: `[T]`, `page * P + offset` of each token. A row with slot -1, or with one outside the pool, is
            dropped. Live slots must differ: which row stays where one occurs twice is undefined.
        k_descale: value of a stored 1, scalar or `[K]`; None stores the keys as they are.
        v_descale: the same for the values.

    Raises:
        ValueError: a shape does not fit the cache.
        TypeError: `k` or `v` is not floating point, or `slots` is not of an integer dtype.

    Example:
        >>> import jax.numpy as jnp
        >>> from jaxattn.kv_cache import write_kv
        >>> empty = jnp.zeros((2, 4, 1, 1), jnp.float8_e4m3fn)
        >>> new = jnp.array([3.0, 1000.0]).reshape(2, 1, 1)
        >>> k_cache, v_cache = write_kv(empty, empty, new, new, jnp.array([5, 0]), k_descale=2.0)
        >>> k_cache[:, :, 0, 0].tolist()
        [[448.0, 0.0, 0.0, 0.0], [0.0, 1.5, 0.0, 0.0]]
    """
    if k_cache.ndim != 4 or v_cache.shape[:-1] != k_cache.shape[:-1]:
        raise ValueError(
            "k_cache, v_cache: expected [N, P, K, D] and [N, P, K, Dv], "
            f"got {list(k_cache.shape)} and {list(v_cache.shape)}"
        )
    places = _one_axis(slots, "slots")
    k, v = jnp.asarray(k), jnp.asarray(v)
    k_descale = _check_rows(k, k_cache, len(places), k_descale, "k")
    v_descale = _check_rows(v, v_cache, len(places), v_descale, "v")
    if bookkeeping() == "triton":
        from jaxattn.kernels.triton import cache_write

        if cache_write.supports(k_cache, v_cache, k, v) is None:
            return _write_by_kernel(k_cache, v_cache, k, v, places, k_descale, v_descale)
    return _write(k_cache, v_cache, k, v, places, k_descale, v_descale)


@jax.custom_jvp
def _write_by_kernel(k_cache, v_cache, k, v, slots, k_descale, v_descale):
    from jaxattn.kernels.triton import cache_write

    return cache_write.write_kv(k_cache, v_cache, k, v, slots, k_descale, v_descale)


@_write_by_kernel.defjvp
@index64
def _derivative_of_write(primals, tangents):
    """A kernel has no derivative of its own."""
    return jax.jvp(_write, primals, tangents)


def _write(k_cache, v_cache, k, v, slots, k_descale, v_descale):
    return _store(k_cache, k, slots, k_descale), _store(v_cache, v, slots, v_descale)


def _check_rows(values, cache, tokens: int, descale, name: str) -> Float32[Array, "K"] | None:
    """Check the rows of a write and return their canonical descale."""
    expected = (tokens, *cache.shape[2:])
    if values.shape != expected:
        raise ValueError(
            f"{name}: expected shape {list(expected)}, a row for each of the {tokens} slots with the heads and "
            f"width of {name}_cache {list(cache.shape)}, got {list(values.shape)}"
        )
    if not jnp.issubdtype(values.dtype, jnp.floating):
        raise TypeError(f"{name}: expected a floating point dtype, got {values.dtype}")
    return per_kv_head(descale, f"{name}_descale", cache.shape[2])


@jax.jit
def _store(cache, values, slots, descale):
    if descale is not None:
        # Not a division, which XLA turns into this on some devices only.
        values = values.astype(jnp.float32) * (1 / descale)[:, None]
    index = page_and_offset(slots, *cache.shape[:2])
    return write_rows(cache, index, saturating_cast(values, cache.dtype))


@jax.jit
def _load(cache, slots, descale):
    values = read_rows(cache, page_and_offset(slots, *cache.shape[:2])).astype(jnp.float32)
    return values if descale is None else values * descale[:, None]


@jax.jit
def _copy_pages(cache, source, destination):
    num_pages = cache.shape[0]
    live = inside(source, num_pages) & inside(destination, num_pages)
    pages = read_rows(cache, (jnp.where(live, source, 0),))
    return write_rows(cache, (jnp.where(live, destination, num_pages),), pages)


@jax.jit
def _copy_slots(cache, source, destination):
    num_pages, page_size = cache.shape[:2]
    rows = read_rows(cache, page_and_offset(source, num_pages, page_size))
    destination = jnp.where(inside(source, num_pages * page_size), destination, -1)
    return write_rows(cache, page_and_offset(destination, num_pages, page_size), rows)


def _stored_dtype(dtype) -> jnp.dtype:
    dtype = jnp.dtype(dtype)
    if dtype.name not in STORED_DTYPES:
        raise TypeError(f"dtype: expected one of {', '.join(STORED_DTYPES)}, got {dtype}")
    return dtype


def _check_layer(layer: int, num_layers: int, name: str) -> None:
    if not 0 <= layer < num_layers:
        raise ValueError(f"{name}: expected a layer in [0, {num_layers}), got {layer}")


def _per_layer(descale, name: str, num_layers: int, num_kv_heads: int, dtype):
    layers = descale if isinstance(descale, list | tuple) else [descale] * num_layers
    if len(layers) != num_layers:
        raise ValueError(f"{name}: expected {num_layers} entries, one for each layer, got {len(layers)}")
    if dtype == jnp.int8 and any(layer is None for layer in layers):
        raise ValueError(
            f"{name}: expected a descale with dtype int8, which holds whole numbers in [-128, 127], got None; "
            "pass the largest magnitude of the values / 127"
        )
    return tuple(per_kv_head(layer, f"{name}[{i}]", num_kv_heads) for i, layer in enumerate(layers))


def _one_axis(slots, name: str):
    slots = as_index(slots, name)
    if slots.ndim != 1:
        raise ValueError(f"{name}: expected shape [T], got {list(slots.shape)}")
    return slots
