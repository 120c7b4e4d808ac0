"""The Llama family (Llama, Mistral, SmolLM2, Qwen2, Qwen3): configs and tensor names of its checkpoints."""

import dataclasses
import functools
from typing import Any

import numpy as np
from jaxtyping import Shaped

from jaxattn.errors import CheckpointError
from jaxattn.models.checkpoint import TensorFile, TensorNames
from jaxattn.models.config import DecoderConfig, LayerConfig, Rope, linear_divisors, llama3_divisors, required
from jaxattn.models.gguf_header import GGUFHeader

HF_NAMES = TensorNames(
    model={
        "embedding": "model.embed_tokens.weight",
        "final_norm": "model.norm.weight",
        "head": "lm_head.weight",
    },
    layer={
        name: f"model.layers.{{}}.{stored}"
        for name, stored in {
            "attention_norm": "input_layernorm.weight",
            "q": "self_attn.q_proj.weight",
            "k": "self_attn.k_proj.weight",
            "v": "self_attn.v_proj.weight",
            "o": "self_attn.o_proj.weight",
            "q_bias": "self_attn.q_proj.bias",
            "k_bias": "self_attn.k_proj.bias",
            "v_bias": "self_attn.v_proj.bias",
            "q_norm": "self_attn.q_norm.weight",
            "k_norm": "self_attn.k_norm.weight",
            "mlp_norm": "post_attention_layernorm.weight",
            "gate": "mlp.gate_proj.weight",
            "up": "mlp.up_proj.weight",
            "down": "mlp.down_proj.weight",
        }.items()
    },
)
GGUF_NAMES = TensorNames(
    model={"embedding": "token_embd.weight", "final_norm": "output_norm.weight", "head": "output.weight"},
    layer={
        name: f"blk.{{}}.{stored}"
        for name, stored in {
            "attention_norm": "attn_norm.weight",
            "q": "attn_q.weight",
            "k": "attn_k.weight",
            "v": "attn_v.weight",
            "o": "attn_output.weight",
            "q_bias": "attn_q.bias",
            "k_bias": "attn_k.bias",
            "v_bias": "attn_v.bias",
            "q_norm": "attn_q_norm.weight",
            "k_norm": "attn_k_norm.weight",
            "mlp_norm": "ffn_norm.weight",
            "gate": "ffn_gate.weight",
            "up": "ffn_up.weight",
            "down": "ffn_down.weight",
        }.items()
    },
)


def gguf_names(architecture: str) -> TensorNames:
    """Tensor names of a GGUF file; the `llama` architecture stores q and k rows in ggml's interleaved rotary order."""
    if architecture != "llama":
        return GGUF_NAMES
    transforms = {
        "q": lambda rows, config: half_split_order(rows, config.num_heads),
        "k": lambda rows, config: half_split_order(rows, config.num_kv_heads),
    }
    transforms |= {"q_bias": transforms["q"], "k_bias": transforms["k"]}
    return dataclasses.replace(GGUF_NAMES, transforms=transforms)


def half_split_order(rows: Shaped[np.ndarray, "out ..."], heads: int) -> Shaped[np.ndarray, "out ..."]:
    """Reorder each head's rows from `0, half, 1, half + 1, ...`, the interleaved rotary order, to `0, 1, ...`.

    Example:
        >>> import numpy as np
        >>> from jaxattn.models.llama import half_split_order
        >>> half_split_order(np.array([0, 2, 1, 3, 4, 6, 5, 7]), heads=2).tolist()
        [0, 1, 2, 3, 4, 5, 6, 7]
    """
    half = rows.shape[0] // heads // 2
    return rows.reshape(heads, half, 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def config_from_hf(config: dict[str, Any]) -> DecoderConfig:
    """The decoder that a Hugging Face `config.json` of the family declares.

    Raises:
        CheckpointError: a key is missing, or asks for what this decoder does not compute.
    """
    get = functools.partial(required, config, origin="config.json")
    refuse_options(config, {"attention_bias": False, "mlp_bias": False, "hidden_act": "silu"})
    model_type, heads, width = get("model_type"), get("num_attention_heads"), get("hidden_size")
    head_dim = config.get("head_dim") or width // heads
    rope = rope_from_hf(config.get("rope_parameters") or config, config.get("rope_scaling"), head_dim)
    return DecoderConfig(
        architecture=model_type,
        vocab_size=get("vocab_size"),
        hidden_size=width,
        intermediate_size=get("intermediate_size"),
        num_heads=heads,
        num_kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        context_length=get("max_position_embeddings"),
        layers=tuple(LayerConfig(rope, window) for window in _windows_from_hf(config)),
        tied_head=config.get("tie_word_embeddings", False),
        softmax_scale=head_dim**-0.5,
        qk_norm=model_type == "qwen3",
        qkv_bias=model_type == "qwen2",
    )


def rope_from_hf(parameters: dict[str, Any], scaling: dict[str, Any] | None, width: int) -> Rope:
    """The rotary embedding of `rope_parameters`, or of `rope_theta` beside `rope_scaling` in older files.

    Raises:
        CheckpointError: a scaling other than linear and Llama 3's.
    """
    theta = float(parameters.get("rope_theta", 10000.0))
    scaling = scaling or (parameters if "rope_type" in parameters else {})
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return Rope(theta, width)
    if kind == "linear":
        return Rope(theta, width, linear_divisors(width, required(scaling, "factor", "config.json: rope")))
    if kind == "llama3":
        return Rope(theta, width, llama3_divisors(theta, width, scaling))
    raise CheckpointError(f"config.json: rope scaling: expected default, linear or llama3, got {kind!r}")


def refuse_options(config: dict[str, Any], supported: dict[str, Any]) -> None:
    """Raise `CheckpointError` where a key of `config` is set to something else than the supported value."""
    for key, value in supported.items():
        if config.get(key) not in (None, value):
            raise CheckpointError(
                f"config.json: {key}: expected {value!r}, the one supported, got {config[key]!r}"
            )


def config_from_gguf(metadata: dict[str, Any], file: TensorFile) -> DecoderConfig:
    """The decoder that the header of a GGUF file of the family declares.

    Raises:
        CheckpointError: a key is missing, or asks for what this decoder does not compute.
    """
    header = GGUFHeader(metadata, file)
    architecture = header.architecture
    head_dim = header.head_dim()
    rope = Rope(float(header.get("rope.freq_base", 10000.0)), head_dim, header.rope_divisors(head_dim))
    layer = LayerConfig(rope, header.get("attention.sliding_window", None))
    return DecoderConfig(
        **header.sizes(),
        layers=(layer,) * header.get("block_count"),
        softmax_scale=head_dim**-0.5,
        qk_norm=architecture == "qwen3",
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
    )


def _windows_from_hf(config: dict[str, Any]) -> list[int | None]:
    layers = range(required(config, "num_hidden_layers", "config.json"))
    window = config.get("sliding_window")
    if config.get("layer_types"):
        return [window if kind == "sliding_attention" else None for kind in config["layer_types"]]
    if config["model_type"] == "mistral":
        return [window for _ in layers]
    if not config.get("use_sliding_window", False):
        return [None for _ in layers]
    return [window if i >= config.get("max_window_layers", 0) else None for i in layers]
