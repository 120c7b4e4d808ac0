"""The small models of `tests/data`, with what third-party code computes from them, and small GGUF files."""

import functools
import json
from pathlib import Path

import gguf
import ml_dtypes
import numpy as np

from jaxattn.models.load import load_model

DATA = Path(__file__).parent / "data"
# Written by transformers 5.24.0; logits and greedy ids are its own, in float32 with eager attention.
NAMES = ("llama_tiny", "llama3_tiny", "qwen2_tiny", "qwen3_tiny", "gemma3_tiny")
SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_LAYER_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LLAMA_NORMS = {"post_attention_layernorm": "ffn_norm"}
_GEMMA_NORMS = {
    "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
}
_MODEL_NAMES = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


@functools.cache
def load(name):
    return load_model(DATA / name, dtype=np.float32)


@functools.cache
def golden(name):
    with np.load(DATA / name / "golden.npz") as arrays:
        return {key: arrays[key] for key in ("input_ids", "logits", "greedy_ids")}


def prompt(name):
    return golden(name)["input_ids"][0].tolist()


def config(name):
    return json.loads((DATA / name / "config.json").read_text())


@functools.cache
def stored(name):
    """The tensors of the safetensors file, read by hand."""
    raw = (DATA / name / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    header = json.loads(raw[8 : 8 + length])
    header.pop("__metadata__")
    tensors = {}
    for key, entry in header.items():
        begin, end = (8 + length + offset for offset in entry["data_offsets"])
        assert entry["dtype"] == "BF16"
        tensors[key] = (
            np.frombuffer(raw[begin:end], ml_dtypes.bfloat16).reshape(entry["shape"]).astype(np.float32)
        )
    return tensors


def interleave(rows, heads):
    """Rows in ggml's rotary order, written as a loop: 0, half, 1, half + 1, ... of each head."""
    half = rows.shape[0] // heads // 2
    order = [
        head * 2 * half + j + part * half for head in range(heads) for j in range(half) for part in (0, 1)
    ]
    return rows[order]


def write_llama_gguf(path, name="llama_tiny", chat=True):
    """`name` as llama.cpp's converter writes it, with a byte-level tokeniser."""
    settings = config(name)
    writer = gguf.GGUFWriter(path, "llama")
    _add_sizes(writer, settings)
    _add_byte_level(writer, settings["vocab_size"], chat)
    for key, value in stored(name).items():
        base, leaf = key.removesuffix(".weight"), None
        if base.startswith("model.layers."):
            _, _, number, leaf = base.split(".", 3)
            if leaf in ("self_attn.q_proj", "self_attn.k_proj"):
                heads = "num_attention_heads" if "q_proj" in leaf else "num_key_value_heads"
                value = interleave(value, settings[heads])
            base = f"blk.{number}.{(_LAYER_NAMES | _LLAMA_NORMS)[leaf]}"
        writer.add_tensor(f"{_MODEL_NAMES.get(base, base)}.weight", value)
    _write(writer)


def write_gemma_gguf(path, name="gemma3_tiny"):
    """`name` as llama.cpp's converter writes it: norms plus one, rows in the half-split order."""
    settings = config(name)
    writer = gguf.GGUFWriter(path, "gemma3")
    _add_sizes(writer, settings)
    writer.add_sliding_window(settings["sliding_window"])
    _add_byte_level(writer, settings["vocab_size"], chat=False)
    for key, value in stored(name).items():
        base = key.removesuffix(".weight")
        if base.endswith("norm"):
            value = value + 1
        if base.startswith("model.layers."):
            _, _, number, leaf = base.split(".", 3)
            base = f"blk.{number}.{(_LAYER_NAMES | _GEMMA_NORMS)[leaf]}"
        writer.add_tensor(f"{_MODEL_NAMES.get(base, base)}.weight", value)
    _write(writer)


def _add_sizes(writer, settings):
    writer.add_block_count(settings["num_hidden_layers"])
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(settings["num_attention_heads"])
    writer.add_head_count_kv(settings["num_key_value_heads"])
    writer.add_key_length(settings["head_dim"])
    writer.add_value_length(settings["head_dim"])
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    rope = settings["rope_parameters"]
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])


def _add_byte_level(writer, vocab_size, chat):
    tokens = byte_level_tokens(vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(SPECIAL) + [1] * (len(tokens) - len(SPECIAL)))
    writer.add_token_merges(MERGES if len(tokens) > 256 else [])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_add_bos_token(False)
    if chat:
        writer.add_chat_template(CHAT_TEMPLATE)


MERGES = ["h e", "l l", "he ll", "hell o", "Ġ w", "1 2"]


def byte_level_tokens(vocab_size):
    """GPT-2's alphabet of bytes, then the merged pieces, then fillers that no text contains."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in printable]
    alphabet = [chr(byte) for byte in printable] + [chr(256 + i) for i in range(len(others))]
    tokens = [*SPECIAL, *alphabet, *(merge.replace(" ", "") for merge in MERGES)]
    return (tokens + [f"<filler{i}>" for i in range(vocab_size)])[:vocab_size]


def _write(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
