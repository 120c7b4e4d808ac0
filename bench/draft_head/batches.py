"""Requests in batches through `SpeculativeDecoder`: how the texts are written and how heads are measured."""

import dataclasses
from collections.abc import Callable, Sequence

import jax
import numpy as np

from jaxattn.models.load import Model
from jaxattn.speculative import ProgramTarget, SpeculativeDecoder, Weights, admit, empty_state
from jaxattn.speculative.drafters import ModelDrafter

PAGE_SIZE = 16


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


def answer(
    model: Model,
    requests: Sequence[Request],
    drafter,
    *,
    draft_weights=None,
    rows: int,
    max_context_len: int,
    options: tuple = (),
    sampled: bool = True,
    progress: Callable[[int], None] = lambda done: None,
) -> list[Answer]:
    """Answer all requests, `rows` at a time, in one compiled shape."""
    decoder = SpeculativeDecoder(
        target=ProgramTarget(model.program, options),
        drafter=drafter,
        sampled=sampled,
        prefill_chunk=min(1024, rows * max_context_len),
    )
    width = -(-(max_context_len + decoder.lookahead) // PAGE_SIZE)
    pool = {"num_pages": rows * width + 1, "page_size": PAGE_SIZE, "dtype": model.dtype}
    draft = None
    if isinstance(drafter, ModelDrafter):
        from jaxattn.speculative import eagle

        draft = drafter.empty_state(eagle.allocate_cache(model.program.config, **pool), rows)
    state = empty_state(
        num_seqs=rows,
        max_context_len=max_context_len,
        lookahead=decoder.lookahead,
        cache=model.program.allocate_cache(model.program.config, **pool),
        draft=draft,
        page_size=PAGE_SIZE,
    )
    pages = np.arange(1, rows * width + 1).reshape(rows, width)
    weights = Weights(model.weights, draft_weights)
    answers: list[Answer] = []
    for start in range(0, len(requests), rows):
        batch = requests[start : start + rows]
        for row, request in enumerate(batch):
            state = admit(
                state,
                row,
                request.prompt,
                max_new_tokens=request.max_new_tokens,
                pages=pages[row],
                stop_tokens=sorted(model.codec.stop_ids) if model.codec is not None else (),
                temperature=request.temperature,
                seed=request.seed,
            )
        state = decoder.run(weights, decoder.prefill(weights, state), max_context_len)
        history, lengths, passes = jax.device_get((state.history, state.lengths, state.passes))
        for row, request in enumerate(batch):
            tokens = history[row, len(request.prompt) : lengths[row]].tolist()
            answers.append(Answer(tokens, int(passes[row]), len(tokens) - 1))
        progress(len(answers))
    return answers


def mean_accepted_length(answers: Sequence[Answer]) -> float:
    """Tokens per verify pass over all answers."""
    return sum(a.emitted for a in answers) / max(1, sum(a.passes for a in answers))
