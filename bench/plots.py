"""Draws results: a roofline, times of a case beside each other, and cost over size.

    python -m bench.plots results.json --output roofline.svg

Each function draws into a matplotlib `Axes`, so that a notebook can place it.
"""

import argparse

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, ScalarFormatter

from bench import results

MARKERS = "osD^vP*X"


def _measured(result: dict) -> list[dict]:
    return [r for r in result["rows"] if "share" in r]


def _by(rows: list[dict], key: str) -> dict[str, list[dict]]:
    groups: dict[str, list[dict]] = {}
    for r in rows:
        groups.setdefault(r[key], []).append(r)
    return groups


def roofline(result: dict, ax: Axes) -> None:
    """Achieved rate over arithmetic intensity, below the bandwidth and the matmul rate of the same run."""
    rows = _measured(result)
    bandwidth, peak = result["ceilings"]["read_gbps"], result["ceilings"]["matmul_tflops"]
    ridge = 1e3 * peak / bandwidth
    intensities = [r["flops_per_byte"] for r in rows]
    x = np.geomspace(min([*intensities, ridge]) / 4, max([*intensities, ridge]) * 2, 200)
    ax.plot(x, np.minimum(bandwidth * x / 1e3, peak), color="black", linewidth=1.2)
    ax.text(0.85 * ridge, peak, f"read {bandwidth:.4g} GB/s", fontsize=8, ha="right", va="center")
    ax.annotate(
        f"matmul {peak:.3g} TFLOP/s",
        (x[-1], peak),
        (0, 5),
        fontsize=8,
        textcoords="offset points",
        ha="right",
    )
    for marker, (who, group) in zip(MARKERS, _by(rows, "who").items(), strict=False):
        ax.plot(
            [r["flops_per_byte"] for r in group], [r["tflops"] for r in group], marker, label=who, alpha=0.75,
            markersize=6,
        )  # fmt: skip
    ax.set(
        xscale="log", yscale="log", xlabel="arithmetic intensity (FLOP / byte)", ylabel="achieved (TFLOP/s)",
        title=f"Roofline on {result['environment']['device']}",
    )  # fmt: skip
    ax.set_ylim(top=1.6 * max([peak, *(r["tflops"] for r in rows)]))
    ax.grid(True, which="major", alpha=0.3)
    ax.legend(loc="lower right", fontsize=8)


def times(result: dict, ax: Axes) -> None:
    """Median time of each case by entrant, with the 10th to the 90th percentile."""
    rows = [r for r in result["rows"] if "median_us" in r]
    cases = list(dict.fromkeys(r["case"] for r in rows))
    groups = _by(rows, "who")
    for number, (marker, (who, group)) in enumerate(zip(MARKERS, groups.items(), strict=False)):
        shift = 0.5 * ((number + 0.5) / len(groups) - 0.5)
        y = [cases.index(r["case"]) + shift for r in group]
        middle = [r["median_us"] for r in group]
        spread = [
            [r["median_us"] - r["low_us"] for r in group],
            [r["high_us"] - r["median_us"] for r in group],
        ]
        ax.errorbar(middle, y, xerr=spread, fmt=marker, label=who, capsize=2, markersize=5, linewidth=1)
    ax.set_yticks(range(len(cases)), cases, fontsize=8)
    ax.invert_yaxis()
    ax.set(xscale="log", xlabel="time of a call (us), 10th to 90th percentile")
    ax.set_title(f"Times on {result['environment']['device']}")
    ax.grid(True, axis="x", which="major", alpha=0.3)
    ax.legend(fontsize=8)


def scaling(result: dict, ax: Axes) -> None:
    """Median time over size along each axis, relative to the smallest, with the fitted exponents."""
    sizes = []
    for marker, fitted in zip(MARKERS, result["axes"], strict=False):
        growth = np.asarray(fitted["sizes"]) / fitted["sizes"][0]
        cost = np.asarray(fitted["rounds_us"])
        low, middle, high = np.percentile(cost / np.median(cost[:, 0]), [10, 50, 90], axis=0)
        label = f"{fitted['axis']} from {fitted['sizes'][0]}: exponent {fitted['exponent']:.2f}"
        ax.errorbar(growth, middle, yerr=[middle - low, high - middle], marker=marker, label=label, capsize=2)
        sizes.extend(growth)
    ticks = sorted(set(sizes))
    ax.plot(ticks, ticks, ":", color="gray", label="linear")
    ax.set(
        xscale="log", yscale="log", xlabel="size over the smallest", ylabel="time over that of the smallest",
        title=f"Cost of a decode step on {result['environment']['device']}",
    )  # fmt: skip
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(ScalarFormatter())
    ax.yaxis.set_minor_formatter(ScalarFormatter())
    ax.grid(True, which="major", alpha=0.3)
    ax.grid(True, axis="y", which="minor", alpha=0.15)
    ax.legend(fontsize=8)


def save(draw, result: dict, path) -> None:
    """Write one plot as a PNG or SVG file, by the name's ending; the same result gives the same bytes."""
    rows = len({r["case"] for r in result.get("rows", ())})
    figure = Figure(figsize=(8, max(4.5, 1.5 + 0.3 * rows) if draw is times else 4.8), layout="constrained")
    draw(result, figure.subplots())
    with matplotlib.rc_context({"svg.hashsalt": "bench", "svg.fonttype": "none"}):
        figure.savefig(path, dpi=120, metadata={"Date": None} if str(path).endswith(".svg") else None)


def main(arguments=None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.plots", description="Draws a result of bench.run.")
    parser.add_argument("file", help="a result of bench.run --json")
    parser.add_argument("--kind", choices=("roofline", "times"), default="roofline")
    parser.add_argument("--output", required=True, metavar="FILE", help="a PNG or SVG file")
    options = parser.parse_args(arguments)
    if not options.output.endswith((".png", ".svg")):
        parser.error(f"--output: expected a .png or .svg file, got {options.output!r}")
    try:
        result = results.load(options.file)
    except results.BadResult as error:
        parser.error(str(error))
    if not _measured(result):
        parser.error(f"{options.file}: no row has figures")
    save({"roofline": roofline, "times": times}[options.kind], result, options.output)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
