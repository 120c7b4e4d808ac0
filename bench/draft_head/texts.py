"""Conversations that the target writes itself: it makes up what a user asks, then answers."""

from collections.abc import Callable

import numpy as np

from bench.requests import Engine, Request
from jaxattn.models.chat import render_chat
from jaxattn.models.load import Model
from jaxattn.speculative import drafting_for

_MARK = "\u2402"
QUESTION_TOKENS = 64
ANSWER_TEMPERATURES = (0.0, 0.7)


def write_conversations(
    model: Model,
    *,
    count: int,
    length: int,
    rows: int,
    seed: int,
    options: tuple = (),
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> tuple[np.ndarray, np.ndarray]:
    """Token ids `[count, length]` of conversations, and how many of each row are text."""
    before, after = _chat_frame(model)
    engine = Engine(
        model,
        drafting_for("ngram", model),
        rows=rows,
        max_context_len=length,
        options=options,
        sampled=True,
    )
    questions = engine.answer(
        [Request(before, QUESTION_TOKENS, 1.0, seed + i) for i in range(count)],
        lambda done: progress("questions", done),
    )
    stops = model.codec.stop_ids
    prompts = [[*before, *(t for t in q.tokens if t not in stops), *after] for q in questions]
    answers = engine.answer(
        [
            Request(p, length - len(p), ANSWER_TEMPERATURES[i % 2], seed + count + i)
            for i, p in enumerate(prompts)
        ],
        lambda done: progress("answers", done),
    )
    tokens, lengths = np.zeros((count, length), np.int32), np.zeros(count, np.int32)
    for row, (prompt, reply) in enumerate(zip(prompts, answers, strict=True)):
        text = [*prompt, *reply.tokens]
        tokens[row, : len(text)], lengths[row] = text, len(text)
    return tokens, lengths


def _chat_frame(model: Model) -> tuple[list[int], list[int]]:
    """The tokens before and after what the user says; without a chat template, a start of text and a new line."""
    codec = model.codec
    if codec.chat_template is None:
        return codec.encode(""), codec.encode("\n", add_special_tokens=False)
    before, after = render_chat(codec.chat_template, _MARK, codec.special_tokens).split(_MARK)
    return codec.encode(before, add_special_tokens=False), codec.encode(after, add_special_tokens=False)
