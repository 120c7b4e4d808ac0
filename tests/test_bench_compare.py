"""Comparison of results and commits, scaling fits, and the page of results."""

import re
import subprocess
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("matplotlib")

from bench import acceptance, compare, plots, report, results, scaling

ROOT = Path(__file__).parents[1]


def row(case="a/b/q1", who="xla", low=9.0, median=10.0, high=11.0, **more):
    return {
        "case": case,
        "who": who,
        "low_us": low,
        "median_us": median,
        "high_us": high,
        "samples_us": [median],
        **more,
    }


def result(*rows, device="a device", commit="abc"):
    return {
        "format": results.FORMAT,
        "environment": {
            "device": device, "backend": "cpu", "commit": commit, "versions": {"jax": "1"}, "python": "3", "clocks": {},
            "command": "python -m bench.run",
        },
        "clock": "wall",
        "rounds": 1,
        "ceilings": {"read_gbps": 10.0, "matmul_tflops": 1.0},
        "rows": list(rows),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("new", "verdict"),
    [
        (row(low=11.1, median=12.1, high=13.0), "slower"),
        (row(low=11.0, median=12.1, high=13.0), "within spread"),
        (row(low=11.1, median=14.0, high=16.0), "within spread"),
        (row(low=7.0, median=7.9, high=8.9), "faster"),
        (row(low=7.0, median=7.9, high=9.0), "within spread"),
        (row(low=5.0, median=7.9, high=8.9), "within spread"),
        ({"case": "a/b/q1", "who": "xla", "refused": "wrong answer"}, "lost"),
    ],
)
def test_a_verdict_needs_spreads_apart_and_medians_further_apart_than_the_wider(new, verdict):
    (difference,) = compare.compare(result(row()), result(new))
    assert difference.verdict == verdict
    assert difference.ratio == (new["median_us"] / 10 if "median_us" in new else None)


def test_rows_of_one_file_are_listed():
    differences = compare.compare(result(row("x"), row("y")), result(row("y"), row("z")))
    assert [(d.case, d.verdict) for d in differences] == [
        ("x", "only in old"),
        ("y", "within spread"),
        ("z", "only in new"),
    ]


def test_what_neither_measures_is_left_out():
    refused = {"case": "x", "who": "fa3", "refused": "not installed"}
    assert compare.compare(result(refused), result(refused)) == []
    assert compare.compare(result(refused), result()) == []
    assert compare.compare(result(refused), result(row("x", "fa3")))[0].verdict == "gained"


@pytest.mark.parametrize(
    ("median", "flag", "code"), [(20.0, True, 1), (20.0, False, 0), (10.5, True, 0), (5.0, True, 0)]
)
def test_fail_turns_a_slowdown_into_code_1(tmp_path, capsys, median, flag, code):
    old, new = tmp_path / "old.json", tmp_path / "new.json"
    results.save(old, result(row()))
    results.save(new, result(row(low=0.9 * median, median=median, high=1.1 * median), device="another"))
    assert compare.main([str(old), str(new), *(["--fail"] if flag else [])]) == code
    out = capsys.readouterr().out
    assert f"{median / 10:.3f}" in out
    assert "the devices differ" in out


@pytest.mark.parametrize(
    "arguments", [[], ["one.json"], ["no.json", "no.json"], ["--ref", "HEAD"], ["a", "b", "--ref", "x"]]
)
def test_a_bad_command_line_is_code_2(arguments, capsys):
    with pytest.raises(SystemExit) as stop:
        compare.main(arguments)
    assert stop.value.code == 2
    assert "expected" in capsys.readouterr().err


@pytest.fixture
def repository(tmp_path):
    """Two commits: the library is 1 and then 2, the benchmarks old and then new."""
    root = tmp_path / "repository"
    (root / "bench").mkdir(parents=True)

    def git(*arguments):
        identity = ["-c", "user.name=x", "-c", "user.email=x@example.org"]
        subprocess.run(["git", "-C", str(root), *identity, *arguments], check=True, capture_output=True)

    git("init", "--quiet")
    for library, bench in (("1", "old"), ("2", "new")):
        (root / "library").write_text(library)
        (root / "bench" / "version").write_text(bench)
        git("add", ".")
        git("commit", "--quiet", "-m", bench)
    return root


def test_a_worktree_holds_the_old_library_and_these_benchmarks(repository):
    with compare.worktree("HEAD~1", repository) as tree:
        assert (tree / "library").read_text() == "1"
        assert (tree / "bench" / "version").read_text() == "new"
    assert not tree.exists()
    listed = subprocess.run(
        ["git", "-C", str(repository), "worktree", "list"], capture_output=True, text=True
    )
    assert len(listed.stdout.splitlines()) == 1


def test_a_ref_that_is_no_commit_is_named(repository):
    with pytest.raises(compare.BadRef, match=r"--ref 'nowhere'"), compare.worktree("nowhere", repository):
        pass


