"""Tokenisers built from GGUF headers, incremental decoding, and chat templates."""

import json

import pytest
import tiny_models

from jaxattn.errors import CheckpointError
from jaxattn.models.chat import render_chat
from jaxattn.models.tokenizer import codec_from_folder, codec_from_gguf, merges_from_scores


def byte_level(**changes):
    tokens = tiny_models.byte_level_tokens(300)
    metadata = {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "token_type": [3] * len(tiny_models.SPECIAL) + [1] * (len(tokens) - len(tiny_models.SPECIAL)),
        "merges": tiny_models.MERGES,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


SPM_PIECES = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "  ", "<tag>"]
SPM_WORDS = ["▁", "h", "e", "l", "o", "w", "he", "ll", "hell", "hello", "▁hello", "lo"]


def sentencepiece(**changes):
    tokens = SPM_PIECES + SPM_WORDS
    # Lower is later; "lo" is the worst, so "hello" never splits into hel + lo.
    scores = [0.0] * len(SPM_PIECES) + [-float(i) for i in range(len(SPM_WORDS))]
    metadata = {
        "model": "llama",
        "tokens": tokens,
        "scores": scores,
        "token_type": [2, 3, 3, *[6] * 256, 4, 4, *[1] * len(SPM_WORDS)],
        "unknown_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "add_bos_token": True,
        "add_space_prefix": False,
        **changes,
    }
    return {f"tokenizer.ggml.{key}": value for key, value in metadata.items()}


def pieces(codec, text, **options):
    return [codec.tokenizer.id_to_token(i) for i in codec.encode(text, **options)]


def test_smollm_splits_digits_one_by_one():
    codec = codec_from_gguf(byte_level())
    assert pieces(codec, "hello world 12") == ["hello", "Ġw", "o", "r", "l", "d", "Ġ", "1", "2"]
    assert codec.stop_ids == {2}


def test_gpt2_keeps_digits_together():
    assert pieces(codec_from_gguf(byte_level(pre="gpt-2")), "a12") == ["a", "12"]


def test_llama3_takes_a_piece_of_the_vocabulary_whole():
    metadata = byte_level(pre="llama-bpe", merges=["h e"])
    assert pieces(codec_from_gguf(metadata), "hello") == ["hello"]
    assert pieces(codec_from_gguf({**metadata, "tokenizer.ggml.pre": "gpt-2"}), "hello")[0] == "he"


def test_special_tokens_in_the_text_are_single_tokens():
    codec = codec_from_gguf(byte_level())
    ids = codec.encode("<|im_start|>hello<|im_end|>")
    assert ids == [1, codec.tokenizer.token_to_id("hello"), 2]
    assert codec.decode(ids) == "hello"


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes():
    codec = codec_from_gguf(sentencepiece())
    assert pieces(codec, "hello hello") == ["<s>", "hello", "▁hello"]
    assert pieces(codec, "é", add_special_tokens=False) == ["<0xC3>", "<0xA9>"]
    assert pieces(codec, "he  <tag>lo", add_special_tokens=False) == ["he", "  ", "<tag>", "lo"]
    for text in ("hello hello", "hé  <tag>lo 語", " hello"):
        assert codec.decode(codec.encode(text)) == text


def test_sentencepiece_with_a_space_prefix():
    codec = codec_from_gguf(sentencepiece(add_space_prefix=True, add_bos_token=False))
    assert pieces(codec, "hello") == ["▁hello"]
    assert codec.decode(codec.encode("hello")) == "hello"


def test_merges_are_ranked_by_the_score_of_the_piece():
    tokens, scores = ["a", "b", "c", "ab", "bc", "abc", "<x>"], [0.0, 0.0, 0.0, -3.0, -1.0, -2.0, 0.0]
    assert merges_from_scores(tokens, scores, [1, 1, 1, 1, 1, 1, 4]) == [
        ("b", "c"),
        ("ab", "c"),
        ("a", "bc"),
        ("a", "b"),
    ]


@pytest.mark.parametrize("metadata", [byte_level(), sentencepiece()], ids=["byte_level", "sentencepiece"])
@pytest.mark.parametrize("text", ["naïve 日本語 🙂", "👩‍👩‍👧 x", "hello world", "\n\n tab\t"])
def test_a_stream_gives_whole_characters_and_the_same_text(metadata, text):
    codec = codec_from_gguf(metadata)
    ids = codec.encode(text, add_special_tokens=False)
    stream = codec.stream([])
    parts = [stream.push(token) for token in ids]
    assert "".join(parts) + stream.finish() == text == codec.decode(ids)
    assert not any("\ufffd" in part for part in parts)


def test_a_stream_gives_up_bytes_that_never_become_a_character():
    codec = codec_from_gguf(sentencepiece())
    stream = codec.stream(codec.encode("hello"))
    assert stream.push(codec.tokenizer.token_to_id("<0xC3>")) == ""
    assert stream.finish() == "\ufffd"
    assert stream.finish() == ""


def test_a_stream_keeps_the_space_that_a_decoder_strips_at_the_start_of_a_text():
    codec = codec_from_gguf(sentencepiece(add_space_prefix=True, add_bos_token=False))
    prompt = codec.encode("hello")
    assert codec.stream(prompt).push(codec.tokenizer.token_to_id("▁hello")) == " hello"


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        ({}, r"tokenizer\.ggml\.model: expected one of \['gpt2', 'llama'\] with tokens, got None"),
        (byte_level(model="bert"), "got 'bert'"),
        (byte_level(pre="tekken"), r"tokenizer\.ggml\.pre: expected one of .*smollm.*, got 'tekken'"),
    ],
)
def test_an_unknown_tokeniser_is_refused(metadata, message):
    with pytest.raises(CheckpointError, match=message):
        codec_from_gguf(metadata)


def test_a_folder_has_its_tokeniser_in_files(tmp_path):
    assert codec_from_folder(tmp_path, {}) is None
    built = codec_from_gguf(byte_level())
    built.tokenizer.save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": {"content": "<|im_start|>"}, "eos_token": "<|im_end|>", "chat_template": "old"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    codec = codec_from_folder(tmp_path, {"eos_token_id": 0})
    assert codec.encode("hello 1") == built.encode("hello 1")
    assert codec.stop_ids == {0, 2}
    assert codec.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert codec.chat_template == "old"
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [2, 5]}')
    (tmp_path / "chat_template.jinja").write_text("new")
    codec = codec_from_folder(tmp_path, {"eos_token_id": 0})
    assert (codec.stop_ids, codec.chat_template) == ({2, 5}, "new")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged tokeniser"):
        codec_from_folder(tmp_path, {})


def test_a_chat_prompt_is_encoded_through_the_template():
    metadata = {**byte_level(), "tokenizer.chat_template": tiny_models.CHAT_TEMPLATE}
    codec = codec_from_gguf(metadata)
    assert codec.decode(codec.encode_chat("hello")) == "user\nhello\nassistant\n"
    with pytest.raises(ValueError, match="no chat template"):
        codec_from_gguf(byte_level()).encode_chat("hello")


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('only with images') }}", "only with images"),
        ("{% if %}", "cannot be rendered"),
        ("{{ messages.__class__.__mro__ }}", "cannot be rendered"),
    ],
)
def test_a_template_that_cannot_be_rendered_is_one_error(template, message):
    with pytest.raises(CheckpointError, match=message):
        render_chat(template, "hello", {})
