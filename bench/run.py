"""Measures attention cases with our implementations and the installed peers.

    python -m bench.run --cases all --peers fa3 fa3-dense cudnn jax-paged aiter flashinfer --json run.json   # on a GPU
    python -m bench.run --cases small --peers dense                                         # anywhere
    python -m bench.run --case llama-3-8b/32x8k/q4 'gpt-oss*' toy/4x300/q2/f32

A case is named by model, batch and query length (see bench/shapes.py); `step/128x8192` is the page table and plan of
a step. Every answer is checked against float64 first; no speed is printed for a wrong one. The cases are walked in
several rounds, in each of which all entrants are timed in turn, so that a drift of the machine shows in the spread,
which is the 10th to the 90th percentile of all samples.
"""

import argparse
import dataclasses
import sys
import time

import jax
import numpy as np

import jaxattn
from bench import contest, environment, results, shapes, step, timing
from bench.peers import aiter_torch, flashinfer_torch

# Measured in processes of their own.
TORCH_PEERS = {"aiter": aiter_torch, "flashinfer": flashinfer_torch}
PEERS = (*contest.PEERS, *TORCH_PEERS)
GROUPS = (*shapes.GROUPS, "step", "all")


@dataclasses.dataclass(frozen=True)
class Job:
    """What to measure."""

    cases: tuple[str, ...]
    implementations: tuple[str, ...]
    peers: tuple[str, ...] = ()
    rounds: int = 3
    iterations: int = 15


def cases_of(group: str) -> tuple[str, ...]:
    """Names of a group; `all` is everything but the small one."""
    if group == "step":
        return step.FULL
    names = tuple(shape.name for shape in shapes.GROUPS.get(group, ()))
    if group == "small":
        return (*names, *step.SMALL)
    if group == "all":
        return tuple(name for g in GROUPS if g not in ("small", "all") for name in cases_of(g))
    return names


def measure(job: Job, progress=lambda line: None, keep=lambda result: None) -> dict:
    """All rows of a run, with the machine's ceilings; `keep` gets what there is behind each case and peer process."""
    ceilings: dict[str, list[float]] = {"read_gbps": [], "matmul_tflops": []}
    entries: dict[str, dict[str, contest.Entry]] = {}
    in_process = [peer for peer in job.peers if peer in contest.PEERS]

    def kept() -> dict:
        result = _result(job, entries, ceilings)
        keep(result)
        return result

    for number in range(job.rounds):
        ceilings["read_gbps"].append(timing.read_bandwidth())
        ceilings["matmul_tflops"].append(timing.matmul_rate())
        for case in job.cases:
            progress(f"round {number + 1} of {job.rounds}: {case}")
            entrants = contest.make_contest(case, job.implementations, in_process)
            if number == 0:
                entries[case] = contest.first_round(entrants, job.iterations)
            else:
                entries[case] = contest.next_round(entrants, entries[case], job.iterations)
            del entrants
            result = kept()
    # Last, for it can take minutes to compile them.
    for peer in job.peers:
        if peer in TORCH_PEERS:
            progress(f"{peer} in a process of its own")
            for case, entry in _torch_entries(TORCH_PEERS[peer], job.cases).items():
                entries[case][peer] = entry
            result = kept()
    return result


def _result(job: Job, entries: dict[str, dict[str, contest.Entry]], ceilings: dict[str, list[float]]) -> dict:
    """What has been measured so far."""
    middle = {name: float(np.median(values)) for name, values in ceilings.items()}
    rows = [
        results.refused_row(case, who, entry.refused)
        if entry.timing is None
        else results.row(case, who, entry.settings, entry.error, entry.timing, middle)
        for case in job.cases
        for who, entry in entries.get(case, {}).items()
    ]
    return {
        "format": results.FORMAT,
        "clock": timing.clock(),
        "rounds": job.rounds,
        "ceilings": middle,
        "rows": results.with_ratios(rows, job.implementations, job.peers),
    }


