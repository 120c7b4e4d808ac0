"""The result of a run as data: rows of figures, and what follows from them."""

import json
import re
from pathlib import Path

from bench import shapes, step
from bench.timing import Timing, interval

FORMAT = "jaxattn.bench/1"


class BadResult(ValueError):
    """A file that the benchmarks did not write."""


def refused_row(case: str, who: str, reason: str) -> dict:
    """A row without figures."""
    return {"case": case, "who": who, "refused": reason}


def row(case: str, who: str, settings: str, error: float, timing: Timing, ceilings: dict) -> dict:
    """Times in microseconds a call, with the rates that follow from them.

    `share` is that of the measured bandwidth for decode and verify, of the measured matmul rate for prefill.
    """
    figures = {
        "case": case,
        "who": who,
        "settings": settings,
        "error": error,
        "median_us": timing.median,
        "low_us": timing.low,
        "high_us": timing.high,
        "samples_us": [round(sample, 3) for sample in timing.samples],
        "kernels_us": timing.kernels,
    }
    if step.is_step(case):
        return figures | {"kind": "step"}
    shape = shapes.parse(case)
    gbps, tflops = shape.kv_bytes / timing.median / 1e3, shape.flops / timing.median / 1e6
    share = tflops / ceilings["matmul_tflops"] if shape.kind == "prefill" else gbps / ceilings["read_gbps"]
    return figures | {
        "kind": shape.kind,
        "gbps": gbps,
        "tflops": tflops,
        "share": share,
        "flops_per_byte": shape.flops / shape.bytes,
    }


def figure(value: float) -> str:
    """A rate in a table: three digits, or the whole number where it has more."""
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def with_ratios(rows: list[dict], implementations, peers) -> list[dict]:
    """Add to our rows how many times as fast each peer's time makes them, and fp8 beside bf16."""
    times = {(r["case"], r["who"]): r["median_us"] for r in rows if "median_us" in r}

    def ratios(r):
        others = {peer: times.get((r["case"], peer)) for peer in peers}
        if r["case"].endswith("/fp8"):
            others["bf16"] = times.get((r["case"].removesuffix("/fp8"), r["who"]))
        return {other: time / r["median_us"] for other, time in others.items() if time}

    return [
        r | {"ratios": ratios(r)} if r["who"] in implementations and "median_us" in r else r for r in rows
    ]


def merged(results: list[dict]) -> dict:
    """One result with the samples of several of the same version."""
    samples: dict[tuple, list[float]] = {}
    for result in results:
        for r in result["rows"]:
            samples.setdefault((r["case"], r["who"]), []).extend(r.get("samples_us", []))
    rows = []
    for r in results[0]["rows"]:
        pooled = samples[r["case"], r["who"]]
        if "median_us" in r:
            low, median, high = interval(pooled)
            r = r | {"samples_us": pooled, "low_us": low, "median_us": median, "high_us": high}
        rows.append(r)
    return results[0] | {"rows": rows}


def save(path, result: dict) -> None:
    """Write a result."""
    Path(path).write_text(_unfold(json.dumps(result, indent=1)) + "\n")


def _unfold(text: str) -> str:
    """Put each list of numbers on one line."""
    return re.sub(r"\[\s+([-\d.e+,\s]+?)\s+\]", lambda m: "[" + " ".join(m[1].split()) + "]", text)


def load(path) -> dict:
    """Read a result of `bench.run`.

    Raises:
        BadResult: the file is not there or is no such result.
    """
    return read_json(path, FORMAT, "bench.run")


def read_json(path, form: str, program: str) -> dict:
    """Read a file that `program` wrote.

    Raises:
        BadResult: the file is not there or has not the format `form`.
    """
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise BadResult(f"{path}: expected a file that {program} --json wrote: {error}") from error
    if not isinstance(found, dict) or found.get("format") != form:
        raise BadResult(f"{path}: expected a file that {program} --json wrote, with format {form!r}")
    return found
