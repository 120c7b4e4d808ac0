"""Text generation from a paged cache: several prompts as one ragged batch, tokens as they come."""

import contextlib
import dataclasses
import threading
from collections.abc import Generator, Iterator, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, Int64

from jaxattn.checks import STORED_DTYPES
from jaxattn.errors import JaxattnError
from jaxattn.index64 import cdiv
from jaxattn.models.load import Model
from jaxattn.page_pool import RESERVED_PAGES, PagePool
from jaxattn.routing import AttentionConfig
from jaxattn.speculative import (
    METHODS,
    DecoderState,
    Drafting,
    ProgramTarget,
    SamplingParams,
    SpeculativeDecoder,
    Weights,
    admit,
    drafting_for,
    empty_state,
    lookahead,
)

# Room for later keys and values that are larger than those of the prompts.
_INT8_HEADROOM = 1.25


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerationOptions:
    """How to generate.

    Attributes:
        max_new_tokens: at most so many tokens per prompt.
        temperature: 0 takes the most likely token; above, tokens are drawn.
        top_p: only the most likely tokens that together reach this probability are drawn.
        seed: of the draws; the same seed gives the same text, with and without speculation.
        speculative: how to draft what one pass then verifies, one of `jaxattn.speculative.METHODS`: `ngram` looks up
            what followed the text's own ending, `eagle` uses a trained head, `mtp` the module of the checkpoint; `off`
            decodes token by token.
        num_draft_tokens: rows of a verify pass: the last token and its drafts.
        topk: drafts that may follow one token; above 1 they form a tree.
        draft_head: file of the head for `eagle`; None for the one that the package brings for the model.
        read_every: passes between two reads by the host. More of them cost less, and text comes in larger pieces.
        page_size: tokens in a page of the cache.
        num_pages: pages of the cache, page 0 included, which is reserved; None for as many as are needed.
        chunk_size: longer prompts are read in chunks of so many tokens.
        kv_dtype: what the cache stores, one of `jaxattn.checks.STORED_DTYPES`; None for the dtype of the model. Of
            the 8-bit ones, int8 and float8, the scales are the checkpoint's where it has some; else int8 is scaled by
            what the prompts need and float8 is not scaled.
        implementation: of attention; None for the default of the device.
        routing: the switches of `jaxattn.routing`; None for unified attention everywhere.

    Raises:
        ValueError: an option is out of its range.
    """

    max_new_tokens: int = 128
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    speculative: Literal["off", "ngram", "eagle", "mtp"] = "off"
    num_draft_tokens: int = 4
    topk: int = 1
    draft_head: str | None = None
    read_every: int = 1
    page_size: int = 16
    num_pages: int | None = None
    chunk_size: int = 512
    kv_dtype: str | None = None
    implementation: str | None = None
    routing: AttentionConfig | None = None

    def __post_init__(self):
        least = {"max_new_tokens": 1, "page_size": 1, "chunk_size": 1, "seed": 0, "num_draft_tokens": 2}
        least |= {"topk": 1, "read_every": 1}
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
        if self.speculative not in METHODS:
            raise ValueError(f"speculative: expected one of {', '.join(METHODS)}, got {self.speculative!r}")
        if self.kv_dtype is not None and self.kv_dtype not in STORED_DTYPES:
            raise ValueError(f"kv_dtype: expected one of {', '.join(STORED_DTYPES)}, got {self.kv_dtype!r}")

    @property
    def attention(self) -> tuple[tuple[str, Any], ...]:
        """The arguments of `unified_attention` that are set, as pairs."""
        given = {"implementation": self.implementation, "config": self.routing}
        return tuple((name, value) for name, value in given.items() if value is not None)


@dataclasses.dataclass(frozen=True)
class Piece:
    """What the passes between two reads gave one sequence.

    Attributes:
        sequence: index of the prompt.
        tokens: new tokens, without the stop token and without what is beyond the limit.
        accepted: tokens that the passes gave, before they were cut.
        finish: why the sequence ended: `stop` token, `length` limit or end of the model's `context`; None if it
            goes on.
    """

    sequence: int
    tokens: tuple[int, ...]
    accepted: int
    finish: Literal["stop", "length", "context"] | None = None
    # Passes that gave it.
    passes: int = 1


