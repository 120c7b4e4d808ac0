"""Compares two results of bench.run, or this checkout with another commit.

    python -m bench.compare old.json new.json [--fail]
    python -m bench.compare --ref HEAD~1 --case 'llama-3-8b/32x8k*' [--fail]

A row is slower or faster only where the spreads (10th to 90th percentile) of the two do not touch and the medians
differ by more than the wider of them. Two runs on a machine that others load may still differ; with `--ref` the
benchmarks of this checkout run over the library of that commit, in a temporary worktree, and over this checkout's, in
turn. `--fail` makes the exit code 1 where a row became slower or lost its figures.
"""

import argparse
import contextlib
import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench import results
from bench.environment import ROOT
from bench.run import positive

VERDICTS = ("faster", "slower", "within spread", "lost", "gained", "only in old", "only in new")


@dataclasses.dataclass(frozen=True)
class Difference:
    """One row of two results; `ratio` is the new time over the old one."""

    case: str
    who: str
    verdict: str
    old: dict | None = None
    new: dict | None = None

    @property
    def ratio(self) -> float | None:
        """The new time over the old one, where both have one."""
        if self.old and self.new and "median_us" in self.old and "median_us" in self.new:
            return self.new["median_us"] / self.old["median_us"]
        return None

    @property
    def is_worse(self) -> bool:
        """Whether `--fail` fails for it."""
        return self.verdict in ("slower", "lost")


def verdict_of(old: dict | None, new: dict | None) -> str | None:
    """What became of a row that may be missing or refused; None where neither side has figures."""
    has_old, has_new = ("median_us" in (row or {}) for row in (old, new))
    if not (has_old and has_new):
        if has_old:
            return "only in old" if new is None else "lost"
        if has_new:
            return "only in new" if old is None else "gained"
        return None
    wider = max(row["high_us"] - row["low_us"] for row in (old, new))
    if abs(new["median_us"] - old["median_us"]) <= wider:
        return "within spread"
    if new["low_us"] > old["high_us"]:
        return "slower"
    return "faster" if new["high_us"] < old["low_us"] else "within spread"


def compare(old: dict, new: dict) -> list[Difference]:
    """Each row with figures in either result, in the order of the old one."""
    olds, news = ({(r["case"], r["who"]): r for r in result["rows"]} for result in (old, new))
    found = []
    for key in dict.fromkeys([*olds, *news]):
        old_row, new_row = olds.get(key), news.get(key)
        if verdict := verdict_of(old_row, new_row):
            found.append(Difference(*key, verdict, old=old_row, new=new_row))
    return found


def lines(differences: list[Difference], old: dict, new: dict) -> Iterator[str]:
    """The table as text."""
    for name, result in (("old", old), ("new", new)):
        about = result["environment"]
        versions = " ".join(f"{package} {version}" for package, version in about["versions"].items())
        yield f"{name}: {about['commit']} on {about['device']}, {versions}"
    if old["environment"]["device"] != new["environment"]["device"]:
        yield "the devices differ, so the ratios say nothing about the code"
    width = max((len(d.case) for d in differences), default=4) + 2
    yield f"{'case':<{width}}{'who':<10}{'old us':>28}{'new us':>30}{'new/old':>9}  verdict"
    for d in differences:
        ratio = "" if d.ratio is None else f"{d.ratio:.3f}"
        yield f"{d.case:<{width}}{d.who:<10}{_times(d.old):>28}{_times(d.new):>30}{ratio:>9}  {d.verdict}"
    counts = [(verdict, sum(d.verdict == verdict for d in differences)) for verdict in VERDICTS]
    yield ", ".join(f"{count} {verdict}" for verdict, count in counts if count) or "no rows with figures"


def _times(row: dict | None) -> str:
    if row is None:
        return "-"
    if "refused" in row:
        return "refused"
    return f"{row['median_us']:.1f} ({row['low_us']:.1f}..{row['high_us']:.1f})"


class BadRef(ValueError):
    """A git ref that does not name a commit, or a run of it that failed."""


@contextlib.contextmanager
def worktree(ref: str, root: Path = ROOT) -> Iterator[Path]:
    """A temporary checkout of `ref` with the benchmarks of `root`, so that both versions are measured alike.

    Raises:
        BadRef: `ref` is no commit of the repository at `root`.
    """
    git = ["git", "-C", str(root)]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "tree"
        added = subprocess.run(
            [*git, "worktree", "add", "--quiet", "--detach", str(path), ref], capture_output=True, text=True
        )
        if added.returncode:
            raise BadRef(f"--ref {ref!r}: {added.stderr.strip()}")
        try:
            shutil.rmtree(path / "bench", ignore_errors=True)
            shutil.copytree(root / "bench", path / "bench", ignore=shutil.ignore_patterns("__pycache__"))
            yield path
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", str(path)], check=True)


def run_in(tree: Path, arguments: list[str]) -> dict:
    """The result of `bench.run` with the library of a checkout."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "result.json"
        command = [sys.executable, "-m", "bench.run", *arguments, "--json", str(path)]
        path_list = os.pathsep.join(filter(None, [str(tree), os.environ.get("PYTHONPATH")]))
        environment = os.environ | {"PYTHONPATH": path_list}
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True)
        if done.returncode:
            raise BadRef(f"bench.run over {tree} failed:\n{done.stderr.strip()[-2000:]}")
        return results.load(path)


def against(ref: str, arguments: list[str], rounds: int, root: Path = ROOT) -> tuple[dict, dict]:
    """Results of a commit and of this checkout, whose processes took turns."""
    with worktree(ref, root) as tree:
        name = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "--short=12", ref],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        pairs = [[run_in(where, arguments) for where in (tree, root)] for _ in range(rounds)]
    old, new = (results.merged([pair[side] for pair in pairs]) for side in (0, 1))
    # The worktree differs from its commit by the benchmarks only.
    old["environment"] = old["environment"] | {"commit": name}
    return old, new


def main(arguments=None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.compare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("files", nargs="*", metavar="FILE", help="old and new result of bench.run --json")
    parser.add_argument("--ref", help="a commit to compare this checkout with")
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="with --ref: as in bench.run")
    parser.add_argument("--implementation", nargs="+", default=[], help="with --ref: as in bench.run")
    parser.add_argument("--rounds", type=positive, default=3, help="with --ref: turns of the two versions")
    parser.add_argument("--fail", action="store_true", help="exit code 1 where a row became slower or lost")
    options = parser.parse_args(arguments)
    if (len(options.files) != 2) if options.ref is None else options.files:
        parser.error("expected two files, old and new, or --ref with --case")
    if options.ref is not None and not options.case:
        parser.error("--ref: expected --case NAME, the cases to compare")
    try:
        if options.ref is None:
            old, new = (results.load(path) for path in options.files)
        else:
            passed = ["--case", *options.case, "--rounds", "1"]
            passed += ["--implementation", *options.implementation] if options.implementation else []
            old, new = against(options.ref, passed, options.rounds)
    except (results.BadResult, BadRef) as error:
        parser.error(str(error))
    differences = compare(old, new)
    print(*lines(differences, old, new), sep="\n")
    return int(options.fail and any(d.is_worse for d in differences))


if __name__ == "__main__":
    raise SystemExit(main())
