"""An EAGLE-style draft head: one decoder layer over the target's hidden states, with the target's own vocabulary.

The token of index i + 1 in the text sits at position i of the head's cache, beside the target's hidden state of i
(EAGLE, arXiv:2401.15077). It predicts what follows that token, and its own output is the hidden state of drafts.
What it takes as the target's hidden state is fused from that and from the inputs of a low, a middle and a high layer
(EAGLE-3, arXiv:2503.01840).
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Float32, Int, Key

from jaxattn.errors import CheckpointError
from jaxattn.kv_cache import PagedKVCache
from jaxattn.metadata import AttentionMetadata
from jaxattn.models import decoder
from jaxattn.models.config import DecoderConfig, LayerConfig
from jaxattn.models.decoder import DecoderWeights, LayerWeights
from jaxattn.models.layers import linear, rms_norm

HEADS = Path(__file__).parent / "heads"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True, kw_only=True)
class EagleHead:
    """What is trained; `fc` takes the embedding's half first, then the hidden state's.

    `features_fc` takes the target's hidden state first, then the inputs of its layers `features(config)`.
    """

    features_norm: Float32[Array, "parts E"]
    features_fc: Float[Array, "E parts*E"]
    fc: Float[Array, "E 2*E"]
    embedding_norm: Float32[Array, "E"]
    hidden_norm: Float32[Array, "E"]
    layer: LayerWeights
    final_norm: Float32[Array, "E"]

    def astype(self, dtype) -> "EagleHead":
        """The head with its matrices in `dtype`; norms stay in float32."""
        return jax.tree.map_with_path(
            lambda path, x: x.astype(jnp.float32 if _is_norm(path) else dtype), self
        )


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class EagleWeights:
    """The head beside the embedding and the vocabulary head of its target, which it shares."""

    module: EagleHead
    embedding: Float[Array, "V E"]
    head: Any

    @classmethod
    def share(cls, module: EagleHead, target: DecoderWeights) -> "EagleWeights":
        """The head with what it uses of its target, in the target's dtype."""
        return cls(module.astype(target.embedding.dtype), target.embedding, target.head)


def features(config: DecoderConfig) -> tuple[int, ...]:
    """Layers of the target whose inputs the head reads beside the hidden states: a low, a middle and a high one.

    Of a model with one or two layers it is the last.
    """
    last = config.num_layers - 1
    return tuple(sorted({min(max(1, round(share * config.num_layers)), last) for share in (0.1, 0.5, 0.9)}))


def head_config(config: DecoderConfig) -> DecoderConfig:
    """The head's one layer: the target's sizes, attending to the whole context."""
    full = [layer for layer in config.layers if layer.sliding_window is None] or config.layers
    return dataclasses.replace(config, layers=(LayerConfig(full[-1].rope),), embedding_scale=1.0)


def init_head(config: DecoderConfig, target: DecoderWeights, key: Key[Array, ""]) -> EagleHead:
    """A head to be trained, in float32: it starts as the target's last layer over its hidden states."""
    width, parts = config.hidden_size, 1 + len(features(config))
    own = jnp.eye(width, dtype=jnp.float32)
    noise, features_noise = (
        jax.random.normal(key, (width, count * width), jnp.float32) * jnp.float32(0.02)
        for key, count in zip(jax.random.split(key), (2, parts), strict=True)
    )
    return EagleHead(
        features_norm=jnp.ones((parts, width), jnp.float32),
        features_fc=features_noise.at[:, :width].add(own),
        fc=noise.at[:, width:].add(own),
        embedding_norm=jnp.ones(width, jnp.float32),
        hidden_norm=jnp.ones(width, jnp.float32),
        # Copies, so that a training step may donate them.
        layer=jax.tree.map(lambda x: jnp.array(x, jnp.float32), target.layers[-1]),
        final_norm=jnp.array(target.final_norm, jnp.float32),
    )


def fuse(config: DecoderConfig, module: EagleHead, hidden: Float[Array, "T parts*E"]) -> Float[Array, "T E"]:
    """Make one hidden state of the target's and its features, each normalised by itself.

    Raises:
        ValueError: the features `features(config)` are not there.
    """
    if hidden.shape[-1] != module.features_fc.shape[1]:
        raise ValueError(
            f"hidden: expected width {module.features_fc.shape[1]}, the target's {config.hidden_size} with the inputs "
            f"of layers {features(config)} behind it, got {hidden.shape[-1]}; give ProgramTarget these features"
        )
    parts = hidden.astype(module.features_fc.dtype).reshape(*hidden.shape[:-1], *module.features_norm.shape)
    normed = rms_norm(parts, module.features_norm, config.rms_norm_eps)
    return linear(normed.reshape(hidden.shape), module.features_fc)