def generate(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerationOptions | None = None
) -> Iterator[Piece]:
    """Generate from all `prompts` at once, and yield the tokens of each as they come.

    The first piece of a sequence comes from the pass that ends its prompt, each later one from decode or verify
    passes. A sequence that has ended takes no part in later passes.

    Args:
        model: the model; its stop tokens are those of its tokeniser.
        prompts: token ids, at least one each.
        options: `GenerationOptions()` by default.

    Raises:
        ValueError: a prompt is empty, holds an id outside the vocabulary or leaves no room in the model's context.
        PoolExhaustedError: the batch needs more pages than `options.num_pages`.
        JaxattnError: the model's logits were not finite, or it cannot draft as `options.speculative` says.
    """
    options = GenerationOptions() if options is None else options
    drafting = drafting_for(
        options.speculative,
        model,
        num_draft_tokens=options.num_draft_tokens,
        topk=options.topk,
        attention=options.attention,
        head=options.draft_head,
    )
    batch = plan_batch(model, prompts, options, lookahead(drafting.drafter))
    return _run(model, batch, drafting, options)


def mean_accepted_length(pieces: Sequence[Piece]) -> float | None:
    """Tokens per decode or verify pass and sequence; None where no sequence got beyond its first token.

    Example:
        >>> from jaxattn.generate import Piece, mean_accepted_length
        >>> mean_accepted_length([Piece(0, (5,), 1), Piece(0, (6, 7), 2), Piece(0, (8,), 1, "length")])
        1.5
    """
    seen, accepted, passes = set(), 0, 0
    for piece in pieces:
        if piece.sequence in seen:
            accepted += piece.accepted
            passes += piece.passes
        seen.add(piece.sequence)
    return accepted / passes if passes else None


@dataclasses.dataclass(frozen=True)
class Batch:
    """A batch as it is laid out before the first step.

    Attributes:
        prompts: token ids of each sequence.
        limits: new tokens that each sequence may get.
        context_bound: sequences whose limit is the model's context.
        num_pages: pages of the cache.
        pages: pages of each sequence.
        max_context_len: width of the token buffer.
    """

    prompts: tuple[tuple[int, ...], ...]
    limits: tuple[int, ...]
    context_bound: tuple[bool, ...]
    num_pages: int
    pages: tuple[Int64[np.ndarray, "pages"], ...]
    max_context_len: int


def plan_batch(
    model: Model, prompts: Sequence[Sequence[int]], options: GenerationOptions, lookahead: int
) -> Batch:
    """Check the prompts and give each sequence the pages for all tokens that it may get.

    Args:
        model: the model.
        prompts: token ids.
        options: how to generate.
        lookahead: tokens behind the known ones that a pass writes.

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
    totals = [len(prompt) + limit for prompt, limit in zip(prompts, limits, strict=True)]
    # A last pass starts one token before the limit.
    counts = [cdiv(total - 1 + lookahead, options.page_size) for total in totals]
    num_pages = options.num_pages or RESERVED_PAGES + bucket(sum(counts), least=8)
    pages = PagePool(num_pages).allocate(sum(counts))
    return Batch(
        prompts=tuple(tuple(prompt) for prompt in prompts),
        limits=tuple(limits),
        context_bound=tuple(options.max_new_tokens > left for left in room),
        num_pages=num_pages,
        pages=tuple(np.split(pages, np.cumsum(counts)[:-1])),
        max_context_len=bucket(max(totals), least=256),
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


def _run(model: Model, batch: Batch, drafting: Drafting, options: GenerationOptions) -> Iterator[Piece]:
    decoder = SpeculativeDecoder(
        target=ProgramTarget(model.program, options.attention, drafting.features),
        drafter=drafting.drafter,
        sampled=options.temperature > 0,
        prefill_chunk=min(bucket(sum(map(len, batch.prompts)), least=16), options.chunk_size),
    )
    weights = Weights(model.weights, drafting.weights)
    state = _start(model, batch, decoder, drafting, options)
    seen = _Seen.of_prompts(batch)
    beside = None
    if max(batch.limits) > 1 and (device := _only_device(weights)) is not None:
        # What prefill returns is committed to the device of the weights; only the same is compiled once.
        state = jax.device_put(state, device)
        # Compiled while the prompts are compiled for and read: the text goes on seconds sooner.
        beside = threading.Thread(target=_compile_quietly, args=[decoder.lower(weights, state)])
        beside.start()
    state = decoder.prefill(weights, state)
    seen = yield from _pieces(model, batch, seen, state)
    if beside is not None and seen.live.any():
        beside.join()
    while seen.live.any():
        state = decoder.run(weights, state, options.read_every)
        seen = yield from _pieces(model, batch, seen, state)


def _only_device(weights: Weights) -> jax.Device | None:
    """The device that all weights are committed to, None where they are spread over several."""
    devices = {device for leaf in jax.tree.leaves(weights) for device in leaf.devices()}
    return devices.pop() if len(devices) == 1 else None


def _compile_quietly(lowered) -> None:
    """Compile a step into JAX's own cache; what goes wrong is raised where the step is called."""
    with contextlib.suppress(Exception):
        lowered.compile()


