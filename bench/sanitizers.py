"""Runs the GPU tests under NVIDIA's compute-sanitizer, in processes of their own, for as long as is given.

    python -m bench.sanitizers --seconds 200 --tools memcheck racecheck --processes 2

Each process begins with one test of every test function, so that all kernels come early, and ends between two tests
when the time is over. Tests that allocate several GiB are left out. JAX allocates each array by itself meanwhile:
behind its end is nothing that a wrong access could hit unnoticed. The exit code is 1 where a tool or a test complains.

For racecheck the instructions by which the halves of a program take turns are left out. They add order and take none,
so what is free of races without them is so with them. With them it reports accesses that have a barrier of all threads
between them, as if it lost count of barriers behind one at which a half only arrives.
"""

import argparse
import dataclasses
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.run import positive
from jaxattn.kernels import tuning

TOOLS = ("memcheck", "racecheck", "initcheck", "synccheck")
SELECTED = "gpu and not big"
COUNTS = "tests: "


@dataclasses.dataclass(frozen=True)
class Share:
    """What one of the processes of a tool runs: every `of`-th test from `part` on, for so many seconds."""

    part: int
    of: int
    seconds: float
    seed: int
    turns: bool = True


def in_order(ids: Sequence[str], seed: int) -> list[int]:
    """Shuffle tests, but with one of each test function and implementation first; returns their numbers."""
    numbers = list(range(len(ids)))
    random.Random(seed).shuffle(numbers)
    seen: set[tuple[str, bool]] = set()
    first, others = [], []
    for number in numbers:
        function = ids[number].partition("[")[0], "pallas" in ids[number]
        (others if function in seen else first).append(number)
        seen.add(function)
    return first + others


class Plugin:
    """Gives pytest its share of the tests, counts what becomes of them, and ends when the time is over."""

    def __init__(self, share: Share):
        self._share = share
        self._end = time.monotonic() + share.seconds
        self.counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self.functions: set[str] = set()

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items):
        """Keep the share, in order; what the marker expression leaves out is gone already."""
        order = in_order([item.nodeid for item in items], self._share.seed)
        items[:] = [items[number] for number in order[self._share.part :: self._share.of]]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self):
        """Leave out the instructions of turns where the share does."""
        if self._share.turns:
            return (yield)
        with tuning.using(tuning=dataclasses.replace(tuning.tuning(), turns=("", ""))):
            return (yield)

    def pytest_runtest_protocol(self, item):
        """Begin no test behind the end."""
        if time.monotonic() > self._end:
            item.session.shouldstop = "the time is over"

    def pytest_runtest_logreport(self, report):
        """Count tests by their outcome, those that fail before they begin too."""
        if report.when == "call" or report.outcome != "passed":
            self.counts[report.outcome] += 1
            self.functions.add(report.nodeid.partition("[")[0].rpartition("::")[2])


def run_share(share: Share, tests: Sequence[str]) -> int:
    """Run a share in this process; the last line says what became of it."""
    plugin = Plugin(share)
    # One process: the tool does not follow workers.
    code = pytest.main(["-n", "0", "-q", "-p", "no:cacheprovider", "-m", SELECTED, *tests], plugins=[plugin])
    print(COUNTS + json.dumps({**plugin.counts, "functions": sorted(plugin.functions)}), flush=True)
    return 0 if code in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED) else 1


@dataclasses.dataclass(frozen=True)
class Found:
    """What a process reported."""

    passed: int
    failed: int
    skipped: int
    functions: tuple[str, ...]
    # Errors of memcheck, hazards of racecheck; None where the tool did not come to its summary.
    errors: int | None


def read_report(text: str) -> Found:
    """Read the output of a process."""
    counts = {"passed": 0, "failed": 0, "skipped": 0, "functions": []}
    for line in text.splitlines():
        if line.startswith(COUNTS):
            counts |= json.loads(line.removeprefix(COUNTS))
    summaries = re.findall(r"^=+ (?:ERROR|RACECHECK) SUMMARY: (\d+) (?:error|hazard)", text, re.MULTILINE)
    errors = sum(map(int, summaries)) if summaries else None
    return Found(**{**counts, "functions": tuple(counts["functions"])}, errors=errors)


def start(tool: str, share: Share, tests: Sequence[str], output) -> subprocess.Popen:
    """Start a process of a tool."""
    me = [sys.executable, "-m", "bench.sanitizers", "--share", json.dumps(dataclasses.asdict(share)), *tests]
    sanitizer = ["compute-sanitizer", "--tool", tool, "--target-processes", "application-only"]
    environment = os.environ | {"XLA_PYTHON_CLIENT_ALLOCATOR": "platform"}
    return subprocess.Popen([*sanitizer, *me], stdout=output, stderr=subprocess.STDOUT, env=environment)


def main(arguments=None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.sanitizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("tests", nargs="*", default=["tests"], help="files, folders or ids of tests")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=["memcheck", "racecheck"])
    parser.add_argument("--seconds", type=positive, default=300, help="for the tests of each process")
    parser.add_argument("--processes", type=positive, default=2, help="of each tool, at the same time")
    parser.add_argument("--seed", type=int, default=0, help="of the order of the tests")
    parser.add_argument("--logs", type=Path, help="keep the output of each process in this folder")
    parser.add_argument("--share", type=json.loads, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.share is not None:
        return run_share(Share(**options.share), options.tests)
    if shutil.which("compute-sanitizer") is None:
        parser.error("compute-sanitizer: not found; it comes with the CUDA toolkit")
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.logs or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        return _run_all(options, folder)


def _run_all(options, folder: Path) -> int:
    running = []
    for tool in options.tools:
        for part in range(options.processes):
            turns = tool != "racecheck"
            share = Share(part, options.processes, options.seconds, options.seed, turns)
            log = folder / f"{tool}-{part}.txt"
            with log.open("w") as output:
                running.append((tool, log, start(tool, share, options.tests, output)))
    complaints = 0
    for tool in options.tools:
        logs = [(log, process) for name, log, process in running if name == tool]
        for _, process in logs:
            process.wait()
        found = [read_report(log.read_text(errors="replace")) for log, _ in logs]
        functions = set().union(*(report.functions for report in found))
        errors = [report.errors for report in found]
        passed, failed, skipped = (
            sum(getattr(report, name) for report in found) for name in ("passed", "failed", "skipped")
        )
        verdict = "no summary" if None in errors else f"{sum(errors)} errors"
        print(
            f"{tool}: {verdict}; {passed} tests of {len(functions)} functions passed, {failed} failed, "
            f"{skipped} skipped",
            flush=True,
        )
        complaints += failed + sum(1 if error is None else error for error in errors) + (passed == 0)
    return 1 if complaints else 0


if __name__ == "__main__":
    raise SystemExit(main())
