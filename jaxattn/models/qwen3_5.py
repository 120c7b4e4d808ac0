"""Qwen3.5 and Qwen3-Next, dense and mixture of experts: gated full attention between gated delta nets."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Int64

from jaxattn.errors import UnsupportedError
from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import AttentionMetadata
from jaxattn.models.delta_net import DeltaNetWeights, delta_net, delta_net_specs
from jaxattn.models.hybrid_cache import HybridCache
from jaxattn.models.layers import Weight, cached_attention, linear, rms_norm, rotate, rotation, share_plan
from jaxattn.models.moe import MlpWeights, MoeWeights, gated_mlp, mlp_specs, moe, moe_specs
from jaxattn.models.qwen3_5_config import LINEAR, HybridConfig
from jaxattn.models.qwen3_5_config import config_from_hf as config_from_hf
from jaxattn.models.sequence_rows import sequence_rows
from jaxattn.models.streaming import Source, WeightSpec


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class GatedAttentionWeights:
    """Weights of a full attention layer; the rows of `q` are, head after head, a query and its gate."""

    q: Weight
    k: Weight
    v: Weight
    o: Weight
    q_norm: Float32[Array, "D"]
    k_norm: Float32[Array, "D"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridLayerWeights:
    """Weights of one layer."""

    mixer_norm: Float32[Array, "E"]
    mixer: GatedAttentionWeights | DeltaNetWeights
    mlp_norm: Float32[Array, "E"]
    mlp: MlpWeights | MoeWeights


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridWeights:
    """Weights of a hybrid decoder; `head` is None where it is tied to the embedding."""

    embedding: Float[Array, "V E"]
    layers: tuple[HybridLayerWeights, ...]
    final_norm: Float32[Array, "E"]
    head: Weight | None = None


def norm_spec(name: str, width: int) -> WeightSpec:
    """A zero-centred norm, which multiplies by 1 + the stored weight."""
    source = Source(f"{name}.weight", (width,))
    return WeightSpec((width,), (source,), dtype=jnp.float32, transform=lambda w: w.astype(np.float32) + 1)


def weight_specs(config: HybridConfig, tensors: Collection[str]) -> HybridWeights:
    """The tensors of a decoder.

    Args:
        config: what the checkpoint declares.
        tensors: the names in the file, which tell whether its experts are stacked.
    """
    vocabulary = (config.vocab_size, config.hidden_size)
    head = WeightSpec(vocabulary, (Source("lm_head.weight", vocabulary),), linear=True)
    return HybridWeights(
        embedding=WeightSpec(vocabulary, (Source("model.embed_tokens.weight", vocabulary),)),
        layers=tuple(
            layer_specs(
                config,
                f"model.layers.{i}.",
                tensors,
                full=kind != LINEAR,
                sparse=i in config.sparse_layers,
            )
            for i, kind in enumerate(config.layer_types)
        ),
        final_norm=norm_spec("model.norm", config.hidden_size),
        head=None if config.tied_head else head,
    )


def layer_specs(
    config: HybridConfig, prefix: str, tensors: Collection[str], *, full: bool, sparse: bool
) -> HybridLayerWeights:
    """The tensors of the layer whose names start with `prefix`."""
    width = config.hidden_size
    if full:
        mixer = _attention_specs(config, f"{prefix}self_attn.")
    else:
        mixer = delta_net_specs(config.delta_net, width, f"{prefix}linear_attn.", config.fused_projections)
    if sparse:
        mlp = moe_specs(config.moe, width, f"{prefix}mlp.", tensors)
    else:
        mlp = mlp_specs(width, config.intermediate_size, f"{prefix}mlp.")
    return HybridLayerWeights(
        mixer_norm=norm_spec(f"{prefix}input_layernorm", width),
        mixer=mixer,
        mlp_norm=norm_spec(f"{prefix}post_attention_layernorm", width),
        mlp=mlp,
    )


def _attention_specs(config: HybridConfig, prefix: str) -> GatedAttentionWeights:
    def matrix(name: str, *shape: int) -> WeightSpec:
        return WeightSpec(shape, (Source(f"{prefix}{name}.weight", shape),), linear=True)

    width, head = config.hidden_size, config.head_dim
    return GatedAttentionWeights(
        q=matrix("q_proj", 2 * config.num_heads * head, width),
        k=matrix("k_proj", config.num_kv_heads * head, width),
        v=matrix("v_proj", config.num_kv_heads * head, width),
        o=matrix("o_proj", width, config.num_heads * head),
        q_norm=norm_spec(f"{prefix}q_norm", head),
        k_norm=norm_spec(f"{prefix}k_norm", head),
    )


def forward(
    config: HybridConfig,
    weights: HybridWeights,
    tokens: Int[Array, "T"],
    cache: HybridCache,
    metadata: AttentionMetadata,
    /,
    **options: Any,
) -> tuple[Float[Array, "T E"], HybridCache]:
    """Hidden states of this call's tokens after the final norm, and the cache with what they add to it.

    In `target_verify` mode the recurrent states stay where they were until `HybridCache.commit`.

    Args:
        config: static.
        weights: of `config`; the dtype of the embedding is the dtype of the computation.
        tokens: token ids of the query rows that `metadata` describes; rows of padding may hold any id.
        cache: donate it. Its states have a row for each sequence of `metadata`.
        metadata: the batch, in any forward mode; draft trees have no recurrent form.
        **options: further arguments of `unified_attention`: `implementation`, `batch_invariant`, `config`.

    Raises:
        UnsupportedError: the metadata has a draft tree.
        ValueError: a verify step is pending, or the states are of another number of sequences.
    """
    _check(cache, metadata)
    num_tokens = tokens.shape[0]
    hold = metadata.mode == "target_verify"
    rows, slots = sequence_rows(metadata), metadata.slots(num_tokens)
    turn = rotation(metadata.positions(num_tokens), jnp.asarray(config.rope.inverse_frequencies()))
    kv, states, pending = cache.kv, [], []
    x = weights.embedding[tokens]
    q_rows = jax.ShapeDtypeStruct((num_tokens, config.num_heads, config.head_dim), x.dtype)
    windows = dict.fromkeys(range(len(config.full_layers)))
    metadata = share_plan(metadata, q_rows, kv, windows, **options)
    for i, w in enumerate(weights.layers):
        normalised = rms_norm(x, w.mixer_norm, config.rms_norm_eps)
        if config.layer_types[i] == LINEAR:
            out, state, steps = delta_net(
                config.delta_net,
                w.mixer,
                normalised,
                cache.states[len(states)],
                rows,
                eps=config.rms_norm_eps,
                hold=hold,
            )
            states.append(state)
            pending.append(steps)
        else:
            layer = config.full_layers.index(i)
            out, kv = gated_attention(
                config, w.mixer, normalised, kv, layer, metadata, slots, turn, **options
            )
        x = add_mlp(config, w, x + out)
    hidden = rms_norm(x, weights.final_norm, config.rms_norm_eps)
    return hidden, HybridCache(kv, tuple(states), tuple(pending) if hold else None)


def gated_attention(
    config: HybridConfig,
    w: GatedAttentionWeights,
    x: Float[Array, "T E"],
    kv: PagedKVCache,
    layer: int,
    metadata: AttentionMetadata,
    slots: Int64[Array, "T"],
    turn: tuple[Float32[Array, "T half"], Float32[Array, "T half"]],
    **options: Any,
) -> tuple[Float[Array, "T E"], PagedKVCache]:
    """Full attention with normalised queries and keys, partial rotary embedding and a sigmoid gate on its output."""
    num_tokens, eps = x.shape[0], config.rms_norm_eps
    q, gate = jnp.split(linear(x, w.q).reshape(num_tokens, config.num_heads, -1), 2, axis=-1)
    k, v = (linear(x, weight).reshape(num_tokens, config.num_kv_heads, -1) for weight in (w.k, w.v))
    out, kv = cached_attention(
        rotate(rms_norm(q, w.q_norm, eps), *turn),
        rotate(rms_norm(k, w.k_norm, eps), *turn),
        v,
        kv,
        layer,
        metadata,
        slots,
        softmax_scale=config.head_dim**-0.5,
        **options,
    )
    return linear((out * jax.nn.sigmoid(gate)).reshape(num_tokens, -1), w.o), kv


def add_mlp(config: HybridConfig, w: HybridLayerWeights, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
    """The residual sum with the layer's MLP."""
    normalised = rms_norm(x, w.mlp_norm, config.rms_norm_eps)
    if isinstance(w.mlp, MoeWeights):
        return x + moe(config.moe, w.mlp, normalised)
    return x + gated_mlp(w.mlp, normalised)


def logits(weights: HybridWeights, hidden: Float[Array, "rows E"]) -> Float32[Array, "rows V"]:
    """Scores of the next token from rows of `forward`'s hidden states, in float32."""
    return linear(hidden, weights.embedding if weights.head is None else weights.head, out_dtype=jnp.float32)


def _check(cache: HybridCache, metadata: AttentionMetadata) -> None:
    if metadata.ancestors is not None:
        raise UnsupportedError(
            "ancestors: expected a chain of draft tokens, got a tree; a recurrent state follows one path"
        )
    if cache.pending is not None:
        raise ValueError(
            "cache: expected committed states, got a pending verify step; call cache.commit(accepted)"
        )
    for state in cache.states:
        if state.recurrent.shape[0] != metadata.num_seqs:
            raise ValueError(
                f"cache: expected states of the {metadata.num_seqs} sequences of metadata, got "
                f"{state.recurrent.shape[0]}"
            )