def _torch_entries(peer, cases) -> dict[str, contest.Entry]:
    """What a peer under torch makes of each attention case."""
    entries, wanted = {}, []
    for case in cases:
        if not step.is_step(case):
            reason = peer.unavailable(shapes.parse(case))
            entries[case] = contest.Entry(refused=reason)
            wanted += [] if reason else [case]
    for case, found in (peer.measure(wanted) if wanted else {}).items():
        entry = contest.Entry(refused=found.get("refused"))
        if "samples" in found:
            times = timing.Timing(tuple(found["samples"]))
            entry = contest.Entry(settings=found["settings"], error=found["error"], timing=times)
        entries[case] = entry
    return entries


def lines(result: dict):
    """The table as text: time and its spread, rates, share of the ceiling, our ratio to each peer."""
    ceilings = result["ceilings"]
    yield (
        f"{result['environment']['device']}: read {ceilings['read_gbps']:.4g} GB/s, "
        f"matmul {ceilings['matmul_tflops']:.3g} TFLOP/s, times by the {result['clock']} clock"
    )
    width = max(len(r["case"]) for r in result["rows"]) + 2
    columns = f"{'us':>10}  {'spread':<18}{'GB/s':>8}{'TFLOP/s':>9}{'share':>7}  ratios; settings"
    yield f"{'case':<{width}}{'who':<10}{columns}"
    for r in result["rows"]:
        head = f"{r['case']:<{width}}{r['who']:<10}"
        if "refused" in r:
            yield f"{head}  - {r['refused']}"
            continue
        rates = " " * 24
        if r["kind"] != "step":
            rates = f"{results.figure(r['gbps']):>8}{results.figure(r['tflops']):>9}{r['share']:>7.2f}"
        ratios = " ".join(f"{ratio:.2f}x {other}" for other, ratio in r.get("ratios", {}).items())
        notes = "; ".join(filter(None, (ratios, r["settings"])))
        spread = f"{r['low_us']:.1f}..{r['high_us']:.1f}"
        yield f"{head}{r['median_us']:>10.1f}  {spread:<18}{rates}  {notes}".rstrip()


def positive(text: str) -> int:
    """A positive number of the command line."""
    if not text.isdigit() or not int(text):
        raise argparse.ArgumentTypeError(f"expected a positive number, got {text!r}")
    return int(text)


def parse(arguments) -> tuple[Job, str | None]:
    """Read the command line; a bad one ends the program with exit code 2."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    on_cpu = jax.default_backend() == "cpu"
    parser.add_argument("--case", nargs="+", default=[], metavar="NAME", help="a name, or a pattern with *")
    parser.add_argument(
        "--cases",
        nargs="+",
        choices=GROUPS,
        help="default: small on a CPU, all on a GPU, unless --case is given",
    )
    parser.add_argument("--implementation", nargs="+", choices=tuple(jaxattn.implementations()))
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=[])
    parser.add_argument("--rounds", type=positive, default=3, help="over all cases")
    parser.add_argument("--iterations", type=positive, default=15, help="timed runs a round")
    parser.add_argument(
        "--json", metavar="FILE", help="write every figure to this file, anew behind each case"
    )
    options = parser.parse_args(arguments)
    groups = options.cases or ([] if options.case else ["small" if on_cpu else "all"])
    try:
        picked = [name for name in options.case if not step.is_step(name)]
        named = [*shapes.select(picked), *(name for name in options.case if step.is_step(name))]
    except ValueError as error:
        parser.error(str(error))
    cases = dict.fromkeys([name for group in groups for name in cases_of(group)] + named)
    implementations = options.implementation or ["xla" if on_cpu else "triton"]
    job = Job(tuple(cases), tuple(implementations), tuple(options.peers), options.rounds, options.iterations)
    return job, options.json


def run(job: Job, arguments, progress=lambda line: None, keep=lambda result: None) -> dict:
    """Measure a job; the environment is read behind the first case, while the clocks are those of the load."""
    found: dict = {}

    def describe(result):
        if not found:
            found["environment"] = environment.describe("bench.run", arguments)
        found.update(result)
        keep(found)

    measure(job, progress, describe)
    return found


def main(arguments=None) -> int:
    """Command line."""
    arguments = sys.argv[1:] if arguments is None else arguments
    job, path = parse(arguments)
    started = time.monotonic()

    def progress(line):
        print(f"{time.monotonic() - started:4.0f} s  {line}", file=sys.stderr, flush=True)

    def keep(result):
        if path:
            results.save(path, result)

    print(*lines(run(job, arguments, progress, keep)), sep="\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
