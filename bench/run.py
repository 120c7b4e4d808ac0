"""Measures attention shapes with our implementations and the installed peers.

    python -m bench.run [--shape NAME ...] [--group decode|fp8|prefill] [--implementation triton xla]
                        [--peers fa3 cudnn aiter] [--json out.json]

Every result is checked against a float64 computation first; no speed is printed for a wrong answer.
"""

import argparse
import json
import sys

import jax

from bench import shapes, timing
from bench.inputs import Inputs, make_inputs, sampled_error
from bench.peers import aiter_torch, cudnn, fa3, ours

IN_PROCESS = {"fa3": fa3, "cudnn": cudnn}
TOLERANCE = {"bfloat16": 1.5e-2, "float8_e4m3fn": 3e-2}


def best_of(candidates, inputs: Inputs) -> dict:
    """The fastest candidate whose answer is right, or the reason why there is none."""
    best, refusals = None, []
    for settings, function, arguments, calls, output in candidates:
        compiled = jax.jit(function)
        try:
            error = sampled_error(inputs, output(compiled(*arguments)))
        except Exception as refusal:
            refusals.append(f"{settings}: {type(refusal).__name__}: {str(refusal).splitlines()[0][:160]}")
            continue
        if not error < TOLERANCE[inputs.shape.kv_dtype]:
            refusals.append(f"{settings}: wrong answer, error {error:.1e}")
            continue
        measured = timing.device_time(compiled, arguments, calls=calls)
        if best is None or measured.median < best["median"]:
            best = {
                "settings": settings,
                "error": error,
                "median": measured.median,
                "low": measured.low,
                "high": measured.high,
                "kernels": measured.kernels,
            }
    return best or {"refused": "; ".join(refusals)}


def rate(shape: shapes.Shape, microseconds: float) -> float:
    """GB/s of K and V bytes for decode, TFLOP/s for prefill."""
    return (
        shape.flops / microseconds / 1e6 if shape.kind == "prefill" else shape.kv_bytes / microseconds / 1e3
    )


def measure(names, implementations, peers) -> dict:
    """All rows of a run, with the machine's ceilings."""
    report = {
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "read_gbps": timing.read_bandwidth(),
        "matmul_tflops": timing.matmul_rate(),
        "rows": [],
    }
    print(
        f"{report['device']}: read {report['read_gbps']:.0f} GB/s, matmul {report['matmul_tflops']:.0f} TFLOP/s"
    )
    torch_rows = {}
    if "aiter" in peers:
        torch_names = [n for n in names if aiter_torch.unavailable(shapes.ALL[n]) is None]
        torch_rows = aiter_torch.measure(torch_names) if torch_names else {}
    for name in names:
        shape = shapes.ALL[name]
        inputs = make_inputs(shape)
        results = {i: best_of(ours.candidates(inputs, i), inputs) for i in implementations}
        for peer in peers:
            if peer in IN_PROCESS:
                reason = IN_PROCESS[peer].unavailable(shape)
                results[peer] = (
                    {"refused": reason} if reason else best_of(IN_PROCESS[peer].candidates(inputs), inputs)
                )
            elif name in torch_rows:
                results[peer] = torch_rows[name]
        report["rows"].append({"shape": name, "kind": shape.kind, "results": results})
        print_row(shape, results, report)
        del inputs
    return report


def print_row(shape: shapes.Shape, results: dict, report: dict) -> None:
    """One line a shape: rate, share of the ceiling, ratio of ours to each peer."""
    unit = "TFLOP/s" if shape.kind == "prefill" else "GB/s"
    ceiling = report["matmul_tflops"] if shape.kind == "prefill" else report["read_gbps"]
    cells = []
    for who, row in results.items():
        if "median" not in row:
            cells.append(f"{who}: {row.get('refused', row.get('settings'))}")
            continue
        value = rate(shape, row["median"])
        spread = (row["high"] - row["low"]) / row["median"]
        cells.append(
            f"{who} {value:.0f} {unit} {value / ceiling:.2f} ({row['median']:.1f} us ±{spread:.0%} {row['settings']})"
        )
    print(f"{shape.name:30s} " + " | ".join(cells), flush=True)


def main(argv=None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.run", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="*", choices=list(shapes.ALL), default=None)
    parser.add_argument("--group", choices=("decode", "fp8", "prefill"), nargs="*", default=None)
    parser.add_argument("--implementation", nargs="*", default=["triton"])
    parser.add_argument("--peers", nargs="*", choices=("fa3", "cudnn", "aiter"), default=[])
    parser.add_argument("--json", help="write every figure to this file")
    options = parser.parse_args(argv)
    groups = {"decode": shapes.DECODE, "fp8": shapes.FP8, "prefill": shapes.PREFILL}
    names = options.shape or [s.name for g in options.group or groups for s in groups[g]]
    if jax.default_backend() != "gpu":
        print(
            "bench.run measures device time with CUPTI and needs a CUDA device; found none", file=sys.stderr
        )
        return 2
    report = measure(names, options.implementation, options.peers)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(report, file, indent=1)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
