"""Requests join and leave a `DecoderState` between calls of the loop; nothing is read from the device."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import Int

from jaxattn.index64 import cdiv, index64
from jaxattn.speculative.sampling import SamplingParams
from jaxattn.speculative.state import DecoderState


@dataclasses.dataclass(frozen=True, kw_only=True)
class Admission:
    """A prompt and what its row gets.

    Attributes:
        prompt: token ids, at least one.
        max_new_tokens: tokens after which the row ends.
        pages: physical pages of the row, in order. Those for the first `len(prompt) + lookahead` tokens at least;
            `grant` adds more.
        window_pages: pages of the row in the window pool, used round robin: logical page b is
            `window_pages[b % len]`. `window_ring` says how many are enough.
        stop_tokens: ids that end the row.
        temperature: see `SamplingParams.create`, as the next two.
        top_k: see there.
        top_p: see there.
        seed: of the row's draws.
    """

    prompt: Sequence[int]
    max_new_tokens: int
    pages: Int[np.ndarray, "pages"]
    window_pages: Int[np.ndarray, "ring"] | None = None
    stop_tokens: Sequence[int] = ()
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0


def admit(state: DecoderState, row: int, prompt: Sequence[int], **options: Any) -> DecoderState:
    """Put a prompt into a free row; `SpeculativeDecoder.prefill` then writes its keys and makes the row live.

    Args:
        state: the batch.
        row: a row that no request uses.
        prompt: token ids, at least one.
        **options: the other attributes of `Admission`; `max_new_tokens` and `pages` are required.

    Raises:
        ValueError: the prompt is empty or does not fit, there are too many pages or stop tokens, or window pages
            are missing or not wanted.
    """
    return admit_all(state, {row: Admission(prompt=prompt, **options)})


@index64
def admit_all(state: DecoderState, admissions: Mapping[int, Admission]) -> DecoderState:
    """Put prompts into free rows, all in one update of the state; see `admit`.

    It compiles once for each number of admissions.

    Args:
        state: the batch.
        admissions: what enters each row, at least one.

    Raises:
        ValueError: as `admit` says, of any of them, or there is none; the state is as it was.
    """
    if not admissions:
        raise ValueError("admissions: expected at least one, got none")
    rows = [_row_values(state, row, admission) for row, admission in admissions.items()]
    values = {name: np.stack([row[name] for row in rows]) for name in rows[0]}
    sampling = SamplingParams.create(
        len(rows),
        **{
            name: [getattr(admission, name) for admission in admissions.values()]
            for name in ("temperature", "top_k", "top_p", "seed")
        },
    )
    return _set_rows(state, list(admissions), values | {"sampling": sampling})


def _row_values(state: DecoderState, row: int, admission: Admission) -> dict[str, Any]:
    """What the arrays of the state hold in the row of a request, but for its sampling."""
    _check_row(state, row)
    prompt = np.asarray(admission.prompt, np.int32)
    max_context_len, max_stops = state.history.shape[1], state.stop_tokens.shape[1]
    new_tokens, stop_tokens = admission.max_new_tokens, admission.stop_tokens
    if prompt.ndim != 1 or not prompt.size:
        raise ValueError(f"prompt: expected at least one token, got shape {list(prompt.shape)}")
    if new_tokens < 1:
        raise ValueError(f"max_new_tokens: expected at least 1, got {new_tokens}")
    limit = prompt.size + new_tokens
    if limit > max_context_len:
        raise ValueError(
            f"prompt: expected at most {max_context_len - new_tokens} tokens, so that {new_tokens} new ones "
            f"fit into max_context_len={max_context_len}, got {prompt.size}"
        )
    if len(stop_tokens) > max_stops:
        raise ValueError(
            f"stop_tokens: expected at most {max_stops}, got {len(stop_tokens)}; raise max_stop_tokens"
        )
    window_pages = admission.window_pages
    if (window_pages is not None) != (state.swa_page_table is not None):
        raise ValueError(
            "window_pages: expected pages with a window pool and None without, "
            f"got {window_pages} with swa_page_table {'set' if state.swa_page_table is not None else 'None'}"
        )
    history = np.zeros(max_context_len, np.int32)
    history[: prompt.size] = prompt
    stops = np.full(max_stops, -1, np.int32)
    stops[: len(stop_tokens)] = stop_tokens
    values = {
        "history": history,
        "lengths": prompt.size,
        "cached": 0,
        "limits": limit,
        "filling": True,
        "live": False,
        "sound": True,
        "passes": 0,
        "stop_tokens": stops,
    }
    if window_pages is not None:
        ring = np.asarray(window_pages, np.int64)
        values["swa_page_table"] = ring[np.arange(state.page_table.shape[1]) % len(ring)]
    return values | _page_values(state, admission.pages)


@index64
def grant(state: DecoderState, row: int, pages: Int[np.ndarray, "pages"]) -> DecoderState:
    """Give a row its pages, all of them in order; a row that waited for pages goes on in the next cycle.

    Raises:
        ValueError: there is no such row, or more pages than its table holds.
    """
    _check_row(state, row)
    return _set_row(state, row, _page_values(state, pages))


@index64
def release(state: DecoderState, row: int) -> DecoderState:
    """Free a row, whatever it is doing; its pages are the caller's again.

    Raises:
        ValueError: there is no such row.
    """
    _check_row(state, row)
    values = dict.fromkeys(("lengths", "cached", "limits", "capacity", "page_table"), 0)
    values |= {"filling": False, "live": False}
    if state.swa_page_table is not None:
        values["swa_page_table"] = 0
    return _set_row(state, row, values)


def window_ring(sliding_window: int, rows: int, page_size: int) -> int:
    """Pages of a ring that holds every key which a call of `rows` query rows per sequence can see or write.

    Args:
        sliding_window: keys visible to a query, counting itself.
        rows: the most query rows of a sequence in a call: prefill chunk or draft tokens.
        page_size: tokens in a page.

    Example:
        >>> from jaxattn.speculative import window_ring
        >>> window_ring(sliding_window=8, rows=4, page_size=4)
        4
    """
    return cdiv(sliding_window + rows - 2, page_size) + 1


def _check_row(state, row):
    if not 0 <= row < state.num_seqs:
        raise ValueError(f"row: expected a row in [0, {state.num_seqs}), got {row}")


def _page_values(state: DecoderState, pages: Int[np.ndarray, "pages"]) -> dict[str, Any]:
    pages, width = np.asarray(pages, np.int64), state.page_table.shape[1]
    if len(pages) > width:
        raise ValueError(f"pages: expected at most the {width} of a table row, got {len(pages)}")
    table = np.zeros(width, np.int64)
    table[: len(pages)] = pages
    return {"page_table": table, "capacity": len(pages) * state.page_size}


def _set_row(state: DecoderState, row: int, values: dict[str, Any]) -> DecoderState:
    return _set_rows(state, [row], {name: np.asarray(value)[None] for name, value in values.items()})


def _set_rows(state: DecoderState, rows: Sequence[int], values: dict[str, Any]) -> DecoderState:
    before = {name: getattr(state, name) for name in values}
    return dataclasses.replace(state, **_with_rows(before, np.asarray(rows, np.int64), values))


# One program for all arrays, because each eager update would be compiled by itself.
@jax.jit
def _with_rows(arrays, rows, values):
    return jax.tree.map(lambda array, value: array.at[rows].set(value), arrays, values)
