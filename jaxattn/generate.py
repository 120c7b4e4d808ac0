"""Text generation from a paged cache: several prompts as one ragged batch, tokens as they come."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int64

from jaxattn.checks import STORED_DTYPES
from jaxattn.decoding import DecodeState, Emitted, decode_step, prefill_chunk
from jaxattn.errors import JaxattnError
from jaxattn.index64 import as_index, cdiv, index64
from jaxattn.models.load import Model
from jaxattn.page_pool import RESERVED_PAGES, PagePool
from jaxattn.routing import AttentionConfig
from jaxattn.speculative import SamplingParams

SPECULATIVE = ("off", "ngram")
# Room for later keys and values that are larger than those of the first chunk.
_INT8_HEADROOM = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to generate.

    Attributes:
        max_new_tokens: at most so many tokens per prompt.
        temperature: 0 takes the most likely token; above, tokens are drawn.
        top_p: only the most likely tokens that together reach this probability are drawn.
        seed: of the draws; the same seed gives the same text, with and without speculation.
        speculative: `ngram` drafts what followed earlier occurrences of the text's own ending, and verifies the
            drafts in one pass; `off` decodes token by token.
        num_draft_tokens: rows of a verify pass: the last token and its drafts.
        page_size: tokens in a page of the cache.
        num_pages: pages of the cache, page 0 included, which is reserved; None for as many as are needed.
        chunk_size: longer prompts are read in chunks of so many tokens.
        kv_dtype: what the cache stores, one of `jaxattn.checks.STORED_DTYPES`; None for the dtype of the model. Of
            the 8-bit ones, int8 and float8, the scales are the checkpoint's where it has some; else int8 is scaled by
            what the first chunk of the prompts needs and float8 is not scaled.
        implementation: of attention; None for the default of the device.
        routing: the switches of `jaxattn.routing`; None for unified attention everywhere.

    Raises:
        ValueError: an option is out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    speculative: Literal["off", "ngram"] = "off"
    num_draft_tokens: int = 4
    page_size: int = 16
    num_pages: int | None = None
    chunk_size: int = 512
    kv_dtype: str | None = None
    implementation: str | None = None
    routing: AttentionConfig | None = None

    def __post_init__(self):
        least = {"max_new_tokens": 1, "page_size": 1, "chunk_size": 1, "seed": 0, "num_draft_tokens": 2}
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ValueError(f"{name}: expected at least {minimum}, got {getattr(self, name)}")
        if self.num_pages is not None and self.num_pages <= RESERVED_PAGES:
            raise ValueError(
                f"num_pages: expected at least {RESERVED_PAGES + 1}, page 0 being reserved, got {self.num_pages}"
            )
        if not 0.0 <= self.temperature < float("inf"):
            raise ValueError(f"temperature: expected 0 (most likely token) or more, got {self.temperature}")
        if not 0.0 < self.top_p <= 1.0:
            raise ValueError(f"top_p: expected a number above 0 and at most 1, got {self.top_p}")
        if self.speculative not in SPECULATIVE:
            raise ValueError(
                f"speculative: expected one of {', '.join(SPECULATIVE)}, got {self.speculative!r}"
            )
        if self.kv_dtype is not None and self.kv_dtype not in STORED_DTYPES:
            raise ValueError(f"kv_dtype: expected one of {', '.join(STORED_DTYPES)}, got {self.kv_dtype!r}")

    @property
    def rows_per_step(self) -> int:
        """Query rows of a sequence in a decode or verify step."""
        return self.num_draft_tokens if self.speculative == "ngram" else 1

    @property
    def attention(self) -> tuple[tuple[str, Any], ...]:
        """The arguments of `unified_attention` that are set, as pairs."""
        given = {"implementation": self.implementation, "config": self.routing}
        return tuple((name, value) for name, value in given.items() if value is not None)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What one pass of the model gave one sequence.

    Attributes:
        sequence: index of the prompt.
        tokens: new tokens, without the stop token and without what is beyond the limit.
        accepted: tokens that the pass gave, before they were cut.
        finish: why the sequence ended: `stop` token, `length` limit or end of the model's `context`; None if it
            goes on.
    """

    sequence: int
    tokens: tuple[int, ...]
    accepted: int
    finish: Literal["stop", "length", "context"] | None = None


def generate(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerationOptions | None = None
) -> Iterator[Piece]:
    """Generate from all `prompts` at once, and yield the tokens of each as they come.

    The first piece of a sequence comes from the pass that ends its prompt, each later one from a decode or verify
    pass. A sequence that has ended takes no part in later passes.

    Args:
        model: the model; its stop tokens are those of its tokeniser.
        prompts: token ids, at least one each.
        options: `GenerationOptions()` by default.

    Raises:
        ValueError: a prompt is empty, holds an id outside the vocabulary or leaves no room in the model's context.
        PoolExhaustedError: the batch needs more pages than `options.num_pages`.
        JaxattnError: the model's logits were not finite.
    """
    options = GenerationOptions() if options is None else options
    batch = plan_batch(model, prompts, options)
    return _run(model, batch, options)


