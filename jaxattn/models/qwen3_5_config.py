"""HybridConfig: Qwen3.5 and Qwen3-Next decoders, dense and mixture of experts, as static data."""

import dataclasses
import functools
from typing import Any

from jaxattn.errors import CheckpointError
from jaxattn.models.config import Rope, required
from jaxattn.models.llama import refuse_options, rope_from_hf

LINEAR, FULL = "linear_attention", "full_attention"
MODEL_TYPES = ("qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")


@dataclasses.dataclass(frozen=True)
class DeltaNetConfig:
    """Sizes of a gated delta net."""

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    conv_taps: int

    def __post_init__(self):
        if self.num_value_heads % self.num_key_heads:
            raise CheckpointError(
                f"config.json: linear_num_value_heads: expected a multiple of the {self.num_key_heads} key heads, got "
                f"{self.num_value_heads}"
            )

    @property
    def key_width(self) -> int:
        """Width of all keys, and of all queries."""
        return self.num_key_heads * self.key_dim

    @property
    def value_width(self) -> int:
        """Width of all values."""
        return self.num_value_heads * self.value_dim

    @property
    def conv_width(self) -> int:
        """Channels of the causal convolution: queries, keys, values."""
        return 2 * self.key_width + self.value_width


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Sizes of a sparse MLP; `normalise` makes the weights of a token's experts sum to 1."""

    num_experts: int
    num_experts_per_token: int
    expert_size: int
    shared_size: int
    normalise: bool


@dataclasses.dataclass(frozen=True, kw_only=True)
class HybridConfig:
    """A decoder of delta net and full attention layers; hashable, a static argument of a jitted step.

    Attributes:
        layer_types: linear_attention or full_attention for each layer.
        sparse_layers: layers whose MLP is a mixture of experts.
        fused_projections: whether the delta net's projections are stored fused, as Qwen3-Next does.
        mtp_layers: layers of the multi-token-prediction module in the checkpoint, 0 for none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    context_length: int
    rope: Rope
    layer_types: tuple[str, ...]
    delta_net: DeltaNetConfig
    moe: MoeConfig | None
    sparse_layers: tuple[int, ...]
    tied_head: bool
    fused_projections: bool
    mtp_layers: int

    def __post_init__(self):
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"config.json: num_attention_heads: expected a multiple of the {self.num_kv_heads} KV heads, got "
                f"{self.num_heads}"
            )

    @property
    def num_layers(self) -> int:
        """Number of decoder layers."""
        return len(self.layer_types)

    @property
    def full_layers(self) -> tuple[int, ...]:
        """The layers with full attention, in the order of their KV cache layers."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == FULL)

    @property
    def linear_layers(self) -> tuple[int, ...]:
        """The layers with a delta net, in the order of their recurrent states."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == LINEAR)


def config_from_hf(config: dict[str, Any]) -> HybridConfig:
    """The decoder that a Hugging Face `config.json` declares, in `text_config` where it is multimodal.

    Raises:
        CheckpointError: a key is missing, or asks for what this decoder does not compute.
    """
    text = config.get("text_config", config)
    get = functools.partial(required, text, origin="config.json")
    model_type = get("model_type")
    if model_type not in MODEL_TYPES:
        raise CheckpointError(
            f"config.json: model_type: expected one of {', '.join(MODEL_TYPES)}, got {model_type!r}"
        )
    refuse_options(text, {"attention_bias": False, "hidden_act": "silu", "attn_output_gate": True})
    parameters = text.get("rope_parameters") or text
    fraction = parameters.get("partial_rotary_factor", text.get("partial_rotary_factor", 0.25))
    head_dim, num_layers = get("head_dim"), get("num_hidden_layers")
    moe = _moe(text) if text.get("num_experts") else None
    return HybridConfig(
        architecture=model_type,
        vocab_size=get("vocab_size"),
        hidden_size=get("hidden_size"),
        intermediate_size=text.get("intermediate_size", 0) if moe else get("intermediate_size"),
        num_heads=get("num_attention_heads"),
        num_kv_heads=get("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        context_length=get("max_position_embeddings"),
        rope=rope_from_hf(parameters, text.get("rope_scaling"), int(head_dim * fraction)),
        layer_types=_layer_types(text, num_layers),
        delta_net=DeltaNetConfig(
            num_key_heads=get("linear_num_key_heads"),
            num_value_heads=get("linear_num_value_heads"),
            key_dim=get("linear_key_head_dim"),
            value_dim=get("linear_value_head_dim"),
            conv_taps=get("linear_conv_kernel_dim"),
        ),
        moe=moe,
        sparse_layers=_sparse_layers(text, num_layers) if moe else (),
        tied_head=config.get("tie_word_embeddings", text.get("tie_word_embeddings", False)),
        fused_projections=model_type == "qwen3_next",
        mtp_layers=text.get("mtp_num_hidden_layers", 1 if model_type == "qwen3_next" else 0),
    )


def _moe(text: dict[str, Any]) -> MoeConfig:
    get = functools.partial(required, text, origin="config.json")
    return MoeConfig(
        num_experts=get("num_experts"),
        num_experts_per_token=get("num_experts_per_tok"),
        expert_size=get("moe_intermediate_size"),
        shared_size=get("shared_expert_intermediate_size"),
        normalise=text.get("norm_topk_prob", True),
    )


def _layer_types(text: dict[str, Any], num_layers: int) -> tuple[str, ...]:
    interval = text.get("full_attention_interval", 4)
    kinds = text.get("layer_types") or [
        FULL if (i + 1) % interval == 0 else LINEAR for i in range(num_layers)
    ]
    if len(kinds) != num_layers or set(kinds) - {LINEAR, FULL}:
        raise CheckpointError(
            f"config.json: layer_types: expected {LINEAR} or {FULL} for each of the {num_layers} layers, got {kinds}"
        )
    return tuple(kinds)


def _sparse_layers(text: dict[str, Any], num_layers: int) -> tuple[int, ...]:
    step, dense = text.get("decoder_sparse_step", 1), text.get("mlp_only_layers") or ()
    return tuple(i for i in range(num_layers) if i not in dense and (i + 1) % step == 0)
