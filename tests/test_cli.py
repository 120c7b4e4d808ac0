"""The command as a user meets it: text on standard output, one line and a code for what goes wrong."""

import fcntl
import os
import signal
import subprocess
import sys

import jax.numpy as jnp
import pytest
import tiny_models

from jaxattn import cli, console, selftest
from jaxattn.attention import unified_attention
from jaxattn.errors import UnsupportedError
from jaxattn.generate import Piece
from jaxattn.models.load import load_model

COMMON = ("--max-new-tokens", "8", "--chunk-size", "16", "--num-pages", "9")


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("model") / "tiny.gguf"
    tiny_models.write_llama_gguf(path)
    return path


@pytest.fixture(autouse=True)
def environment(tmp_path_factory, monkeypatch):
    """No setting of the user's reaches a test, and no compiled program is kept."""
    for name in [name for name in os.environ if name.startswith("JAXATTN_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JAXATTN_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    monkeypatch.setattr(console, "_keep_compiled_programs", lambda: None)


def generate(capsys, *arguments):
    code = cli.main(["generate", *map(str, arguments)])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_the_text_goes_to_stdout_and_the_numbers_to_stderr(capsys, model_path):
    code, out, err = generate(capsys, "--model", model_path, *COMMON, "--raw", "hello")
    codec = load_model(model_path).codec
    assert code == 0
    assert out.endswith("\n")
    assert "\n" not in out[:-1] or out.count("\n") < 8
    assert err.startswith("8 tokens, ")
    assert "tokens/s, first text after " in err
    assert err.endswith("mean accepted length 1.00\n")
    assert codec.encode("hello") == [codec.tokenizer.token_to_id("hello")]


def test_speculation_changes_the_numbers_and_not_the_text(capsys, model_path):
    plain = generate(capsys, "--model", model_path, *COMMON, "hello")
    drafted = generate(capsys, "--model", model_path, *COMMON, "hello", "--speculative", "ngram")
    assert plain[:2] == (0, drafted[1])
    assert drafted[0] == 0
    assert "mean accepted length" in drafted[2]


def test_the_chat_template_is_used_unless_raw(capsys, model_path, monkeypatch):
    seen = []

    def record(model, prompts, options):
        seen.extend(prompts)
        return iter([Piece(i, (), 1, "stop") for i in range(len(prompts))])

    monkeypatch.setattr(console, "generate", record)
    generate(capsys, "--model", model_path, "hello")
    generate(capsys, "--model", model_path, "hello", "--raw")
    codec = load_model(model_path).codec
    assert seen == [codec.encode_chat("hello"), codec.encode("hello")]
    assert len(seen[0]) > len(seen[1])


def test_several_prompts_come_under_headings_in_order(capsys, model_path):
    arguments = ["--model", model_path, "--max-new-tokens", "8", "--chunk-size", "16", "--num-pages", "17"]
    code, out, err = generate(capsys, *arguments, "hello", "A much longer prompt\nthan the first " * 3)
    assert code == 0
    assert out.startswith("[1] hello\n")
    heading = "\n\n[2] A much longer prompt than the first A much longer prompt ...\n"
    assert heading in out
    assert err.startswith("16 tokens")


def test_streams_of_a_batch_are_written_one_below_the_other(capsys):
    codec = load_model(tiny_models.DATA / "llama_tiny").codec
    assert codec is None

    class Letters:
        def stream(self, prompt):
            return self

        def push(self, token):
            return chr(token)

        def finish(self):
            return "."

    order = [
        (1, "x", None),
        (0, "a", None),
        (1, "y", "stop"),
        (0, "b", None),
        (2, "p", None),
        (0, "c", "length"),
    ]
    written = []

    class Out:
        def write(self, text):
            written.append(text)

        def flush(self):
            pass

    pieces = (Piece(i, (ord(letter),), 1, finish) for i, letter, finish in [*order, (2, "q", "stop")])
    console.write_streams(pieces, Letters(), [[1]] * 3, ["one", "two", "three"], Out())
    assert "".join(written) == "[1] one\nabc.\n\n[2] two\nxy.\n\n[3] three\npq.\n"
    assert "a" in "".join(written[:3])


def test_a_dash_reads_standard_input(monkeypatch):
    import io

    monkeypatch.setattr(sys, "stdin", io.StringIO("from a pipe\n\n"))
    assert console.read_prompts(["one", "-"]) == ["one", "from a pipe\n"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["hi", "--model", "missing.gguf"], "missing.gguf: no such file or folder"),
        (["hi", "--model", __file__], "not a GGUF file"),
        (["hi", "--model", str(tiny_models.DATA)], "expected a config.json"),
        (["hi", "--model", str(tiny_models.DATA / "llama_tiny")], "expected a tokenizer.json"),
        (["hi", "--model", "MODEL", "--num-pages", "2"], "only 1 of 1 are free"),
        (["hi", "--model", "MODEL", "--num-pages", "1"], "num_pages: expected at least 2"),
        (
            ["x" * 3000, "--model", "MODEL"],
            "prompt 1: expected fewer tokens than the model's context of 2048",
        ),
        ([""], "prompt 1: expected some text, got none"),
        (["-", "-"], "at most once"),
        (["hi", "--max-new-tokens", "0"], "max_new_tokens: expected at least 1, got 0"),
        (["hi", "--max-new-tokens", "many"], "--max-new-tokens: invalid int value: 'many'"),
        (["hi", "--page-size", "0"], "page_size: expected at least 1, got 0"),
        (["hi", "--temperature", "-1"], "temperature: expected 0"),
        (["hi", "--temperature", "1", "--top-p", "2"], "top_p: expected a number above 0"),
        (["hi", "--top-p", "0.5"], "--top-p: expected a --temperature above 0"),
        (["hi", "--seed", "3"], "--seed: expected a --temperature above 0"),
        (["hi", "--num-draft-tokens", "4"], "--num-draft-tokens: expected --speculative ngram"),
        (
            ["hi", "--speculative", "ngram", "--num-draft-tokens", "1"],
            "num_draft_tokens: expected at least 2",
        ),
        (["hi", "--speculative", "magic"], "speculative: expected one of off, ngram, eagle, mtp"),
        (["hi", "--topk", "2"], "--topk: expected --speculative ngram, eagle or mtp"),
        (["hi", "--draft-head", "x"], "--draft-head: expected --speculative eagle"),
        (["hi", "--model", "MODEL", "--speculative", "eagle"], "no draft head for llama-"),
        (["hi", "--model", "MODEL", "--speculative", "mtp"], "brings no multi-token-prediction module"),
        (["hi", "--speculative", "ngram", "--read-every", "0"], "read_every: expected at least 1, got 0"),
        (["hi", "--kv-dtype", "int4"], "kv_dtype: expected one of float32"),
        (["hi", "--dtype", "float8"], "--dtype: expected one of float32"),
        (["hi", "--model", "MODEL", "--implementation", "cuda"], "implementation: expected None or some of"),
        (["hi", "--model", "MODEL", "--quantization", "fp8"], "quantization: expected a folder"),
        (["hi", "--unknown"], "unrecognized arguments: --unknown"),
        ([], "the following arguments are required: PROMPT"),
    ],
)
def test_what_a_user_gets_wrong_is_one_line_and_code_2(arguments, message, capsys, model_path):
    arguments = [str(model_path) if argument == "MODEL" else argument for argument in arguments]
    try:
        code = cli.main(["generate", *arguments])
    except SystemExit as exit:
        code = exit.code
    captured = capsys.readouterr()
    assert code == 2
    assert captured.out == ""
    assert message in captured.err
    assert captured.err.startswith("jaxattn")
    assert captured.err.count("\n") == 1


