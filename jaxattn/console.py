"""`jaxattn generate`: from the parsed command line to text on a terminal or in a pipe."""

import argparse
import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from jaxattn.generate import GenerationOptions, Piece, generate, mean_accepted_length
from jaxattn.models.fetch import cache_folder
from jaxattn.models.load import load_model
from jaxattn.models.tokenizer import TextCodec
from jaxattn.routing import AttentionConfig

MODEL_DTYPES = ("float32", "bfloat16", "float16")
_SHOWN_PROMPT = 60


def generate_text(arguments: argparse.Namespace, out: TextIO, err: TextIO) -> None:
    """Write what the model makes of each prompt to `out`, and progress and a last line of numbers to `err`.

    Raises:
        ValueError: an option or a prompt cannot be used.
        JaxattnError: the model cannot be loaded or run, or the pool is too small.
    """
    options = options_from(arguments)
    texts = read_prompts(arguments.prompts)
    if arguments.dtype is not None and arguments.dtype not in MODEL_DTYPES:
        raise ValueError(f"--dtype: expected one of {', '.join(MODEL_DTYPES)}, got {arguments.dtype!r}")
    _keep_compiled_programs()
    with _load_progress(err) as progress:
        model = load_model(
            arguments.model, dtype=arguments.dtype, quantization=arguments.quantization, progress=progress
        )
    codec = model.codec
    if codec is None:
        raise ValueError(f"{model.name}: expected a tokenizer.json beside the weights, found none")
    as_chat = codec.chat_template is not None and not arguments.raw
    prompts = [codec.encode_chat(text) if as_chat else codec.encode(text) for text in texts]
    record = Record()
    pieces = record.follow(generate(model, prompts, options))
    write_streams(_noticed(pieces, "compiling, then reading the prompt ...", err), codec, prompts, texts, out)
    print(record.summary(), file=err, flush=True)


def options_from(arguments: argparse.Namespace) -> GenerationOptions:
    """The options of the command line.

    Raises:
        ValueError: an option is out of range, or would have no effect beside the others.
    """
    for name in ("num_draft_tokens", "topk"):
        if arguments.speculative == "off" and getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')}: expected --speculative ngram, eagle or mtp with it, got --speculative off"
            )
    if arguments.speculative != "eagle" and arguments.draft_head is not None:
        raise ValueError(
            f"--draft-head: expected --speculative eagle with it, got --speculative {arguments.speculative}"
        )
    for name in ("top_p", "seed"):
        if arguments.temperature == 0 and getattr(arguments, name) is not None:
            raise ValueError(
                f"--{name.replace('_', '-')}: expected a --temperature above 0 with it, got 0, greedy"
            )
    settings = {name: getattr(arguments, name) for name in ("page_size", "kv_dtype", "topk")}
    routing = AttentionConfig.from_environment(
        **{name: value for name, value in settings.items() if value is not None}
    )
    if routing.mla:
        raise ValueError("JAXATTN_MLA: expected off, which generate uses, got on")
    if routing.topk > 1 and arguments.speculative == "off":
        raise ValueError(f"JAXATTN_TOPK: expected 1 with --speculative off, got {routing.topk}")
    fields = {field.name for field in dataclasses.fields(GenerationOptions)}
    given = {name: value for name, value in vars(arguments).items() if name in fields and value is not None}
    given |= {"page_size": routing.page_size, "topk": routing.topk, "routing": routing}
    if arguments.kv_dtype or "JAXATTN_KV_DTYPE" in os.environ:
        given["kv_dtype"] = routing.kv_dtype
    return GenerationOptions(**given)


def read_prompts(prompts: Sequence[str]) -> list[str]:
    """The texts of the prompts, `-` standing for all of standard input without its last newline.

    Raises:
        ValueError: a prompt is empty, or `-` comes twice.
    """
    if list(prompts).count("-") > 1:
        raise ValueError("prompts: expected - for standard input at most once, got it twice")
    texts = [_read_all() if prompt == "-" else prompt for prompt in prompts]
    for i, text in enumerate(texts):
        if not text:
            raise ValueError(f"prompt {i + 1}: expected some text, got none")
    return texts


