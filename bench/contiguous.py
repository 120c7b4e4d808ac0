"""Measures what pages cost on a CPU: a decode step of a model on a paged cache beside one on a contiguous cache.

    python -m bench.contiguous [MODEL] [--context 2048]

The model's own code runs in both; only its attention differs, `unified_attention` over pages of 16 tokens or
`jax.nn.dot_product_attention` over one array of `context` keys. Steps of the two are timed in turn, so that both
see the same machine; the ratio is that of the medians. The logits of the two are compared first.
"""

import argparse
import dataclasses
import functools
import time
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np

from jaxattn import decode_metadata
from jaxattn.models import decoder
from jaxattn.models.load import load_model

PAGE_SIZE = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ContiguousCache:
    """`[1, C, K, D]` keys and values of each layer."""

    layers: tuple
    window_layers: tuple[int, ...] = dataclasses.field(default=(), metadata={"static": True})


def contiguous_attention(q, k, v, cache, layer, metadata, slots, **options):
    """`layers.cached_attention` over `[1, C, K, D]` arrays: slots are positions."""
    softmax_scale, window = options.pop("softmax_scale"), options.pop("sliding_window")
    if options or window is not None:
        raise ValueError(f"the contiguous step knows no {window=} {options}")
    keys, values = (
        jax.lax.dynamic_update_slice_in_dim(
            old, new[None].astype(old.dtype), slots[0].astype(jnp.int32), axis=1
        )
        for old, new in zip(cache.layers[layer], (k, v), strict=True)
    )
    lengths = metadata.seqused_k.astype(jnp.int32)
    out = jax.nn.dot_product_attention(
        q[None], keys, values, scale=softmax_scale, key_value_seq_lengths=lengths
    )
    layers = (*cache.layers[:layer], (keys, values), *cache.layers[layer + 1 :])
    return out[0], ContiguousCache(layers)


def step(config, weights, token, cache, metadata):
    """Logits of one decoded token, and the cache."""
    hidden, cache = decoder.forward(config, weights, token, cache, metadata)
    return decoder.logits(weights, hidden), cache


def measure(source: str, context: int, repeats: int) -> dict[str, float]:
    """Median seconds of a step on either cache, in float32."""
    model = load_model(source, dtype=jnp.float32)
    config = model.program.config
    pages = np.random.default_rng(0).permutation(context // PAGE_SIZE)
    slots = (pages[:, None] * PAGE_SIZE + np.arange(PAGE_SIZE)).reshape(1, -1)
    table = {"page_size": PAGE_SIZE, "req_pool_indices": np.array([0])}
    paged = decode_metadata(seqused_k=np.array([context]), req_to_token=slots, **table)
    plain = decode_metadata(seqused_k=np.array([context]), req_to_token=np.arange(context)[None], **table)

    shape = (config.num_layers, 2, context, config.num_kv_heads, config.head_dim)
    history = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    paged_cache = decoder.allocate_cache(config, num_pages=len(pages), page_size=PAGE_SIZE, dtype=jnp.float32)
    for layer, (k, v) in enumerate(history):
        paged_cache = paged_cache.write(layer, k, v, slots[0])
    contiguous_cache = ContiguousCache(
        tuple(tuple(jnp.asarray(side)[None] for side in pair) for pair in history)
    )

    token = jnp.array([1])

    def compiled(cache, metadata):
        function = jax.jit(functools.partial(step, config), donate_argnums=2)
        return [function.lower(model.weights, token, cache, metadata).compile(), cache, metadata]

    runs = {"paged": compiled(paged_cache, paged)}
    with mock.patch.object(decoder, "cached_attention", contiguous_attention):
        runs["contiguous"] = compiled(contiguous_cache, plain)

    logits, seconds = {}, {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            start = time.perf_counter()
            logits[name], run[1] = jax.block_until_ready(run[0](model.weights, token, run[1], run[2]))
            seconds[name].append(time.perf_counter() - start)
    error = float(jnp.abs(logits["paged"] - logits["contiguous"]).max() / logits["paged"].std())
    # Over random keys rounding alone moves logits by 0.2% of their spread, and one wrong slot by about all of it.
    if not error < 0.02:
        raise SystemExit(f"the two steps disagree: logits differ by {error:.1e} of their spread")
    return {name: float(np.median(times[2:])) for name, times in seconds.items()}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.contiguous", description=__doc__.splitlines()[0])
    parser.add_argument("model", nargs="?", default="smollm2-135m")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=40)
    options = parser.parse_args()
    medians = measure(options.model, options.context, options.repeats)
    for name, seconds in medians.items():
        print(f"{name:11s} {seconds * 1e3:7.2f} ms a step at context {options.context}")
    print(f"ratio       {medians['paged'] / medians['contiguous']:7.3f}")


if __name__ == "__main__":
    main()
