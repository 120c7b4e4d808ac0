"""Requests in batches through `SpeculativeDecoder`: how texts are written and how drafting is measured."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jaxattn.models.load import Model
from jaxattn.speculative import (
    Admission,
    DecoderState,
    Drafting,
    ProgramTarget,
    SpeculativeDecoder,
    Weights,
    admit_all,
    empty_state,
)

# Prompt tokens of a pass, enough to keep a GPU busy.
PREFILL_CHUNK = 4096


@dataclasses.dataclass(frozen=True)
class Request:
    prompt: Sequence[int]
    max_new_tokens: int
    temperature: float = 0.0
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Answer:
    tokens: list[int]
    # Verify passes that the row took part in, and the tokens that they gave it.
    passes: int
    emitted: int


def mean_accepted_length(answers: Sequence[Answer]) -> float:
    """Tokens per verify pass over all answers."""
    return sum(a.emitted for a in answers) / max(1, sum(a.passes for a in answers))


class Engine:
    """One compiled loop for `rows` requests at a time."""

    def __init__(
        self,
        model: Model,
        drafting: Drafting,
        *,
        rows: int,
        max_context_len: int,
        page_size: int = 16,
        options: tuple[tuple[str, Any], ...] = (),
        sampled: bool = False,
    ):
        self.decoder = SpeculativeDecoder(
            target=ProgramTarget(model.program, options, drafting.features),
            drafter=drafting.drafter,
            sampled=sampled,
            prefill_chunk=min(PREFILL_CHUNK, rows * max_context_len),
        )
        self.weights = Weights(model.weights, drafting.weights)
        self.stop_tokens = sorted(model.codec.stop_ids) if model.codec is not None else ()
        width = -(-(max_context_len + self.decoder.lookahead) // page_size)
        self.pages = np.arange(1, rows * width + 1).reshape(rows, width)
        pool = {"num_pages": rows * width + 1, "page_size": page_size, "dtype": model.dtype}
        self._state = empty_state(
            num_seqs=rows,
            max_context_len=max_context_len,
            lookahead=self.decoder.lookahead,
            cache=model.program.allocate_cache(model.program.config, num_seqs=rows, **pool),
            draft=drafting.empty_state(rows, **pool),
            page_size=page_size,
        )

    def answer(
        self, requests: Sequence[Request], progress: Callable[[int], None] = lambda done: None
    ) -> list[Answer]:
        """Answer all requests; the host reads once per batch."""
        answers: list[Answer] = []
        for start in range(0, len(requests), len(self.pages)):
            batch = requests[start : start + len(self.pages)]
            state = self.prefilled(batch)
            state = self._state = self.decoder.run(self.weights, state, state.history.shape[1])
            history, lengths, passes = jax.device_get((state.history, state.lengths, state.passes))
            for row, request in enumerate(batch):
                tokens = history[row, len(request.prompt) : lengths[row]].tolist()
                answers.append(Answer(tokens, int(passes[row]), len(tokens) - 1))
            progress(len(answers))
        return answers

    def prefilled(self, batch: Sequence[Request]) -> DecoderState:
        """The state in which every request of a batch has its first token; the engine gives its own away."""
        admissions = {
            row: Admission(
                prompt=request.prompt,
                max_new_tokens=request.max_new_tokens,
                pages=self.pages[row],
                stop_tokens=self.stop_tokens,
                temperature=request.temperature,
                seed=request.seed,
            )
            for row, request in enumerate(batch)
        }
        state = admit_all(self._state, admissions)
        return self.decoder.prefill(self.weights, state)