def test_the_environment_sets_the_routing_and_its_errors_are_one_line(capsys, monkeypatch, model_path):
    monkeypatch.setenv("JAXATTN_PAGE_SIZE", "4")
    monkeypatch.setenv("JAXATTN_KV_DTYPE", "float16")
    arguments = cli.make_parser().parse_args(["generate", "hi", "--kv-dtype", "int8"])
    options = console.options_from(arguments)
    assert (options.page_size, options.kv_dtype, options.routing.page_size) == (4, "int8", 4)
    monkeypatch.setenv("JAXATTN_UNIFIED", "perhaps")
    code, _, err = generate(capsys, "hi", "--model", model_path)
    assert code == 2
    assert err.startswith("jaxattn: JAXATTN_UNIFIED: expected one of")


def test_without_the_models_extra_the_install_command_is_said(capsys, monkeypatch, model_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    code, _, err = generate(capsys, "hi", "--model", model_path)
    assert (code, err) == (2, "jaxattn: the package tokenizers is missing; pip install 'jaxattn[models]'\n")


def test_an_error_of_the_program_itself_is_not_hidden(monkeypatch):
    def broken(arguments, out, err):
        raise AssertionError("a bug")

    monkeypatch.setattr(console, "generate_text", broken)
    with pytest.raises(AssertionError, match="a bug"):
        cli.main(["generate", "hi"])


def start(*arguments, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxattn", *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "JAX_ENABLE_COMPILATION_CACHE": "false"},
        **options,
    )


def test_a_closed_pipe_is_one_line_and_code_2(model_path):
    process = start("generate", "--model", model_path, *COMMON, "--raw", "hello")
    process.stdout.close()
    _, err = process.communicate(timeout=300)
    assert process.returncode == 2
    assert err == "jaxattn: standard output was closed before all was written\n"


def test_ctrl_c_is_one_line_and_code_130(model_path):
    # A shell starts what runs in its background with this signal ignored, which children inherit.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        process = start(
            "generate", "--model", model_path, "--max-new-tokens", "2000", "--raw", "ab", bufsize=1
        )
    finally:
        signal.signal(signal.SIGINT, before)
    # A pipe that holds less than the text, so that the command cannot end before it is interrupted.
    fcntl.fcntl(process.stdout, fcntl.F_SETPIPE_SZ, 4096)
    assert process.stdout.read(1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=300)
    assert process.returncode == 130
    assert err == "jaxattn: interrupted\n"
    assert out.endswith("\n")


