"""Conversations that the target writes itself: it answers what it makes up itself, and what people may ask."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from bench.draft_head.questions import ask
from bench.requests import Engine, Request
from jaxattn.models.chat import render_chat
from jaxattn.models.load import Model
from jaxattn.speculative import drafting_for

_MARK = "\u2402"
QUESTION_TOKENS = 64
ANSWER_TEMPERATURES = (0.0, 0.0, 0.7)


class Conversations(NamedTuple):
    """Texts of the target.

    Attributes:
        tokens: ids, `[count, length]`.
        lengths: how many of each row are text.
        starts: where in each row the answer begins.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    starts: np.ndarray

    def take(self, rows) -> "Conversations":
        """Some of them."""
        return Conversations(*(array[rows] for array in self))


def write_conversations(
    model: Model,
    *,
    count: int,
    length: int,
    rows: int,
    seed: int,
    options: tuple = (),
    progress: Callable[[str, int], None] = lambda what, done: None,
) -> Conversations:
    """Let the target answer `count` questions, every second of which it makes up itself."""
    before, after = _chat_frame(model)
    engine = Engine(
        model, drafting_for("off", model), rows=rows, max_context_len=length, options=options, sampled=True
    )
    stops = model.codec.stop_ids
    made_up = engine.answer(
        [Request(before, QUESTION_TOKENS, 1.0, seed + i) for i in range(count // 2)],
        lambda done: progress("questions", done),
    )
    rng = np.random.default_rng(seed)
    asked = [model.codec.encode(ask(rng), add_special_tokens=False) for _ in range(count - count // 2)]
    questions: list[list[int]] = [[]] * count
    questions[0::2] = asked
    questions[1::2] = [[t for t in question.tokens if t not in stops] for question in made_up]
    prompts = [[*before, *question, *after] for question in questions]
    answers = engine.answer(
        [
            Request(p, length - len(p), ANSWER_TEMPERATURES[i % len(ANSWER_TEMPERATURES)], seed + count + i)
            for i, p in enumerate(prompts)
        ],
        lambda done: progress("answers", done),
    )
    tokens, lengths = np.zeros((count, length), np.int32), np.zeros(count, np.int32)
    for row, (prompt, reply) in enumerate(zip(prompts, answers, strict=True)):
        text = [*prompt, *reply.tokens]
        tokens[row, : len(text)], lengths[row] = text, len(text)
    return Conversations(tokens, lengths, np.array([len(p) for p in prompts], np.int32))


def _chat_frame(model: Model) -> tuple[list[int], list[int]]:
    """The tokens before and after what the user says; without a chat template, a start of text and a new line."""
    codec = model.codec
    if codec.chat_template is None:
        return codec.encode(""), codec.encode("\n", add_special_tokens=False)
    before, after = render_chat(codec.chat_template, _MARK, codec.special_tokens).split(_MARK)
    return codec.encode(before, add_special_tokens=False), codec.encode(after, add_special_tokens=False)