def forward(
    config: DecoderConfig,
    weights: EagleWeights,
    tokens: Int[Array, "T"],
    hidden: Float[Array, "T E"],
    cache: PagedKVCache,
    metadata: AttentionMetadata,
    /,
    **options: Any,
) -> tuple[Float[Array, "T E"], PagedKVCache]:
    """Hidden states that predict what follows `tokens`, and the head's cache.

    Args:
        config: of the target; static.
        weights: the head with what it shares.
        tokens: the token that follows each hidden state.
        hidden: the target's, fused by `fuse`, or the head's own for drafts.
        cache: one layer of the target's KV heads; donate it.
        metadata: places of the rows in the head's cache.
        **options: further arguments of `unified_attention`.
    """
    w, eps = weights.module, config.rms_norm_eps
    embedded = weights.embedding[tokens]
    parts = (
        rms_norm(embedded, w.embedding_norm, eps),
        rms_norm(hidden.astype(embedded.dtype), w.hidden_norm, eps),
    )
    x = linear(jnp.concatenate(parts, axis=-1), w.fc)
    # A decoder looks its inputs up by token; here they are a table of their own.
    rows = DecoderWeights(embedding=x, layers=(w.layer,), final_norm=w.final_norm)
    places = jnp.arange(tokens.shape[0], dtype=jnp.int32)
    return decoder.forward(head_config(config), rows, places, cache, metadata, **options)


def logits(weights: EagleWeights, hidden: Float[Array, "rows E"]) -> Float32[Array, "rows V"]:
    """Scores of the token that follows, by the target's head, in float32."""
    head = weights.embedding if weights.head is None else weights.head
    return linear(hidden.astype(weights.embedding.dtype), head, out_dtype=jnp.float32)


def allocate_cache(
    config: DecoderConfig, *, num_pages: int, page_size: int, dtype=jnp.bfloat16
) -> PagedKVCache:
    """The head's own cache, of its one layer; its pages are numbered like the target's."""
    return decoder.allocate_cache(head_config(config), num_pages=num_pages, page_size=page_size, dtype=dtype)


def head_name(config: DecoderConfig) -> str:
    """What the head of a target is called: its architecture, layers, width and vocabulary.

    A head that was trained for another model of the same sizes drafts worse; it never changes the text.
    """
    return f"{config.architecture}-{config.num_layers}x{config.hidden_size}-{config.vocab_size}"


def find_head(config: DecoderConfig) -> Path:
    """Path of the trained head that the package brings for a target.

    Raises:
        CheckpointError: it brings none.
    """
    path = HEADS / f"{head_name(config)}.safetensors"
    if not path.is_file():
        known = sorted(head.stem for head in HEADS.glob("*.safetensors"))
        raise CheckpointError(
            f"no draft head for {head_name(config)}; there are heads for {', '.join(known) or 'no model'}. "
            "Train one with bench/train_draft_head.py"
        )
    return path


def save_head(path: str | Path, head: EagleHead, notes: dict[str, str]) -> None:
    """Write a head as safetensors, in float16, with notes about how it came to be."""
    import safetensors.numpy

    tensors = {name: np.asarray(value, np.float16) for name, value in _named(head)}
    safetensors.numpy.save_file(tensors, path, metadata=notes)


def load_head(path: str | Path, config: DecoderConfig) -> EagleHead:
    """Read the head of a target, in float32.

    Raises:
        CheckpointError: the file is damaged, or its tensors are not those of a head of this target.
    """
    import safetensors
    import safetensors.numpy

    try:
        tensors = safetensors.numpy.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise CheckpointError(f"{path}: cannot be read as a draft head: {error}") from None
    width, parts = config.hidden_size, 1 + len(features(config))
    norm = jax.ShapeDtypeStruct((width,), jnp.float32)
    shapes = {
        name: jax.ShapeDtypeStruct(shape, jnp.float32)
        for name, shape in decoder.layer_shapes(head_config(config)).items()
    }
    form = EagleHead(
        features_norm=jax.ShapeDtypeStruct((parts, width), jnp.float32),
        features_fc=jax.ShapeDtypeStruct((width, parts * width), jnp.float32),
        fc=jax.ShapeDtypeStruct((width, 2 * width), jnp.float32),
        embedding_norm=norm,
        hidden_norm=norm,
        layer=LayerWeights(**shapes),
        final_norm=norm,
    )

    def read(name, expected):
        found = tensors.get(name)
        if found is None or found.shape != expected.shape:
            raise CheckpointError(
                f"{path}: {name}: expected shape {list(expected.shape)} for a head of {head_name(config)}, "
                f"found {'none' if found is None else list(found.shape)}"
            )
        return jnp.asarray(found, jnp.float32)

    return jax.tree.map_with_path(lambda at, leaf: read(_name(at), leaf), form)


@dataclasses.dataclass(frozen=True)
class EagleDraft:
    """The head as the draft model of the decoding loop.

    Attributes:
        config: of the target.
        options: further arguments of `unified_attention`, as pairs.
    """

    config: DecoderConfig
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
        """See `DraftModel.read_target`; they come with the target's features."""
        return fuse(self.config, weights.module, hidden)

    def forward(self, weights, tokens, hidden, cache, metadata):
        """See `DraftModel.forward`."""
        return forward(self.config, weights, tokens, hidden, cache, metadata, **dict(self.options))

    def logits(self, weights, hidden):
        """See `DraftModel.logits`."""
        return logits(weights, hidden)


def _named(head: EagleHead):
    return [(_name(path), leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(head)]


def _name(path) -> str:
    return ".".join(key.name for key in path)


def _is_norm(path) -> bool:
    return path[-1].name.endswith("norm")
