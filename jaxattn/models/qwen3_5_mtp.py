"""The multi-token-prediction module of Qwen3.5 and Qwen3-Next: one more layer that predicts the token after next."""

import dataclasses
from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int

from jaxattn.errors import CheckpointError, UnsupportedError
from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import AttentionMetadata
from jaxattn.models.layers import Weight, linear, rms_norm, rotation
from jaxattn.models.qwen3_5 import (
    HybridLayerWeights,
    HybridWeights,
    add_mlp,
    gated_attention,
    layer_specs,
    norm_spec,
)
from jaxattn.models.qwen3_5_config import HybridConfig
from jaxattn.models.streaming import Source, WeightSpec, find


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class MtpModuleWeights:
    """What the checkpoint holds under `mtp.`; `fc` takes the embedding's half first, then the hidden state's."""

    fc: Weight
    embedding_norm: Float32[Array, "E"]
    hidden_norm: Float32[Array, "E"]
    layer: HybridLayerWeights
    final_norm: Float32[Array, "E"]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class MtpWeights:
    """The module with the embedding and the head that it shares with its target; `head` None is a tied one."""

    module: MtpModuleWeights
    embedding: Float[Array, "V E"]
    head: Weight | None

    @classmethod
    def share(cls, module: MtpModuleWeights, target: HybridWeights) -> "MtpWeights":
        """The module's weights beside those of its target that it uses."""
        return cls(module, target.embedding, target.head)


def mtp_specs(config: HybridConfig, tensors: Collection[str]) -> MtpModuleWeights:
    """The tensors of the module.

    Raises:
        CheckpointError: the file has none.
        UnsupportedError: the module has more than one layer.
    """
    if config.mtp_layers > 1:
        raise UnsupportedError(
            f"config.json: mtp_num_hidden_layers: expected at most 1, got {config.mtp_layers}"
        )
    if find("mtp.fc.weight", tensors) is None:
        raise CheckpointError(
            "expected a multi-token-prediction module, found no tensor mtp.fc.weight in the shards"
        )
    width = config.hidden_size
    return MtpModuleWeights(
        fc=WeightSpec((width, 2 * width), (Source("mtp.fc.weight", (width, 2 * width)),), linear=True),
        embedding_norm=norm_spec("mtp.pre_fc_norm_embedding", width),
        hidden_norm=norm_spec("mtp.pre_fc_norm_hidden", width),
        layer=layer_specs(config, "mtp.layers.0.", tensors, full=True, sparse=config.moe is not None),
        final_norm=norm_spec("mtp.norm", width),
    )


def allocate_cache(
    config: HybridConfig, *, num_pages: int, page_size: int, dtype=jnp.bfloat16
) -> PagedKVCache:
    """The module's own cache, of its one layer; its pages are numbered like the target's."""
    return PagedKVCache.allocate(
        num_layers=1,
        num_pages=num_pages,
        page_size=page_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=dtype,
    )


def forward(
    config: HybridConfig,
    weights: MtpWeights,
    tokens: Int[Array, "T"],
    hidden: Float[Array, "T E"],
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    /,
    **options: Any,
) -> tuple[Float[Array, "T E"], PagedKVCache]:
    """Hidden states, after the module's norm, that predict what follows `tokens`.

    The token of index i + 1 in the text sits at position i of the module's cache, beside the hidden state of i.

    Args:
        config: of the target; static.
        weights: of the module, with the target's embedding.
        tokens: the token that follows each hidden state.
        hidden: the target's hidden states after its final norm, or the module's own for drafts.
        cache: of `allocate_cache`; donate it.
        metadata: the rows' places in the module's cache.
        **options: further arguments of `unified_attention`.
    """
    w, eps, num_tokens = weights.module, config.rms_norm_eps, tokens.shape[0]
    embedded = weights.embedding[tokens]
    parts = (
        rms_norm(embedded, w.embedding_norm, eps),
        rms_norm(hidden.astype(embedded.dtype), w.hidden_norm, eps),
    )
    x = linear(jnp.concatenate(parts, axis=-1), w.fc)
    turn = rotation(metadata.positions(num_tokens), jnp.asarray(config.rope.inverse_frequencies()))
    normalised = rms_norm(x, w.layer.mixer_norm, eps)
    slots = metadata.slots(num_tokens)
    out, cache = gated_attention(
        config, w.layer.mixer, normalised, cache, 0, metadata, slots, turn, **options
    )
    return rms_norm(add_mlp(config, w.layer, x + out), w.final_norm, eps), cache


def logits(weights: MtpWeights, hidden: Float[Array, "rows E"]) -> Float32[Array, "rows V"]:
    """Scores of the token that follows, by the target's head, in float32."""
    head = weights.embedding if weights.head is None else weights.head
    return linear(hidden.astype(weights.embedding.dtype), head, out_dtype=jnp.float32)


@dataclasses.dataclass(frozen=True)
class MtpDraft:
    """The module as a draft model of `jaxattn.speculative`, whose cycle advances the target's recurrent states.

    Attributes:
        config: of the target.
        options: further arguments of `unified_attention`, as pairs.
    """

    config: HybridConfig
    options: tuple[tuple[str, Any], ...] = ()

    @property
    def position_shift(self) -> int:
        """A token sits beside the hidden state of the token before it."""
        return 1

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return self.config.hidden_size

    def read_target(self, weights, hidden):
        """See `DraftModel.read_target`; it takes them as they are."""
        return hidden

    def forward(self, weights, tokens, hidden, cache, metadata):
        """See `jaxattn.speculative.protocols.DraftModel.forward`."""
        return forward(self.config, weights, tokens, hidden, cache, metadata, **dict(self.options))

    def logits(self, weights, hidden):
        """See `DraftModel.logits`."""
        return logits(weights, hidden)
