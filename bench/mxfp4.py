"""Times an MXFP4 linear layer beside the same layer in bfloat16.

    python -m bench.mxfp4 --tokens 1 4 16 --implementation tiles pallas --json results.json

`tiles` is the weight in `Mxfp4Tiles`, as it is loaded onto a device that they are tuned for; the others take it as it
is stored.

Every answer is checked against float64 first. The weights are rotated past the L2 cache; the time is that of all
kernels of the product, those that lay out its input and add its parts included.
"""

import argparse
import dataclasses
import functools
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from bench import environment
from bench.inputs import copies_past_l2, draw
from bench.run import positive
from bench.timing import Timing, device_time
from jaxattn.quantization import Mxfp4Tiles, Mxfp4Weight
from jaxattn.quantization.mxfp4_matmul import IMPLEMENTATIONS, matmul
from jaxattn.quantization.mxfp4_tiles import tiles_are_faster
from jaxattn.quantization.weights import dot

# Largest error over the largest value; the products round x to bfloat16 and nothing else.
TOLERANCE = 1e-2
SAMPLED_ROWS = 64
TILES = "tiles"


@dataclasses.dataclass(frozen=True)
class Layers:
    """Copies of a layer, each with an input of its own, so that nothing is computed once for all."""

    inputs: list[jax.Array]  # [tokens, columns]
    weights: list[Mxfp4Weight]

    @property
    def expected(self) -> np.ndarray:
        """Float64 output of the first rows of the first copy, `[tokens, SAMPLED_ROWS]`."""
        weight = np.asarray(self.weights[0].dequantize(jnp.float32)[:SAMPLED_ROWS], np.float64)
        return np.asarray(self.inputs[0].astype(jnp.float32), np.float64) @ weight.T


def make_layers(tokens: int, rows: int, columns: int) -> Layers:
    """Draw as many copies as no L2 cache holds."""
    copies = copies_past_l2(rows * columns / 2)
    keys = jax.random.split(jax.random.key(0, impl="rbg"), 2 * copies)
    weights = [Mxfp4Weight.from_array(draw(key, (rows, columns), "bfloat16", 0.02)) for key in keys[:copies]]
    return Layers([draw(key, (tokens, columns), "bfloat16") for key in keys[copies:]], weights)


def measure(tokens: int, rows: int, columns: int, implementations, iterations: int) -> list[dict]:
    """A row for bfloat16 and one for each implementation."""
    layers = make_layers(tokens, rows, columns)
    packed = [(w.packed, w.scale) for w in layers.weights]
    dense = [w.dequantize(jnp.bfloat16) for w in layers.weights]
    found = [_time("bfloat16", dot, dense, 2 * columns * rows, layers, iterations)]
    for name in implementations:

        def product(x, weight, name=name):
            return weight.matmul(x) if name == TILES else matmul(x, *weight, rows, implementation=name)

        weights = [Mxfp4Tiles.from_weight(w) for w in layers.weights] if name == TILES else packed
        found.append(_time(name, product, weights, columns * rows * 17 / 32, layers, iterations))
        found[-1]["ratio"] = found[0]["median_us"] / found[-1]["median_us"]
    return [{"tokens": tokens, "rows": rows, "columns": columns, **row} for row in found]


def _time(name: str, product, weights, weight_bytes: float, layers: Layers, iterations: int) -> dict:
    @jax.jit
    def calls(inputs, weights):
        return [product(x, w) for x, w in zip(inputs, weights, strict=True)]

    first = np.asarray(calls(layers.inputs, weights)[0], np.float64)[:, :SAMPLED_ROWS]
    error = float(np.abs(first - layers.expected).max() / np.abs(layers.expected).max())
    if not error <= TOLERANCE:
        raise SystemExit(f"{name}: wrong answer, error {error:.1e}; no speed is worth printing")
    taken: Timing = device_time(calls, (layers.inputs, weights), calls=len(weights), iterations=iterations)
    return {
        "who": name,
        "error": error,
        "low_us": taken.low,
        "median_us": taken.median,
        "high_us": taken.high,
        "gbps": weight_bytes / taken.median / 1e3,
        "kernels": taken.kernels,
    }


def lines(rows: list[dict]):
    """The table as text."""
    yield f"{'layer':<22}{'who':<10}{'us':>9}  {'spread':<18}{'GB/s':>7}{'of bfloat16':>13}"
    for r in rows:
        layer = f"{r['tokens']} x {r['columns']} x {r['rows']}"
        spread = f"{r['low_us']:.1f}..{r['high_us']:.1f}"
        ratio = f"{r['ratio']:>12.2f}x" if "ratio" in r else ""
        yield f"{layer:<22}{r['who']:<10}{r['median_us']:>9.1f}  {spread:<18}{r['gbps']:>7.0f}{ratio}"


def parse(arguments) -> argparse.Namespace:
    """Read the command line; a bad one ends the program with exit code 2."""
    on_cpu = jax.default_backend() == "cpu"
    size = 512 if on_cpu else 8192
    parser = argparse.ArgumentParser(
        prog="python -m bench.mxfp4",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--tokens", nargs="+", type=positive, default=[1, 2, 4, 8, 16], help="rows of the input"
    )
    parser.add_argument("--rows", type=positive, default=size, help="output features")
    parser.add_argument("--columns", type=positive, default=size, help="input features")
    parser.add_argument(
        "--implementation",
        nargs="+",
        choices=(TILES, *IMPLEMENTATIONS),
        default=["xla"] if on_cpu else (*[TILES] * tiles_are_faster(), *IMPLEMENTATIONS),
    )
    parser.add_argument("--iterations", type=positive, default=15, help="timed runs")
    parser.add_argument("--json", metavar="FILE", help="write every figure to this file")
    return parser.parse_args(arguments)


def main(arguments=None) -> int:
    """Command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    options = parse(arguments)
    one = functools.partial(
        measure,
        rows=options.rows,
        columns=options.columns,
        implementations=options.implementation,
        iterations=options.iterations,
    )
    rows = [row for tokens in options.tokens for row in one(tokens)]
    print(*lines(rows), sep="\n")
    if options.json:
        result = {"environment": environment.describe("bench.mxfp4", arguments), "rows": rows}
        Path(options.json).write_text(json.dumps(result, indent=1))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