def test_the_options_are_explained(capsys):
    for command in ([], ["generate"], ["doctor"]):
        with pytest.raises(SystemExit) as exit:
            cli.main([*command, "--help"])
        assert exit.value.code == 0
    assert "--speculative" in capsys.readouterr().out


def test_doctor_reports_versions_implementations_and_routing(capsys, monkeypatch):
    monkeypatch.setattr(selftest, "_free_nbytes", lambda: 2**30)
    assert cli.main(["doctor"]) == 0
    out = capsys.readouterr().out
    for expected in (
        f"Python {sys.version.split()[0]}",
        "cpu 0",
        "2147483653 arrived as -2147483643",
        "xla        usable",
        "target_verify unified",
        "ok       tables beyond 2^33 slots",
        "skipped  xla, a pool beyond 2^31 elements: it needs 3.3 GiB of memory, 1.0 GiB are free",
    ):
        assert expected in out, expected
    assert max(map(len, out.splitlines())) <= 100


def test_a_self_test_that_an_implementation_refuses_is_skipped(monkeypatch):
    cache = jnp.zeros((1, 16, 1, 16), jnp.int8)
    monkeypatch.setattr(selftest, "_pool", lambda values: (cache, cache))

    def refuse(*arguments):
        raise UnsupportedError("k_cache: too many elements of one byte")

    assert selftest.check_attention("pallas", refuse) == selftest.Result(
        "pallas", None, "k_cache: too many elements of one byte"
    )


def test_doctor_ends_with_code_2_when_a_self_test_fails(capsys, monkeypatch):
    failed = selftest.Result("tables", False, "wrapped")
    monkeypatch.setattr("jaxattn.doctor.run_selftest", lambda: iter([failed]))
    assert cli.main(["doctor"]) == 2
    captured = capsys.readouterr()
    assert "FAILED   tables: wrapped" in captured.out
    assert captured.err.startswith("jaxattn: the self-test failed: tables")


@pytest.mark.big
def test_the_self_test_passes_here_and_fails_a_wrapped_index():
    free = selftest._free_nbytes()
    if free is None or free < selftest._NEEDED_NBYTES:
        pytest.skip(f"needs {selftest._NEEDED_NBYTES} bytes of free memory, has {free}")

    def wrapped(q, k_cache, v_cache, metadata):
        import dataclasses

        page_elements = v_cache.shape[1] * v_cache.shape[3]
        pages = metadata.page_table % (2**31 // page_elements)
        return unified_attention(q, k_cache, v_cache, dataclasses.replace(metadata, page_table=pages))

    assert selftest.check_attention("right", unified_attention).passed
    result = selftest.check_attention("wrapped", wrapped)
    assert result.passed is False
    assert result.detail == f"expected 3 from page {selftest._NUM_PAGES - 1}, got 5 to 5"
