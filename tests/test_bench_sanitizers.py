"""The driver of compute-sanitizer, with a tool of that name that only runs what it is given."""

import os
import subprocess
import sys

import pytest

from bench import sanitizers

TESTS = """
import pytest

pytestmark = pytest.mark.gpu

@pytest.mark.parametrize("number", range(5))
def test_first(number):
    pass

def test_second():
    assert {holds}

def test_third():
    pytest.skip("for a reason")

@pytest.mark.big
def test_left_out():
    raise AssertionError
"""
TOOL = """#!{python}
import subprocess, sys
command = sys.argv[sys.argv.index("application-only") + 1:]
code = subprocess.call(command)
print("========= {summary}")
sys.exit(code)
"""


TURNS = """
import dataclasses
import pytest
from jaxattn.kernels import tuning

table = dataclasses.replace(tuning.load("sm90"), turns=("begin", "end"))
tuning.load = lambda architecture: table

@pytest.mark.gpu
def test_turns():
    assert tuning.tuning().turns == {turns}
"""


def run_with_a_tool(folder, root, tool, summary):
    (folder / "pytest.ini").write_text("[pytest]\nmarkers =\n    gpu: a\n    big: b\n")
    program = folder / "compute-sanitizer"
    program.write_text(TOOL.format(python=sys.executable, summary=summary))
    program.chmod(0o755)
    environment = os.environ | {
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(root),
    }
    return subprocess.run(
        [sys.executable, "-m", "bench.sanitizers", "--tools", tool, "--seconds", "60", "test_some.py"],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_one_test_of_each_function_and_implementation_comes_first():
    ids = [f"a.py::test_{f}[{i}-{n}]" for f in "xyz" for i in ("triton", "pallas") for n in range(9)]
    order = sanitizers.in_order(ids, seed=3)
    assert sorted(order) == list(range(len(ids)))
    assert len({ids[number].rpartition("-")[0] for number in order[:6]}) == 6
    assert order == sanitizers.in_order(ids, seed=3) != sanitizers.in_order(ids, seed=4)


@pytest.mark.parametrize(
    ("holds", "summary", "code", "said"),
    [
        (True, "ERROR SUMMARY: 0 errors", 0, "0 errors; 6 tests of 3 functions passed, 0 failed, 1 skipped"),
        (True, "ERROR SUMMARY: 2 errors", 1, "4 errors; 6 tests"),
        (True, "RACECHECK SUMMARY: 1 hazard displayed (1 error, 0 warnings)", 1, "2 errors; 6 tests"),
        (True, "Error: the device is lost", 1, "no summary; 6 tests"),
        (False, "ERROR SUMMARY: 0 errors", 1, "5 tests of 3 functions passed, 1 failed, 1 skipped"),
    ],
)
def test_what_the_tool_and_the_tests_say_decides(holds, summary, code, said, tmp_path, pytestconfig):
    (tmp_path / "test_some.py").write_text(TESTS.format(holds=holds))
    run = run_with_a_tool(tmp_path, pytestconfig.rootpath, "memcheck", summary)
    assert said in run.stdout, run.stdout + run.stderr
    assert run.returncode == code


@pytest.mark.parametrize(("tool", "turns"), [("memcheck", ("begin", "end")), ("racecheck", ("", ""))])
def test_the_race_checker_runs_without_the_instructions_of_turns(tool, turns, tmp_path, pytestconfig):
    (tmp_path / "test_some.py").write_text(TURNS.format(turns=turns))
    run = run_with_a_tool(tmp_path, pytestconfig.rootpath, tool, "ERROR SUMMARY: 0 errors")
    assert "0 errors; 1 tests of 1 functions passed" in run.stdout, run.stdout + run.stderr


def test_no_test_begins_when_the_time_is_over():
    plugin = sanitizers.Plugin(sanitizers.Share(part=0, of=1, seconds=-1.0, seed=0))

    class Item:
        class session:
            shouldstop = False

    plugin.pytest_runtest_protocol(Item)
    assert Item.session.shouldstop


def test_without_the_tool_it_says_where_it_comes_from(capsys, monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit):
        sanitizers.main([])
    assert "it comes with the CUDA toolkit" in capsys.readouterr().err