def mean_accepted_length(pieces: Sequence[Piece]) -> float | None:
    """Tokens per decode or verify pass and sequence; None where no sequence got beyond its first token.

    Example:
        >>> from jaxattn.generate import Piece, mean_accepted_length
        >>> mean_accepted_length([Piece(0, (5,), 1), Piece(0, (6, 7), 2), Piece(0, (8,), 1, "length")])
        1.5
    """
    seen, accepted = set(), []
    for piece in pieces:
        if piece.sequence in seen:
            accepted.append(piece.accepted)
        seen.add(piece.sequence)
    return sum(accepted) / len(accepted) if accepted else None


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch as it is laid out before the first step.

    Attributes:
        prompts: token ids of each sequence.
        limits: new tokens that each sequence may get.
        context_bound: sequences whose limit is the model's context.
        num_pages: pages of the cache.
        slots: slot of each token of each sequence, -1 where it has none.
    """

    prompts: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    context_bound: tuple[bool, ...]
    num_pages: int
    slots: Int64[np.ndarray, "S C"]


def plan_batch(model: Model, prompts: Sequence[Sequence[int]], options: GenerationOptions) -> Batch:
    """Check the prompts and give each sequence the pages for all tokens that it may get.

    Raises:
        ValueError: see `generate`.
        PoolExhaustedError: see `generate`.
    """
    config = model.program.config
    if not prompts:
        raise ValueError("prompts: expected at least one, got none")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i + 1}: expected at least one token, got none")
        if len(prompt) >= config.context_length:
            raise ValueError(
                f"prompt {i + 1}: expected fewer tokens than the model's context of {config.context_length}, got "
                f"{len(prompt)}; shorten it"
            )
        if not all(0 <= token < config.vocab_size for token in prompt):
            raise ValueError(f"prompt {i + 1}: expected token ids in [0, {config.vocab_size})")
    room = [config.context_length - len(prompt) for prompt in prompts]
    limits = [min(options.max_new_tokens, left) for left in room]
    totals = [len(p) + limit + options.rows_per_step - 1 for p, limit in zip(prompts, limits, strict=True)]
    counts = [cdiv(total, options.page_size) for total in totals]
    num_pages = options.num_pages or RESERVED_PAGES + bucket(sum(counts), least=8)
    pool = PagePool(num_pages)
    slots = np.full((len(prompts), bucket(max(totals), least=256)), -1, np.int64)
    for row, total, pages in zip(
        slots, totals, np.split(pool.allocate(sum(counts)), np.cumsum(counts)[:-1]), strict=True
    ):
        row[:total] = (pages[:, None] * options.page_size + np.arange(options.page_size)).reshape(-1)[:total]
    return Batch(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        limits=tuple(limits),
        context_bound=tuple(options.max_new_tokens > left for left in room),
        num_pages=num_pages,
        slots=slots,
    )


def bucket(size: int, least: int) -> int:
    """The smallest of `least`, `1.5 least`, `2 least`, `3 least`, ... that holds `size`.

    Shapes come in few sizes, so that a compiled step serves many calls.

    Example:
        >>> from jaxattn.generate import bucket
        >>> [bucket(n, least=16) for n in (3, 17, 25, 33)]
        [16, 24, 32, 48]
    """
    width = least
    while width < size:
        if 3 * width // 2 >= size:
            return 3 * width // 2
        width *= 2
    return width


def prefill_chunks(lengths: Sequence[int], chunk_size: int) -> Iterator[tuple[list[int], list[int]]]:
    """Cut prompts into chunks of at most `chunk_size` tokens in all: first and last token of each sequence.

    Example:
        >>> from jaxattn.generate import prefill_chunks
        >>> list(prefill_chunks([3, 4], chunk_size=5))
        [([0, 0], [3, 2]), ([3, 2], [3, 4])]
    """
    start = [0] * len(lengths)
    while start != list(lengths):
        stop, left = list(start), chunk_size
        for i, length in enumerate(lengths):
            stop[i] = min(length, start[i] + left)
            left -= stop[i] - start[i]
        yield start, stop
        start = stop


def _run(model: Model, batch: Batch, options: GenerationOptions) -> Iterator[Piece]:
    settings: dict[str, Any] = {"page_size": options.page_size, "options": options.attention}
    step = settings | {"num_draft_tokens": options.rows_per_step}
    count = len(batch.prompts)
    sampling = None
    if options.temperature > 0:
        sampling = SamplingParams.create(
            count, temperature=options.temperature, top_p=options.top_p, seed=options.seed
        )
    state = _start(model, batch, options)
    generated, live = np.zeros(count, np.int64), np.ones(count, bool)
    if max(batch.limits) > 1:
        # Compiled while the prompts are compiled for and read: the text goes on seconds sooner.
        lowered = decode_step.lower(model.program, model.weights, state, live, sampling, **step)
        beside = threading.Thread(target=_compile_quietly, args=[lowered])
        beside.start()
    for chunk in _prefill_rows(batch, options.chunk_size):
        state, emitted = prefill_chunk(model.program, model.weights, state, *chunk, sampling, **settings)
        if (chunk[2] == [len(prompt) for prompt in batch.prompts]).any():
            yield from _pieces(model, batch, emitted, generated, live)
    if live.any():
        beside.join()
    while live.any():
        state, emitted = decode_step(model.program, model.weights, state, live.copy(), sampling, **step)
        yield from _pieces(model, batch, emitted, generated, live)


def _compile_quietly(lowered) -> None:
    """Compile a step into JAX's own cache; what goes wrong is raised where the step is called."""
    with contextlib.suppress(Exception):
        lowered.compile()


