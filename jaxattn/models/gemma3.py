"""Gemma 3 (text): configs and tensor names of its checkpoints."""

import dataclasses
import functools
from typing import Any

from jaxattn.models import llama
from jaxattn.models.checkpoint import TensorFile, TensorNames
from jaxattn.models.config import DecoderConfig, LayerConfig, Rope, required
from jaxattn.models.gguf_header import GGUFHeader

# Every sixth layer attends to the whole context.
FULL_LAYER_INTERVAL = 6
LOCAL_ROPE_THETA = 10000.0
_NORMS = (
    "attention_norm",
    "post_attention_norm",
    "mlp_norm",
    "post_mlp_norm",
    "q_norm",
    "k_norm",
    "final_norm",
)

# The norms of a Hugging Face file multiply by `1 + weight`; a GGUF file stores the sum.
HF_NAMES = TensorNames(
    model=llama.HF_NAMES.model,
    layer={
        **llama.HF_NAMES.layer,
        "post_attention_norm": "model.layers.{}.post_attention_layernorm.weight",
        "mlp_norm": "model.layers.{}.pre_feedforward_layernorm.weight",
        "post_mlp_norm": "model.layers.{}.post_feedforward_layernorm.weight",
    },
    transforms={name: lambda weight, config: weight.astype("float32") + 1 for name in _NORMS},
)
GGUF_NAMES = dataclasses.replace(
    llama.GGUF_NAMES,
    layer={
        **llama.GGUF_NAMES.layer,
        "post_attention_norm": "blk.{}.post_attention_norm.weight",
        "post_mlp_norm": "blk.{}.post_ffw_norm.weight",
    },
)


def gguf_names(architecture: str) -> TensorNames:
    """Tensor names of a GGUF file of Gemma 3."""
    return GGUF_NAMES


def config_from_hf(config: dict[str, Any]) -> DecoderConfig:
    """The decoder that a Hugging Face `config.json` of model type `gemma3_text` declares.

    Raises:
        CheckpointError: a key is missing, or asks for what this decoder does not compute.
    """
    get = functools.partial(required, config, origin="config.json")
    supported = {
        "attention_bias": False,
        "hidden_activation": "gelu_pytorch_tanh",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "use_bidirectional_attention": False,
    }
    llama.refuse_options(config, supported)
    head_dim, width = get("head_dim"), get("hidden_size")
    kinds = config.get("layer_types") or [
        "full_attention"
        if _is_full(i, config.get("sliding_window_pattern", FULL_LAYER_INTERVAL))
        else "sliding_attention"
        for i in range(get("num_hidden_layers"))
    ]
    if "rope_parameters" in config:
        ropes = {kind: llama.rope_from_hf(p, None, head_dim) for kind, p in config["rope_parameters"].items()}
    else:
        ropes = {
            "full_attention": llama.rope_from_hf(
                {"rope_theta": 1e6} | config, config.get("rope_scaling"), head_dim
            ),
            "sliding_attention": Rope(config.get("rope_local_base_freq", LOCAL_ROPE_THETA), head_dim),
        }
    windows = {"full_attention": None, "sliding_attention": get("sliding_window")}
    return DecoderConfig(
        architecture="gemma3",
        vocab_size=get("vocab_size"),
        hidden_size=width,
        intermediate_size=get("intermediate_size"),
        num_heads=get("num_attention_heads"),
        num_kv_heads=get("num_key_value_heads"),
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        context_length=get("max_position_embeddings"),
        layers=tuple(LayerConfig(ropes[kind], windows[kind]) for kind in kinds),
        tied_head=config.get("tie_word_embeddings", True),
        softmax_scale=get("query_pre_attn_scalar") ** -0.5,
        **_constants(width),
    )


def config_from_gguf(metadata: dict[str, Any], file: TensorFile) -> DecoderConfig:
    """The decoder that the header of a GGUF file of Gemma 3 declares.

    Raises:
        CheckpointError: a key is missing, or asks for what this decoder does not compute.
    """
    header = GGUFHeader(metadata, file)
    sizes = header.sizes()
    head_dim = sizes["head_dim"]
    full = LayerConfig(
        Rope(float(header.get("rope.freq_base", 1e6)), head_dim, header.rope_divisors(head_dim))
    )
    local_theta = float(header.get("rope.freq_base_swa", LOCAL_ROPE_THETA))
    local = LayerConfig(Rope(local_theta, head_dim), header.get("attention.sliding_window"))
    num_layers = header.get("block_count")
    # The 27B model alone scales by its width per head; its header does not say so.
    scaled_width = sizes["hidden_size"] // sizes["num_heads"] if num_layers == 62 else head_dim
    return DecoderConfig(
        **sizes,
        layers=tuple(full if _is_full(i, FULL_LAYER_INTERVAL) else local for i in range(num_layers)),
        softmax_scale=scaled_width**-0.5,
        **_constants(sizes["hidden_size"]),
    )


def _is_full(layer: int, interval: int) -> bool:
    return (layer + 1) % interval == 0


def _constants(hidden_size: int) -> dict[str, Any]:
    return {
        "activation": "gelu_tanh",
        "embedding_scale": float(hidden_size) ** 0.5,
        "qk_norm": True,
        "post_norms": True,
    }