def write_streams(
    pieces: Iterator[Piece],
    codec: TextCodec,
    prompts: Sequence[Sequence[int]],
    texts: Sequence[str],
    out: TextIO,
) -> None:
    """Write the text of `pieces` as it comes.

    Of several sequences, the first that has not ended is streamed; the others wait for their turn below their own
    heading.

    Args:
        pieces: of all sequences, as `generate` yields them.
        codec: the tokeniser.
        prompts: token ids of the prompts.
        texts: the prompts as they were given, for the headings.
        out: is flushed after each piece.
    """
    streams = [codec.stream(prompt) for prompt in prompts]
    waiting, ended = [""] * len(prompts), [False] * len(prompts)
    headings = [_heading(i, text) for i, text in enumerate(texts)] if len(texts) > 1 else [""]
    shown, started = 0, False
    try:
        for piece in pieces:
            if not started:
                out.write(headings[0])
                started = True
            stream = streams[piece.sequence]
            waiting[piece.sequence] += "".join(stream.push(token) for token in piece.tokens)
            if piece.finish is not None:
                waiting[piece.sequence] += stream.finish()
                ended[piece.sequence] = True
            out.write(waiting[shown])
            waiting[shown] = ""
            while ended[shown] and shown + 1 < len(prompts):
                shown += 1
                out.write("\n\n" + headings[shown] + waiting[shown])
                waiting[shown] = ""
            out.flush()
    finally:
        if started:
            out.write("\n")
            out.flush()


@dataclasses.dataclass
class Record:
    """The pieces of a run, and when each came, in seconds since the run began."""

    pieces: list[Piece] = dataclasses.field(default_factory=list)
    seconds: list[float] = dataclasses.field(default_factory=list)

    def follow(self, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Pass `pieces` on and take note of them."""
        started = time.perf_counter()
        for piece in pieces:
            self.pieces.append(piece)
            self.seconds.append(time.perf_counter() - started)
            yield piece

    def decode_rate(self) -> float | None:
        """Tokens per second after each sequence's second piece, when every step has been compiled; None without any."""
        times_seen: dict[int, int] = {}
        tokens, started = 0, None
        for piece, second in zip(self.pieces, self.seconds, strict=True):
            times_seen[piece.sequence] = times_seen.get(piece.sequence, 0) + 1
            if times_seen[piece.sequence] > 2:
                tokens += len(piece.tokens)
            elif times_seen[piece.sequence] == 2:
                started = second
        if started is None or tokens == 0:
            return None
        return tokens / max(self.seconds[-1] - started, 1e-9)

    def summary(self) -> str:
        """The last line: how much was written, how fast, and how many tokens a pass gave."""
        parts = [f"{sum(len(piece.tokens) for piece in self.pieces)} tokens"]
        if (rate := self.decode_rate()) is not None:
            parts.append(f"{rate:.1f} tokens/s")
        parts.append(f"first text after {self.seconds[0]:.1f} s")
        if (accepted := mean_accepted_length(self.pieces)) is not None:
            parts.append(f"mean accepted length {accepted:.2f}")
        if any(piece.finish == "context" for piece in self.pieces):
            parts.append("stopped at the end of the model's context")
        return ", ".join(parts)


@contextlib.contextmanager
def _load_progress(err: TextIO) -> Iterator[Callable[[int, int], None]]:
    """A bar of the weights read, on a terminal only."""
    from tqdm import tqdm

    with tqdm(disable=None, file=err, unit=" weights", unit_scale=True, leave=False, delay=0.5) as bar:

        def progress(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield progress


def _noticed(pieces: Iterator[Piece], notice: str, err: TextIO) -> Iterator[Piece]:
    """Pass `pieces` on, with a notice on a terminal until the first comes."""
    terminal = err.isatty()
    if terminal:
        print(notice, end="", file=err, flush=True)
    try:
        first = next(pieces, None)
    finally:
        if terminal:
            print("\r\x1b[K", end="", file=err, flush=True)
    if first is not None:
        yield first
    yield from pieces


def _keep_compiled_programs() -> None:
    """Let JAX keep what it compiles beside the models, unless the user has chosen a place or none."""
    import jax

    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(cache_folder() / "compiled"))


def _heading(index: int, text: str) -> str:
    line = " ".join(text.split())
    shortened = line if len(line) <= _SHOWN_PROMPT else line[: _SHOWN_PROMPT - 3] + "..."
    return f"[{index + 1}] {shortened}\n"


def _read_all() -> str:
    return sys.stdin.read().removesuffix("\n")
