"""Text to token ids and back, from a GGUF header or a `tokenizer.json`."""

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxattn.errors import CheckpointError

if TYPE_CHECKING:
    import tokenizers

# Token types of GGUF, https://github.com/ggml-org/llama.cpp/blob/master/include/llama.h (llama_token_type).
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4
_SPACE = "▁"

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
# What cuts text into words before merging, by `tokenizer.ggml.pre`: a pattern, or None for GPT-2's; digits one by
# one or not.
_GPT2, _DIGITS = (None, False), (None, True)
PRE_TOKENIZERS: dict[str, tuple[str | None, bool]] = {
    "gpt-2": _GPT2,
    "smollm": _DIGITS,
    "starcoder": _DIGITS,
    "refact": _DIGITS,
    "llama-bpe": (rf"{_WORDS}|\p{{N}}{{1,3}}|{_REST}", False),
    "qwen2": (rf"{_WORDS}|\p{{N}}|{_REST}", False),
}


@dataclasses.dataclass(frozen=True)
class TextCodec:
    """A model's tokeniser with what generation needs beside it.

    Attributes:
        tokenizer: text to ids and back; with special tokens it prefixes what the model expects before a raw prompt.
        stop_ids: tokens that end an answer.
        special_tokens: the text of `bos_token` and `eos_token`, for chat templates.
        chat_template: Jinja source, or None for a model that was not made for chat.
    """

    tokenizer: "tokenizers.Tokenizer"
    stop_ids: frozenset[int]
    special_tokens: dict[str, str]
    chat_template: str | None = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Token ids of `text`; without special tokens where the text has them already, as a chat template's does."""
        return self.tokenizer.encode(text, add_special_tokens=add_special_tokens).ids

    def encode_chat(self, prompt: str) -> list[int]:
        """Token ids of a user's `prompt` in the model's chat template, up to where the answer starts.

        Raises:
            ValueError: the model has no chat template.
            CheckpointError: the template cannot be rendered.
        """
        from jaxattn.models.chat import render_chat

        if self.chat_template is None:
            raise ValueError("the model has no chat template; encode the prompt as raw text")
        text = render_chat(self.chat_template, prompt, self.special_tokens)
        return self.encode(text, add_special_tokens=False)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`, special tokens left out."""
        return self.tokenizer.decode(list(ids), skip_special_tokens=True)

    def stream(self, prompt_ids: Sequence[int]) -> "TextStream":
        """A stream of the text that follows `prompt_ids`."""
        return TextStream(self, prompt_ids)


class TextStream:
    """Text of tokens that come one by one: a piece is held back until its bytes are whole characters."""

    # Enough tokens before the text for a decoder that treats the first one specially.
    _CONTEXT = 6

    def __init__(self, codec: TextCodec, prompt_ids: Sequence[int]):
        self._codec = codec
        self._ids = list(prompt_ids[-self._CONTEXT :])
        self._start, self._shown = 0, len(self._ids)

    def push(self, token: int) -> str:
        """The text that `token` completes; empty while a character is incomplete."""
        self._ids.append(token)
        return self._take(final=False)

    def finish(self) -> str:
        """What is still held back, with U+FFFD for bytes that never became a character."""
        return self._take(final=True)

    def _take(self, final: bool) -> str:
        known = self._codec.decode(self._ids[self._start : self._shown])
        text = self._codec.decode(self._ids[self._start :])
        if len(text) <= len(known) or (text.endswith("\ufffd") and not final):
            return ""
        self._start, self._shown = self._shown, len(self._ids)
        return text[len(known) :]


def codec_from_gguf(metadata: dict[str, Any]) -> TextCodec:
    """The tokeniser that a GGUF header holds.

    Raises:
        CheckpointError: the header has none, or one of an unknown kind.
    """
    model = metadata.get("tokenizer.ggml.model")
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    builders = {"gpt2": _byte_level_bpe, "llama": _sentencepiece_bpe}
    if model not in builders or not tokens:
        raise CheckpointError(
            f"tokenizer.ggml.model: expected one of {sorted(builders)} with tokens, got {model!r}"
        )
    tokenizer = builders[model](metadata, tokens)
    _add_special_tokens(tokenizer, tokens, metadata.get("tokenizer.ggml.token_type", []))
    ids = {name: metadata.get(f"tokenizer.ggml.{name}_token_id") for name in ("bos", "eos", "eot")}
    if ids["bos"] is not None and metadata.get("tokenizer.ggml.add_bos_token", model == "llama"):
        _prefix(tokenizer, tokens[ids["bos"]], ids["bos"])
    return TextCodec(
        tokenizer=tokenizer,
        stop_ids=frozenset(ids[name] for name in ("eos", "eot") if ids[name] is not None),
        special_tokens={
            f"{name}_token": tokens[i] for name, i in ids.items() if i is not None and name != "eot"
        },
        chat_template=metadata.get("tokenizer.chat_template"),
    )


def codec_from_folder(folder: Path, config: dict[str, Any]) -> TextCodec | None:
    """The tokeniser of a Hugging Face folder, or None where it has no `tokenizer.json`.

    Args:
        folder: the folder of the checkpoint.
        config: its `config.json`, which names the stop tokens where `generation_config.json` does not.

    Raises:
        CheckpointError: a file of the tokeniser is damaged.
    """
    import tokenizers

    path = folder / "tokenizer.json"
    if not path.is_file():
        return None
    try:
        tokenizer = tokenizers.Tokenizer.from_file(str(path))
        settings = _read_json(folder / "tokenizer_config.json")
        stop = _read_json(folder / "generation_config.json").get("eos_token_id", config.get("eos_token_id"))
    # tokenizers raises plain Exception for a file that it cannot read.
    except Exception as error:
        raise CheckpointError(f"{folder}: damaged tokeniser: {error}") from None
    special = {name: _text(settings[name]) for name in ("bos_token", "eos_token") if settings.get(name)}
    template = folder / "chat_template.jinja"
    stop_ids = set(stop if isinstance(stop, list) else [] if stop is None else [stop])
    if "eos_token" in special:
        stop_ids |= {tokenizer.token_to_id(special["eos_token"])} - {None}
    return TextCodec(
        tokenizer=tokenizer,
        stop_ids=frozenset(stop_ids),
        special_tokens=special,
        chat_template=template.read_text() if template.is_file() else settings.get("chat_template"),
    )


def _byte_level_bpe(metadata: dict[str, Any], tokens: list[str]) -> "tokenizers.Tokenizer":
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre = metadata.get("tokenizer.ggml.pre", "gpt-2")
    if pre not in PRE_TOKENIZERS:
        raise CheckpointError(f"tokenizer.ggml.pre: expected one of {sorted(PRE_TOKENIZERS)}, got {pre!r}")
    pattern, single_digits = PRE_TOKENIZERS[pre]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if single_digits else []
    if pattern is not None:
        steps.append(pre_tokenizers.Split(Regex(pattern), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pattern is None))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentencepiece_bpe(metadata: dict[str, Any], tokens: list[str]) -> "tokenizers.Tokenizer":
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    tokenizer = Tokenizer(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=merges_from_scores(
                tokens, metadata["tokenizer.ggml.scores"], metadata["tokenizer.ggml.token_type"]
            ),
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    spaces = [normalizers.Prepend(_SPACE)] if prefix else []
    tokenizer.normalizer = normalizers.Sequence([*spaces, normalizers.Replace(" ", _SPACE)])
    strip = [decoders.Strip(" ", 1, 0)] if prefix else []
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strip]
    )
    return tokenizer


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int]
) -> list[tuple[str, str]]:
    """The merges of a SentencePiece BPE vocabulary, which stores a score per piece instead.

    SentencePiece joins the neighbours whose joined piece has the best score, so every cut of a piece into two
    pieces is a merge, ranked by the score of the piece.

    Example:
        >>> from jaxattn.models.tokenizer import merges_from_scores
        >>> merges_from_scores(["a", "b", "ab", "abb"], [0.0, 0.0, -2.0, -1.0], [1, 1, 1, 1])
        [('ab', 'b'), ('a', 'b')]
    """
    known = {token for token, kind in zip(tokens, types, strict=True) if kind == _NORMAL}
    ranked = sorted(
        (
            (-score, token)
            for token, score in zip(tokens, scores, strict=True)
            if token in known and len(token) > 1
        ),
        key=lambda entry: entry[0],
    )
    return [
        (token[:cut], token[cut:])
        for _, token in ranked
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in known and token[cut:] in known
    ]


def _add_special_tokens(tokenizer: "tokenizers.Tokenizer", tokens: list[str], types: list[int]) -> None:
    from tokenizers import AddedToken

    kinds = {_UNKNOWN: True, _CONTROL: True, _USER_DEFINED: False}
    tokenizer.add_tokens(
        [
            AddedToken(token, special=kinds[kind], normalized=False)
            for token, kind in zip(tokens, types, strict=False)
            if kind in kinds
        ]
    )


def _prefix(tokenizer: "tokenizers.Tokenizer", token: str, token_id: int) -> None:
    from tokenizers import processors

    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{token} $A", special_tokens=[(token, token_id)]
    )


def _read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text()) if path.is_file() else {}


def _text(token: str | dict[str, Any]) -> str:
    return token if isinstance(token, str) else token["content"]