@dataclasses.dataclass(frozen=True)
class _Seen:
    """What the host knows of each row: tokens, tokens in the cache, passes, and whether it goes on."""

    lengths: Int64[np.ndarray, "S"]
    cached: Int64[np.ndarray, "S"]
    passes: Int64[np.ndarray, "S"]
    live: Bool[np.ndarray, "S"]

    @classmethod
    def of_prompts(cls, batch: Batch) -> "_Seen":
        lengths = np.asarray([len(prompt) for prompt in batch.prompts])
        # As if a pass before the prompt's had cached all but its last token.
        return cls(lengths, lengths - 1, np.full_like(lengths, -1), np.ones(len(lengths), bool))


def _pieces(model: Model, batch: Batch, before: _Seen, state: DecoderState) -> Generator[Piece, None, _Seen]:
    """Read what each sequence got since `before`, and return what is known now."""
    history, lengths, cached, passes, live, sound = jax.device_get(
        (state.history, state.lengths, state.cached, state.passes, state.live, state.sound)
    )
    if not sound.all():
        raise JaxattnError(
            f"the logits of prompt {int(np.argmin(sound)) + 1} are not finite: the weights are damaged, or the "
            "dtype of the model or of the cache is too narrow for it"
        )
    stop_ids = model.codec.stop_ids if model.codec is not None else frozenset()
    for i in np.flatnonzero(before.live):
        tokens = history[i, before.lengths[i] : lengths[i]].tolist()
        finish = None
        if tokens[-1] in stop_ids:
            finish, tokens = "stop", tokens[:-1]
        elif not live[i]:
            finish = "context" if batch.context_bound[i] else "length"
        accepted, count = int(cached[i] - before.cached[i]), int(passes[i] - before.passes[i])
        yield Piece(int(i), tuple(tokens), accepted, finish, count)
    return _Seen(lengths, cached, passes, live)


def _start(
    model: Model, batch: Batch, decoder: SpeculativeDecoder, drafting: Drafting, options: GenerationOptions
) -> DecoderState:
    dtype = jnp.dtype(model.dtype if options.kv_dtype is None else options.kv_dtype)
    descales = _checkpoint_descales(model, dtype)
    if dtype == jnp.int8 and not descales:
        trial = _filling_state(model, batch, decoder, drafting, options, jnp.dtype(jnp.float32))
        trial = decoder.prefill(Weights(model.weights, drafting.weights), trial)
        descales = {f"{side}_descale": int8_descales(getattr(trial.cache, side)) for side in ("k", "v")}
    return _filling_state(model, batch, decoder, drafting, options, dtype, **descales)


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


def _filling_state(
    model: Model,
    batch: Batch,
    decoder: SpeculativeDecoder,
    drafting: Drafting,
    options: GenerationOptions,
    dtype,
    **descales,
) -> DecoderState:
    """A state in which every row has its prompt, its pages and its limits."""
    count = len(batch.prompts)
    pool = {"num_pages": batch.num_pages, "page_size": options.page_size}
    state = empty_state(
        num_seqs=count,
        max_context_len=batch.max_context_len,
        lookahead=decoder.lookahead,
        cache=model.program.allocate_cache(
            model.program.config, num_seqs=count, dtype=dtype, **pool, **descales
        ),
        draft=drafting.empty_state(count, dtype=model.dtype, **pool),
        page_size=options.page_size,
    )
    stop_tokens = sorted(model.codec.stop_ids) if model.codec is not None else ()
    for row, (prompt, limit, pages) in enumerate(zip(batch.prompts, batch.limits, batch.pages, strict=True)):
        state = admit(state, row, prompt, max_new_tokens=limit, pages=pages, stop_tokens=stop_tokens)
    if options.temperature == 0:
        return state
    sampling = SamplingParams.create(
        count, temperature=options.temperature, top_p=options.top_p, seed=options.seed
    )
    return dataclasses.replace(state, sampling=sampling)
