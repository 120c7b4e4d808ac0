"""Measures how the cost of attention grows with context, batch, page size and heads.

    python -m bench.scaling [--axis context batch pages heads] [--model llama-3-8b] [--json FILE] [--plot FILE]

Along each axis one number doubles and the rest stays. The exponent is the slope of log time over log size by least
squares, fitted to each round of measurements; its spread is the 10th to the 90th percentile over rounds. 1 is linear
and 0 is free; where a fixed cost weighs, the exponent of the last doubling is nearer to the truth.
"""

import argparse
import sys

import jax
import numpy as np

import jaxattn
from bench import contest, environment, shapes
from bench.results import read_json, save
from bench.run import positive
from bench.timing import interval

FORMAT = "jaxattn.bench.scaling/1"
AXES = ("context", "batch", "pages", "heads")


def sweep(axis: str, model: str, small: bool) -> list[tuple[int, shapes.Shape]]:
    """Sizes along an axis, with their shapes; a decode step throughout."""
    sequences, context, dtype = (4, 256, "f32") if small else (32, 8192, "bf16")
    base = shapes.parse(f"{model}/{sequences}x{context}/q1/{dtype}")
    growing = [1, 2, 4, 8]
    if axis == "context":
        return [(c * context, base.replace(contexts=(c * context,) * sequences)) for c in growing]
    if axis == "batch":
        return [(n * sequences, base.replace(contexts=base.contexts * n)) for n in growing]
    if axis == "pages":
        return [(p, base.replace(page_size=p)) for p in (16, 32, 64, 128)]
    return [
        (n * base.num_heads, base.replace(num_heads=n * base.num_heads, num_kv_heads=n * base.num_kv_heads))
        for n in growing
    ]


def exponent(sizes, times) -> float:
    """Slope of log time over log size by least squares."""
    x, y = np.log(np.asarray(sizes, float)), np.log(np.asarray(times, float))
    return float(np.polyfit(x, y, 1)[0])


def fit(axis: str, sizes: list[int], rounds: list[list[float]]) -> dict:
    """Exponents of an axis from microseconds by round and size."""
    low, middle, high = interval([exponent(sizes, times) for times in rounds])
    last = interval([exponent(sizes[-2:], times[-2:]) for times in rounds])[1]
    return {
        "axis": axis,
        "sizes": sizes,
        "rounds_us": rounds,
        "exponent": middle,
        "low": low,
        "high": high,
        "last_doubling": last,
    }


def load(path) -> dict:
    """Read a result.

    Raises:
        BadResult: the file is not there or is no result of `bench.scaling`.
    """
    return read_json(path, FORMAT, "bench.scaling")


def measure(
    axis: str, model: str, implementation: str, rounds: int, small: bool, iterations: int = 7
) -> dict:
    """Median microseconds of each size in each round, all sizes in turn, fitted."""
    points = sweep(axis, model, small)
    entries: dict[int, dict[str, contest.Entry]] = {}
    times: list[list[float]] = []
    for number in range(rounds):
        times.append([])
        for size, shape in points:
            entered = contest.contest_of(shape, [implementation], [])
            if number == 0:
                entries[size] = contest.first_round(entered, iterations)
            else:
                entries[size] = contest.next_round(entered, entries[size], iterations)
            entry = entries[size][implementation]
            if entry.timing is None:
                raise ValueError(f"{implementation} at {axis} {size}: {entry.refused}")
            times[-1].append(float(np.median(entry.timing.samples[-iterations:])))
    return fit(axis, [size for size, _ in points], times)


def line(fitted: dict) -> str:
    """An axis in one line."""
    return (
        f"{fitted['axis']:<8} {fitted['sizes'][0]:>7} to {fitted['sizes'][-1]:<7} "
        f"{np.median([times[0] for times in fitted['rounds_us']]):>10.1f} to "
        f"{np.median([times[-1] for times in fitted['rounds_us']]):<10.1f} us   exponent {fitted['exponent']:5.2f} "
        f"({fitted['low']:.2f}..{fitted['high']:.2f}), last doubling {fitted['last_doubling']:.2f}"
    )


def main(arguments=None) -> int:
    """Command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    on_cpu = jax.default_backend() == "cpu"
    parser = argparse.ArgumentParser(
        prog="python -m bench.scaling",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--axis", nargs="+", choices=AXES, default=AXES)
    parser.add_argument("--model", choices=tuple(shapes.MODELS), default="toy" if on_cpu else "llama-3-8b")
    parser.add_argument(
        "--implementation", choices=tuple(jaxattn.implementations()), default="xla" if on_cpu else "triton"
    )
    parser.add_argument("--small", action="store_true", default=on_cpu, help="small sizes; always on a CPU")
    parser.add_argument("--rounds", type=positive, default=5)
    parser.add_argument("--json", metavar="FILE", help="write every figure to this file")
    parser.add_argument("--plot", metavar="FILE", help="draw time over size into this PNG or SVG file")
    options = parser.parse_args(arguments)
    print(f"{options.implementation}, heads of {options.model}, on {environment.device_name()}", flush=True)
    fits = []
    for axis in options.axis:
        fits.append(measure(axis, options.model, options.implementation, options.rounds, options.small))
        print(line(fits[-1]), flush=True)
    about = environment.describe("bench.scaling", arguments)
    result = {"format": FORMAT, "environment": about, "model": options.model, "axes": fits}
    if options.json:
        save(options.json, result)
    if options.plot:
        from bench import plots

        plots.save(plots.scaling, result, options.plot)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
