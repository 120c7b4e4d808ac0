"""The `jaxattn` command. What a user can get wrong ends with one line and exit code 2."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

FAILURE, INTERRUPTED = 2, 130
_EXTRA = {"gguf": "models", "tokenizers": "models", "jinja2": "models", "tqdm": "models"}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(FAILURE, f"{self.prog}: {message}; see {self.prog} --help\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit code: 0, 2 after a one-line error, 130 after Ctrl-C.

    Args:
        argv: the arguments; those of the process by default, which Ctrl-C then ends here.
    """
    try:
        arguments = make_parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        code = _fail("interrupted", INTERRUPTED)
        if argv is None:
            # A compilation may still be running, and Python would wait for it.
            os._exit(code)
        return code
    except BrokenPipeError:
        # Nothing more may be written at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _fail("standard output was closed before all was written")
    except ModuleNotFoundError as error:
        if error.name not in _EXTRA:
            raise
        return _fail(f"the package {error.name} is missing; pip install 'jaxattn[{_EXTRA[error.name]}]'")
    except Exception as error:
        if not _is_expected(error):
            raise
        return _fail(" ".join(str(error).split()))
    return 0


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each sets `run`, which takes the parsed arguments."""
    parser = _Parser(prog="jaxattn", description="Unified paged attention for JAX.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, (help_line, add) in _COMMANDS.items():
        command = commands.add_parser(name, help=help_line, description=help_line)
        command.set_defaults(run=add(command))
    return parser


def _add_generate(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    parser.add_argument("prompts", nargs="+", metavar="PROMPT", help="text, or - for standard input")
    parser.add_argument(
        "--model", default="smollm2-135m", help="smollm2-135m, gemma3-270m, a GGUF file or a folder"
    )
    parser.add_argument(
        "--max-new-tokens", type=int, default=128, metavar="N", help="per prompt; 128 by default"
    )
    parser.add_argument("--raw", action="store_true", help="no chat template: continue the text as it is")
    drawing = parser.add_argument_group("drawing tokens")
    drawing.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0, the default, is greedy"
    )
    drawing.add_argument("--top-p", type=float, metavar="P", help="draw from the likeliest of mass P")
    drawing.add_argument("--seed", type=int, metavar="S", help="the same seed gives the same text")
    speculation = parser.add_argument_group("speculative decoding")
    speculation.add_argument(
        "--speculative",
        default="off",
        metavar="METHOD",
        help="off; ngram drafts what followed the same words before, eagle with a trained head, mtp with the "
        "checkpoint's own module",
    )
    speculation.add_argument(
        "--num-draft-tokens",
        type=int,
        metavar="N",
        help="rows of a verify pass, the last token with its drafts; 4",
    )
    speculation.add_argument(
        "--topk", type=int, metavar="K", help="drafts that may follow one token; above 1 they form a tree"
    )
    speculation.add_argument(
        "--draft-head", metavar="FILE", help="head for eagle; the package's own by default"
    )
    speculation.add_argument(
        "--read-every", type=int, metavar="N", help="passes between two reads of the text; 1 by default"
    )
    cache = parser.add_argument_group("the paged cache and the computation")
    cache.add_argument("--page-size", type=int, metavar="P", help="tokens in a page; 16 by default")
    cache.add_argument(
        "--num-pages", type=int, metavar="N", help="pages of the pool; as many as needed by default"
    )
    cache.add_argument(
        "--kv-dtype", metavar="DTYPE", help="of keys and values, such as bfloat16, float8_e4m3fn, int8"
    )
    cache.add_argument(
        "--chunk-size", type=int, default=512, metavar="N", help="prefill so many tokens at a time"
    )
    cache.add_argument("--dtype", metavar="DTYPE", help="of the weights: float32, bfloat16 or float16")
    cache.add_argument(
        "--quantization", metavar="METHOD", help="of a folder's weights; its config.json by default"
    )
    cache.add_argument("--implementation", metavar="NAME", help="of attention; jaxattn doctor lists them")
    return _run_generate


def _add_inspect(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    parser.add_argument("path", metavar="PATH", help="a folder with config.json and safetensors shards")
    parser.add_argument("--quantization", metavar="METHOD", help="its config.json's by default")
    return _run_inspect


def _add_doctor(parser: argparse.ArgumentParser) -> Callable[[argparse.Namespace], None]:
    return _run_doctor


_COMMANDS = {
    "generate": ("Write text with a model, from a paged KV cache.", _add_generate),
    "inspect": ("List the tensors of a checkpoint, the form of each and why.", _add_inspect),
    "doctor": ("Say what works here and why, and test that no index wraps.", _add_doctor),
}


def _run_generate(arguments: argparse.Namespace) -> None:
    from jaxattn.console import generate_text

    generate_text(arguments, sys.stdout, sys.stderr)


def _run_inspect(arguments: argparse.Namespace) -> None:
    from jaxattn.inspect import inspect_checkpoint

    inspect_checkpoint(arguments.path, arguments.quantization, sys.stdout)


def _run_doctor(arguments: argparse.Namespace) -> None:
    from jaxattn.doctor import examine

    examine(sys.stdout)


def _fail(message: str, code: int = FAILURE) -> int:
    with contextlib.suppress(OSError):
        print(f"jaxattn: {message}", file=sys.stderr, flush=True)
    return code


def _is_expected(error: Exception) -> bool:
    """Whether the error is one of those that say what the user can do about it."""
    from jax.errors import JaxRuntimeError

    from jaxattn.errors import JaxattnError

    if isinstance(error, JaxRuntimeError):
        return "RESOURCE_EXHAUSTED" in str(error)
    return isinstance(error, JaxattnError | ValueError | OverflowError | OSError | MemoryError)
