"""Moving the keys and values of an accepted path to where the committed tokens belong."""

import jax.numpy as jnp
from jaxtyping import Array, Int32

from jaxattn.index64 import index64
from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import AttentionMetadata


@index64
def compact_accepted(
    cache: PagedKVCache, metadata: AttentionMetadata, path: Int32[Array, "S n"]
) -> PagedKVCache:
    """Copy the slot of each accepted node to the slot of its depth, in both pools of the cache.

    A chain is in place already, so without `metadata.ancestors` nothing is copied. Slots of rejected nodes
    keep what they hold; the next tokens overwrite them.

    Args:
        cache: what the verify step wrote to; donate it.
        metadata: of that verify step, n query rows per sequence.
        path: accepted nodes from node 0 on, -1 after them.
    """
    if metadata.ancestors is None:
        return cache
    sequences, n = path.shape
    depth = jnp.arange(n, dtype=path.dtype)
    moved = (path >= 0) & (path != depth)

    def copy(cache, metadata, window):
        slots = metadata.slots(sequences * n).reshape(sequences, n)
        source = jnp.take_along_axis(slots, jnp.maximum(path, 0), axis=1)
        source, destination = jnp.where(moved, source, -1), jnp.where(moved, slots, -1)
        return cache.copy_slots(source.reshape(-1), destination.reshape(-1), window=window)

    if len(cache.window_layers) < cache.num_layers:
        cache = copy(cache, metadata, False)
    if cache.window_layers:
        cache = copy(cache, metadata.for_window_pool(), True)
    return cache
