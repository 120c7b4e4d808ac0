"""A decoder over a paged cache: its weights as a pytree and one pure forward function.

One computation serves the Llama family and Gemma 3; what differs between them is data in `DecoderConfig`.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Float32, Int

from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import AttentionMetadata
from jaxattn.models.checkpoint import NamedTensors
from jaxattn.models.config import DecoderConfig
from jaxattn.models.layers import Weight, cached_attention, linear, rms_norm, rotate, rotation, share_plan

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerWeights:
    """Weights of one layer; linear ones are `[out, in]`, norms are in float32."""

    attention_norm: Float32[Array, "E"]
    q: Weight
    k: Weight
    v: Weight
    o: Weight
    mlp_norm: Float32[Array, "E"]
    gate: Weight
    up: Weight
    down: Weight
    q_norm: Float32[Array, "D"] | None = None
    k_norm: Float32[Array, "D"] | None = None
    q_bias: Float[Array, "H*D"] | None = None
    k_bias: Float[Array, "K*D"] | None = None
    v_bias: Float[Array, "K*D"] | None = None
    post_attention_norm: Float32[Array, "E"] | None = None
    post_mlp_norm: Float32[Array, "E"] | None = None


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class DecoderWeights:
    """Weights of a decoder; `head` is None where it is tied to the embedding."""

    embedding: Float[Array, "V E"]
    layers: tuple[LayerWeights, ...]
    final_norm: Float32[Array, "E"]
    head: Weight | None = None


def layer_shapes(config: DecoderConfig) -> dict[str, tuple[int, ...]]:
    """Shape of each weight that a layer of `config` has, by its name in `LayerWeights`."""
    width, inner = config.hidden_size, config.intermediate_size
    q_width, kv_width = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "attention_norm": (width,),
        "q": (q_width, width),
        "k": (kv_width, width),
        "v": (kv_width, width),
        "o": (width, q_width),
        "mlp_norm": (width,),
        "gate": (inner, width),
        "up": (inner, width),
        "down": (width, inner),
    }
    if config.qk_norm:
        shapes |= {"q_norm": (config.head_dim,), "k_norm": (config.head_dim,)}
    if config.qkv_bias:
        shapes |= {"q_bias": (q_width,), "k_bias": (kv_width,), "v_bias": (kv_width,)}
    if config.post_norms:
        shapes |= {"post_attention_norm": (width,), "post_mlp_norm": (width,)}
    return shapes


def num_weights(config: DecoderConfig) -> int:
    """Number of weights of a decoder."""
    per_layer = sum(math.prod(shape) for shape in layer_shapes(config).values())
    embeddings = (1 if config.tied_head else 2) * config.vocab_size * config.hidden_size
    return config.num_layers * per_layer + embeddings + config.hidden_size


def allocate_cache(
    config: DecoderConfig, *, num_pages: int, page_size: int, dtype, num_seqs: int | None = None, **descales
) -> PagedKVCache:
    """A cache of zeros for `config`; `k_descale` and `v_descale` are those of `PagedKVCache.allocate`.

    `num_seqs` is for programs with a state by sequence. Pages belong to whoever a table names, so that it is free here.
    """
    return PagedKVCache.allocate(
        num_layers=config.num_layers,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
        **descales,
    )


def load_weights(
    config: DecoderConfig, tensors: NamedTensors, dtype, loaded: Callable[[int], None] = lambda count: None
) -> DecoderWeights:
    """Read the weights of `config` into device arrays, one tensor at a time.

    Args:
        config: what the checkpoint's header declares.
        tensors: the checkpoint.
        dtype: of the matrices and biases; norms are float32.
        loaded: called with the number of elements of each tensor that has been read.

    Raises:
        CheckpointError: a tensor is missing or has another shape than `config` says.
    """

    def read(name: str, shape: tuple[int, ...], layer: int | None = None):
        host = tensors.read(name, shape, layer)
        loaded(host.size)
        return jnp.asarray(host, dtype=jnp.float32 if name.endswith("norm") else dtype)

    shapes = layer_shapes(config)
    vocabulary = (config.vocab_size, config.hidden_size)
    return DecoderWeights(
        embedding=read("embedding", vocabulary),
        layers=tuple(
            LayerWeights(**{name: read(name, shape, i) for name, shape in shapes.items()})
            for i in range(config.num_layers)
        ),
        final_norm=read("final_norm", (config.hidden_size,)),
        head=None if config.tied_head else read("head", vocabulary),
    )


def forward(
    config: DecoderConfig,
    weights: DecoderWeights,
    tokens: Int[Array, "T"],
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    /,
    *,
    features: tuple[int, ...] = (),
    **options: Any,
) -> tuple[Float[Array, "T E"], PagedKVCache]:
    """Hidden states of this call's tokens after the final norm, and the cache with their keys and values.

    Args:
        config: static.
        weights: of `config`; their dtype is the dtype of the computation.
        tokens: token ids of the query rows that `metadata` describes; rows of padding may hold any id.
        cache: donate it.
        metadata: the batch, in any forward mode. Where `cache.window_layers` is not empty it needs the tables of
            the window pool.
        features: layers, ascending, whose inputs follow the hidden states: `[T, (1 + features) * E]`. `logits`
            takes both forms.
        **options: further arguments of `unified_attention`: `implementation`, `batch_invariant`, `config`. With
            `batch_invariant` layers are compiled apart, so that `features` change no bit of the hidden states.

    Raises:
        ValueError: `features` are not layers of the model, or not in order.
    """
    if list(features) != sorted(set(features) & set(range(config.num_layers))):
        raise ValueError(
            f"features: expected layers in [0, {config.num_layers}), each once and ascending, got {features}"
        )
    num_tokens = tokens.shape[0]
    positions = metadata.positions(num_tokens)
    rotations = {
        rope: rotation(positions, jnp.asarray(rope.inverse_frequencies()))
        for rope in {layer.rope for layer in config.layers}
    }
    x = weights.embedding[tokens]
    q_rows = jax.ShapeDtypeStruct((num_tokens, config.num_heads, config.head_dim), x.dtype)
    pools, slots = {}, {}
    for in_window in (False, True) if cache.window_layers else (False,):
        pool = metadata.for_window_pool() if in_window else metadata
        windows = {
            i: layer.sliding_window
            for i, layer in enumerate(config.layers)
            if (i in cache.window_layers) == in_window
        }
        pools[in_window] = share_plan(pool, q_rows, cache, windows, **options)
        slots[in_window] = pool.slots(num_tokens)

    # A compiler that fuses a layer with whatever reads its input may round in other places.
    apart = lax.optimization_barrier if options.get("batch_invariant") else lambda x: x
    x = x * jnp.asarray(config.embedding_scale, x.dtype)
    seen = []
    for i, (layer, w) in enumerate(zip(config.layers, weights.layers, strict=True)):
        x = apart(x)
        if i in features:
            seen.append(x)
        in_window = i in cache.window_layers
        q, k, v = _qkv(config, w, rms_norm(x, w.attention_norm, config.rms_norm_eps))
        out, cache = cached_attention(
            rotate(q, *rotations[layer.rope]),
            rotate(k, *rotations[layer.rope]),
            v,
            cache,
            i,
            pools[in_window],
            slots[in_window],
            softmax_scale=config.softmax_scale,
            sliding_window=layer.sliding_window,
            **options,
        )
        out = linear(out.reshape(num_tokens, -1), w.o)
        x = x + _post_norm(out, w.post_attention_norm, config.rms_norm_eps)
        out = _mlp(config, w, rms_norm(x, w.mlp_norm, config.rms_norm_eps))
        x = x + _post_norm(out, w.post_mlp_norm, config.rms_norm_eps)
    hidden = apart(rms_norm(apart(x), weights.final_norm, config.rms_norm_eps))
    return jnp.concatenate([hidden, *seen], axis=-1) if seen else hidden, cache


def logits(weights: DecoderWeights, hidden: Float[Array, "rows E"]) -> Float32[Array, "rows V"]:
    """Scores of the next token from rows of `forward`'s hidden states, in float32."""
    head = weights.embedding if weights.head is None else weights.head
    # The product is the same whether features follow or not.
    hidden = lax.optimization_barrier(hidden[:, : weights.embedding.shape[1]])
    return linear(hidden, head, out_dtype=jnp.float32)


def _qkv(config: DecoderConfig, w: LayerWeights, x: Float[Array, "T E"]):
    q, k, v = (
        linear(x, weight, bias).reshape(x.shape[0], -1, config.head_dim)
        for weight, bias in ((w.q, w.q_bias), (w.k, w.k_bias), (w.v, w.v_bias))
    )
    if config.qk_norm:
        q, k = rms_norm(q, w.q_norm, config.rms_norm_eps), rms_norm(k, w.k_norm, config.rms_norm_eps)
    return q, k, v


def _mlp(config: DecoderConfig, w: LayerWeights, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
    return linear(ACTIVATIONS[config.activation](linear(x, w.gate)) * linear(x, w.up), w.down)


def _post_norm(x: Float[Array, "T E"], weight: Float32[Array, "E"] | None, eps: float) -> Float[Array, "T E"]:
    return x if weight is None else rms_norm(x, weight, eps)