def _pieces(model: Model, batch: Batch, emitted: Emitted, generated, live) -> Iterator[Piece]:
    """Read what a step emitted, cut it at stop tokens and limits, and book it in `generated` and `live`."""
    host = jax.device_get(emitted)
    if not host.sound.all():
        raise JaxattnError(
            f"the logits of prompt {int(np.argmin(host.sound)) + 1} are not finite: the weights are damaged, or the "
            "dtype of the model or of the cache is too narrow for it"
        )
    stop_ids = model.codec.stop_ids if model.codec is not None else frozenset()
    for i in np.flatnonzero(host.counts):
        accepted = host.tokens[i, : host.counts[i]].tolist()
        tokens = accepted[: batch.limits[i] - generated[i]]
        stop = next((at for at, token in enumerate(tokens) if token in stop_ids), None)
        tokens = tokens[:stop]
        generated[i] += len(tokens)
        finish = None
        if stop is not None:
            finish = "stop"
        elif generated[i] == batch.limits[i]:
            finish = "context" if batch.context_bound[i] else "length"
        live[i] = finish is None
        yield Piece(int(i), tuple(tokens), len(accepted), finish)


def _prefill_rows(batch: Batch, chunk_size: int):
    """The `rows`, `cu_seqlens_q` and `seqused_k` of each chunk."""
    lengths = [len(prompt) for prompt in batch.prompts]
    width = min(bucket(sum(lengths), least=16), chunk_size)
    for start, stop in prefill_chunks(lengths, width):
        rows = np.zeros(width, np.int32)
        taken = [
            token for prompt, a, b in zip(batch.prompts, start, stop, strict=True) for token in prompt[a:b]
        ]
        rows[: len(taken)] = taken
        cu_seqlens_q = np.cumsum([0, *(b - a for a, b in zip(start, stop, strict=True))]).astype(np.int32)
        yield rows, cu_seqlens_q, np.asarray(stop, np.int32)


def _start(model: Model, batch: Batch, options: GenerationOptions) -> DecodeState:
    dtype = jnp.dtype(model.dtype if options.kv_dtype is None else options.kv_dtype)
    if dtype != jnp.int8:
        return _empty_state(model, batch, options, dtype, **_checkpoint_descales(model, dtype))
    first = next(_prefill_rows(batch, options.chunk_size))
    trial, _ = prefill_chunk(
        model.program,
        model.weights,
        _empty_state(model, batch, options, jnp.float32),
        *first,
        None,
        page_size=options.page_size,
        options=options.attention,
    )
    descales = {f"{side}_descale": int8_descales(getattr(trial.cache, side)) for side in ("k", "v")}
    return _empty_state(model, batch, options, dtype, **descales)


def _checkpoint_descales(model: Model, dtype) -> dict[str, list[float]]:
    """The scales that the model was calibrated with, for a cache in an 8-bit float."""
    if model.kv_scales is None or jnp.dtype(dtype).itemsize > 1:
        return {}
    return dict(zip(("k_descale", "v_descale"), model.kv_scales, strict=True))


def int8_descales(pages: Sequence[jax.Array]) -> list[jax.Array]:
    """Value of a stored 1 per KV head of each layer, so that int8 holds what `pages` of `[N, P, K, D]` hold."""
    return [
        jnp.maximum(jnp.abs(layer).max(axis=(0, 1, 3)).astype(jnp.float32), 1e-6) * _INT8_HEADROOM / 127
        for layer in pages
    ]


def _empty_state(model: Model, batch: Batch, options: GenerationOptions, dtype, **descales) -> DecodeState:
    tokens = np.zeros(batch.slots.shape, np.int32)
    for row, prompt in zip(tokens, batch.prompts, strict=True):
        row[: len(prompt)] = prompt
    return DecodeState(
        tokens=jnp.asarray(tokens),
        lengths=jnp.asarray([len(prompt) for prompt in batch.prompts], jnp.int32),
        slots=index64(as_index)(batch.slots, "slots"),
        cache=model.program.allocate_cache(
            model.program.config,
            num_seqs=len(batch.prompts),
            num_pages=batch.num_pages,
            page_size=options.page_size,
            dtype=dtype,
            **descales,
        ),
    )