def test_two_commits_take_turns(repository, monkeypatch):
    seen = []

    def run_in(tree, arguments):
        seen.append((tree / "library").read_text())
        return result(row(median=float(len(seen))))

    monkeypatch.setattr(compare, "run_in", run_in)
    old, new = compare.against("HEAD~1", ["--case", "x"], 2, repository)
    assert seen == ["1", "2", "1", "2"]
    assert (old["rows"][0]["samples_us"], new["rows"][0]["samples_us"]) == ([1.0, 3.0], [2.0, 4.0])
    assert new["rows"][0]["median_us"] == 3.0
    assert len(old["environment"]["commit"]) == 12


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0])
def test_an_exponent_is_the_slope_of_a_power_law(power):
    sizes = [1, 2, 4, 8]
    rounds = [[c * size**power for size in sizes] for c in (1.0, 3.0, 5.0)]
    fitted = scaling.fit("context", sizes, rounds)
    for name in ("exponent", "low", "high", "last_doubling"):
        assert fitted[name] == pytest.approx(power, abs=1e-9)


def test_the_spread_of_an_exponent_is_that_of_the_rounds():
    sizes = [1, 2, 4]
    fitted = scaling.fit("batch", sizes, [[size**power for size in sizes] for power in (0.8, 1.0, 1.2)])
    assert (fitted["low"], fitted["exponent"], fitted["high"]) == pytest.approx((0.84, 1.0, 1.16))


@pytest.mark.parametrize("axis", scaling.AXES)
def test_one_number_grows_along_an_axis(axis):
    points = scaling.sweep(axis, "toy", small=True)
    (size, first), (next_size, second) = points[:2]
    assert next_size == 2 * size
    growth = 1 if axis == "pages" else 2
    assert second.flops == growth * first.flops
    assert (second.page_size == 2 * first.page_size) == (axis == "pages")


def measured(case, kind, who="xla"):
    return row(case, who, kind=kind, settings="s=1", gbps=5.0, tflops=0.5, share=0.5, flops_per_byte=2.0)


def test_a_page_says_where_its_figures_come_from():
    found = result(
        measured("toy/1x64/q1/f32", "decode"),
        measured("toy/1x512/q512/f32", "prefill"),
        row("step/4x8", kind="step", settings=""),
        {"case": "toy/1x64/q1/f32", "who": "fa3", "refused": "not installed"},
    )
    page = report.markdown(found, ["results/roofline.svg"])
    assert "These are times on a CPU" in page
    assert "| `toy/1x64/q1/f32` | xla | 10.0 (9.0..11.0) | 5 | 0.5 | 0.50 |  | s=1 |" in page
    assert "* fa3: not installed (`toy/1x64/q1/f32`)" in page
    assert "`python -m bench.run`" in page
    assert "![roofline](results/roofline.svg)" in page
    found["environment"]["backend"] = "gpu"
    assert "times on a CPU" not in report.markdown(found, [])


def test_the_committed_page_is_what_its_command_writes(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    committed = (ROOT / "bench" / "RESULTS.md").read_text()
    (arguments,) = re.findall(r"^Written by `python -m bench.report (.*?)`", committed, re.M)
    monkeypatch.setattr(report, "DEFAULT_PAGE", tmp_path / "RESULTS.md")
    assert report.main(arguments.split()) == 0
    assert (tmp_path / "RESULTS.md").read_text() == committed
    written = {path.name for path in (tmp_path / "results").iterdir()}
    assert written == {path.name for path in (ROOT / "bench" / "results").glob("*.svg")}


@pytest.mark.parametrize("draw", [plots.roofline, plots.times])
def test_the_same_result_gives_the_same_picture(tmp_path, draw):
    found = result(measured("toy/1x64/q1/f32", "decode"), measured("toy/1x512/q512/f32", "prefill", "dense"))
    for name in ("a.svg", "b.svg"):
        plots.save(draw, found, tmp_path / name)
    text = (tmp_path / "a.svg").read_text()
    assert text == (tmp_path / "b.svg").read_text()
    assert "a device" in text
    assert "dense" in text


def test_simulated_passes_tend_to_the_sum_of_reach():
    parents, accuracy = [-1, 0, 0, 1, 1, 2], [0.6, 0.2]
    assert acceptance.ranks(parents) == [0, 0, 1, 0, 1, 0]
    np.testing.assert_allclose(acceptance.reach(parents, accuracy), [1, 0.6, 0.2, 0.36, 0.12, 0.12])
    passes = acceptance.simulated_tokens(parents, accuracy, 4000)
    assert abs(passes.mean() - 2.4) < 5 * passes.std() / np.sqrt(len(passes))
    assert (acceptance.simulated_tokens([-1, 0, 1, 2], [1.0], 10) == 4).all()
    assert (acceptance.simulated_tokens([-1, 0, 1, 2], [0.0], 10) == 1).all()
