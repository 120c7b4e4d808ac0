"""Writes a result of bench.run as Markdown tables, with its plots beside it.

python -m bench.report results.json [--scaling scaling.json] [--output bench/RESULTS.md]
"""

import argparse
import shlex
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import results, scaling
from bench.environment import ROOT

DEFAULT_PAGE = ROOT / "bench" / "RESULTS.md"
TITLES = {"decode": "Decode and verify", "prefill": "Prefill", "step": "Page table and plan of a step"}
CEILING = {"decode": "share of read", "prefill": "share of matmul", "step": ""}


def markdown(result: dict, plots: list[str], fits: dict | None = None, arguments: Sequence[str] = ()) -> str:
    """The whole page.

    Args:
        result: of `bench.run`.
        plots: names of the image files, relative to the page.
        fits: of `bench.scaling`.
        arguments: the command line that wrote the page.
    """
    return "\n".join([*_head(result, arguments), *_tables(result), *_scaling(fits), *_images(plots)]) + "\n"


def _head(result: dict, arguments: Sequence[str]) -> Iterator[str]:
    about, ceilings = result["environment"], result["ceilings"]
    yield "# Results"
    yield ""
    yield f"Written by `{shlex.join(['python', '-m', 'bench.report', *arguments])}`; change the run, not this file."
    yield ""
    if about["backend"] == "cpu":
        yield "**These are times on a CPU.** They show that the tool works and say nothing about a GPU."
        yield ""
    versions = ", ".join(f"{package} {version}" for package, version in about["versions"].items())
    clocks = ", ".join(f"{name} {value}" for name, value in about["clocks"].items())
    facts = {
        "device": about["device"],
        "driver and clocks": clocks or "not reported",
        "versions": f"Python {about['python']}, {versions}",
        "commit": f"{about['commit']}" + (" (with changes)" if str(about["commit"]).endswith("+") else ""),
        "command": f"`{about['command']}`",
        "measured ceilings": f"read {ceilings['read_gbps']:.4g} GB/s, matmul {ceilings['matmul_tflops']:.3g} TFLOP/s",
        "times": f"{result['clock']} clock, median (10th..90th percentile) over {result['rounds']} rounds",
    }
    yield "| | |"
    yield "|---|---|"
    yield from (f"| {name} | {value} |" for name, value in facts.items())


def _tables(result: dict) -> Iterator[str]:
    for kind, title in TITLES.items():
        rows = [r for r in result["rows"] if r.get("kind") == kind]
        if not rows:
            continue
        rates = [] if kind == "step" else ["GB/s", "TFLOP/s", CEILING[kind]]
        columns = ["case", "who", "us", *rates, "ratios", "settings"]
        yield f"\n## {title}\n"
        yield "| " + " | ".join(columns) + " |"
        yield "|---|---" + "|---:" * (1 + len(rates)) + "|---|---|"
        for r in rows:
            figures = [f"{r['median_us']:.1f} ({r['low_us']:.1f}..{r['high_us']:.1f})"]
            if rates:
                figures += [results.figure(r["gbps"]), results.figure(r["tflops"]), f"{r['share']:.2f}"]
            ratios = ", ".join(f"{ratio:.2f}x {other}" for other, ratio in r.get("ratios", {}).items())
            yield "| " + " | ".join([f"`{r['case']}`", r["who"], *figures, ratios, r["settings"]]) + " |"
    refused = [r for r in result["rows"] if "refused" in r]
    if refused:
        yield "\n## Not measured\n"
        reasons: dict[tuple[str, str], list[str]] = {}
        for r in refused:
            reasons.setdefault((r["who"], r["refused"]), []).append(f"`{r['case']}`")
        for (who, reason), cases in reasons.items():
            yield f"* {who}: {reason} ({', '.join(cases)})"


def _scaling(fits: dict | None) -> Iterator[str]:
    if fits is None:
        return
    yield "\n## Scaling of a decode step\n"
    yield f"`{fits['environment']['command']}` on {fits['environment']['device']}.\n"
    yield "| axis | sizes | exponent | last doubling |"
    yield "|---|---|---:|---:|"
    for fitted in fits["axes"]:
        sizes = " ".join(map(str, fitted["sizes"]))
        spread = f"{fitted['exponent']:.2f} ({fitted['low']:.2f}..{fitted['high']:.2f})"
        yield f"| {fitted['axis']} | {sizes} | {spread} | {fitted['last_doubling']:.2f} |"


def _images(plots: list[str]) -> Iterator[str]:
    if plots:
        yield "\n## Plots"
    for plot in plots:
        yield f"\n![{Path(plot).stem}]({plot})"


def write(result: dict, page: Path, fits: dict | None, arguments: Sequence[str]) -> None:
    """Write the page, and its plots into a folder `results` beside it."""
    from bench import plots

    folder = page.parent / "results"
    folder.mkdir(parents=True, exist_ok=True)
    drawn = {"roofline": (plots.roofline, result), "times": (plots.times, result)}
    if fits:
        drawn["scaling"] = (plots.scaling, fits)
    for name, (draw, figures) in drawn.items():
        plots.save(draw, figures, folder / f"{name}.svg")
    page.write_text(markdown(result, [f"results/{name}.svg" for name in drawn], fits, arguments))


def main(arguments=None) -> int:
    """Command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    parser = argparse.ArgumentParser(
        prog="python -m bench.report",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", help="a result of bench.run --json")
    parser.add_argument("--scaling", metavar="FILE", help="a result of bench.scaling --json")
    parser.add_argument("--output", type=Path, default=DEFAULT_PAGE, metavar="FILE")
    options = parser.parse_args(arguments)
    try:
        result = results.load(options.file)
        fits = None if options.scaling is None else scaling.load(options.scaling)
    except results.BadResult as error:
        parser.error(str(error))
    write(result, options.output, fits, arguments)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
