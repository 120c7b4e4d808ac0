"""Measures tile choices of the Triton attention kernel and writes the best into the tuning table.

    python -m bench.tune --list sm90 [--shape NAME ...] > choices.json    # needs no GPU
    python -m bench.tune --choices choices.json [--shape NAME ...] [--write FILE]

The first command compiles every plausible candidate, drops those that spill or do not fit, and finds how many
programs a core holds: the work is cut into as many equal runs as programs run at once, so that number must be
exact. The second checks every candidate against float64, then times it with CUPTI over rotated inputs. `--write`
puts the best choice of each measured shape into a copy of the architecture's table.
"""

import argparse
import dataclasses
import itertools
import json
import math
import sys

import jax
import jax.numpy as jnp

from bench import shapes, timing
from bench.inputs import TOLERANCE, make_inputs, sampled_error
from bench.peers.ours import metadata_of
from jaxattn import plan
from jaxattn.checks import attention_problem
from jaxattn.index64 import index64
from jaxattn.kernels import tuning
from jaxattn.kernels.tuning import ReduceChoice, TileChoice, Tuning
from jaxattn.kernels.tuning.launches import compiler_keeps_turns

_OF_SEVERAL_SHAPES = ("bare_ids", "min_keys", "max_pages")


def table_of(shape: shapes.Shape) -> tuple[str, int, int]:
    """The table that serves a shape, the rows of a sequence, and the bytes of a K or V element."""
    group = shape.num_heads // shape.num_kv_heads
    kind = "prefill" if shape.kind == "prefill" else "split"
    return kind, shape.q_len * group, jnp.dtype(shape.kv_dtype).itemsize


def shape_key(shape: shapes.Shape) -> str:
    """What shapes that take the same entry have in common."""
    kind, rows, _ = table_of(shape)
    rows = "long" if kind == "prefill" else next((r for r in (16, 32, 64) if r >= rows), 64)
    return f"{kind}-D{shape.head_dim}-{rows}-{shape.kv_dtype}"


def rate(shape: shapes.Shape, microseconds: float) -> float:
    """GB/s of K and V bytes for decode, TFLOP/s for prefill."""
    return (
        shape.flops / microseconds / 1e6 if shape.kind == "prefill" else shape.kv_bytes / microseconds / 1e3
    )


def shared_bytes(choice: TileChoice, dim: int) -> int:
    """Estimate a program's shared memory: K and V in the pipeline, and q."""
    # Products of 64 rows and more read shared memory while they run, so they need one buffer more.
    buffers = choice.stages if choice.block_rows >= 64 and choice.warps >= 4 else max(1, choice.stages - 1)
    return 2 * choice.tile * dim * choice.kv_bytes * buffers + choice.block_rows * dim * 2


def candidates(shape: shapes.Shape, architecture: str) -> list[TileChoice]:
    """Choices that are worth compiling for a shape, with one program a core."""
    kind, rows, kv_bytes = table_of(shape)
    held = next((r for r in (16, 32, 64) if r >= rows), 64)
    block_rows, tiles, warps, turns = (held,), (16, 32, 64, 128), (2, 4, 8), (False,)
    loops = ({"bare": False}, {"bare": True})
    if kind == "prefill":
        held, block_rows, tiles, warps = 128, (64, 128), (32, 64, 128), (4, 8)
        loops = ({"bare": True}, {"bare": True, "one_loop": True})
        if kv_bytes == 2 and any(tuning.load(architecture).turns) and compiler_keeps_turns():
            turns = (False, True)
    grid = itertools.product(block_rows, tiles, warps, (2, 3), turns, loops)
    found = [
        TileChoice(
            head_dim=1 << (shape.head_dim - 1).bit_length(),
            rows=held,
            kv_bytes=kv_bytes,
            block_rows=rows,
            tile=tile,
            warps=warp,
            stages=stages,
            programs_per_core=1,
            turns=in_turns,
            **loop,
        )
        for rows, tile, warp, stages, in_turns, loop in grid
        if warp == 8 or not in_turns
    ]
    return [choice for choice in found if _is_plausible(choice)]


def _is_plausible(choice: TileChoice) -> bool:
    rows, tile, warps, dim = choice.block_rows, choice.tile, choice.warps, choice.head_dim
    registers = rows * (dim + tile * 1.5) / (32 * warps) + 64
    return (
        shared_bytes(choice, dim) <= 226 * 1024
        and registers <= 270
        and tile * dim * choice.kv_bytes >= 4096
        and (rows < 64 or warps >= 4)
        and rows * tile >= 256 * warps
    )


def compiled_candidates(shape: shapes.Shape, architecture: str) -> list[TileChoice]:
    """The candidates that compile without spills in their loops, with as many programs as a core holds."""
    from bench.audit.compilation import compile_request
    from bench.audit.report import audit
    from jaxattn.kernels.triton.requests import attention_request

    kind, _, _ = table_of(shape)
    found = []
    for choice in candidates(shape, architecture):
        report = audit(
            compile_request(attention_request(architecture, kind, choice, shape.kv_dtype), architecture)
        )
        print(
            f"{brief(choice)}: {report.registers} registers, {report.shared} bytes",
            report.failures,
            file=sys.stderr,
        )
        programs = math.floor(report.occupancy * 4 / choice.warps)
        if report.passed and programs:
            found.append(dataclasses.replace(choice, programs_per_core=programs))
    return found


def with_choice(base: Tuning, kind: str, choice: TileChoice, reduce: ReduceChoice | None = None) -> Tuning:
    """A table in which every problem of `kind` gets `choice`."""
    return dataclasses.replace(base, **{kind: (choice,)}, reduce=(reduce,) if reduce else base.reduce)


def compiled_call(shape: shapes.Shape, inputs, device, table: Tuning):
    """The jitted calls over all page tables of the inputs, with a plan made once, and their arguments."""
    from jaxattn.kernels.triton.attention import run

    with tuning.using(device, table):
        metadata = [metadata_of(inputs, pages) for pages in inputs.page_tables]
        shared = plan.make_plan(metadata[0], inputs.q, inputs.k_cache)
        metadata = [dataclasses.replace(m, plan=shared) for m in metadata]

        def calls(q, k_cache, v_cache, metadata):
            return [
                run(
                    attention_problem(
                        q, k_cache, v_cache, m, k_descale=inputs.k_descale, v_descale=inputs.v_descale
                    )
                )[0]
                for m in metadata
            ]

        arguments = (inputs.q, inputs.k_cache, inputs.v_cache, metadata)
        return index64(jax.jit(calls)), arguments


def measure_shape(name: str, options, device) -> list[dict]:
    """Time every candidate of a shape; the best first."""
    shape = shapes.ALL[name]
    kind, _, _ = table_of(shape)
    base = tuning.load(device.architecture)
    choices = [
        TileChoice(**entry) for entry in options.choices[shape_key(shape)] if options.only in str(entry)
    ]
    inputs = make_inputs(shape)
    results = []
    for choice in choices:
        table = with_choice(base, kind, choice)
        try:
            function, arguments = compiled_call(shape, inputs, device, table)
            with tuning.using(device, table):
                outputs = function(*arguments)
                error = sampled_error(inputs, outputs[0], samples=2)
                if not error < TOLERANCE[shape.kv_dtype]:
                    results.append({"choice": choice, "failure": f"error {error:.1e}"})
                    continue
                measured = timing.device_time(
                    function, arguments, calls=len(outputs), iterations=options.iterations
                )
        except Exception as failure:
            results.append({"choice": choice, "failure": str(failure).splitlines()[0][:90]})
            continue
        results.append({"choice": choice, "microseconds": measured.median, "kernels": measured.kernels})
    results.sort(key=lambda row: row.get("microseconds", float("inf")))
    return results


def brief(choice: TileChoice) -> str:
    """A choice in a few characters: rows x tile, warps, stages, programs a core, turns, loops that know bare tiles."""
    mark = ("t" if choice.turns else "") + (" 1" if choice.one_loop else " 2" if choice.bare else "")
    return f"{choice.block_rows}x{choice.tile} w{choice.warps} s{choice.stages} p{choice.programs_per_core}{mark}"


def print_shape(name: str, results: list[dict], ceiling: float, top: int) -> None:
    """One line a candidate, the best first."""
    shape = shapes.ALL[name]
    unit = "TFLOP/s" if shape.kind == "prefill" else "GB/s"
    for row in results[:top]:
        if "failure" in row:
            print(f"{name:28s} {brief(row['choice']):20s} {row['failure']}", flush=True)
            continue
        value = rate(shape, row["microseconds"])
        kernels = " ".join(f"{k.split('(')[0][-18:]} {us:.1f}" for k, us in row["kernels"].items())
        print(
            f"{name:28s} {brief(row['choice']):20s} {value:6.0f} {unit} {value / ceiling:5.2f} "
            f"{row['microseconds']:8.1f} us | {kernels}",
            flush=True,
        )


def main(argv=None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.tune", description=__doc__.splitlines()[0])
    parser.add_argument("--shape", nargs="*", choices=list(shapes.ALL), default=None, metavar="NAME")
    parser.add_argument("--group", choices=("decode", "fp8", "prefill"), nargs="*", default=None)
    parser.add_argument(
        "--list", metavar="ARCH", help="compile candidates for ARCH, print them as JSON and end"
    )
    parser.add_argument("--choices", help="the file that --list wrote")
    parser.add_argument("--only", default="", help="only candidates whose repr contains this text")
    parser.add_argument("--top", type=int, default=4, help="lines to print for each shape")
    parser.add_argument("--iterations", type=int, default=7)
    parser.add_argument("--json", help="write every figure to this file")
    parser.add_argument("--write", help="write the architecture's table with the best choices to this file")
    options = parser.parse_args(argv)
    groups = {"decode": shapes.DECODE, "fp8": shapes.FP8, "prefill": shapes.PREFILL}
    names = options.shape or [s.name for g in options.group or groups for s in groups[g]]
    if options.list:
        by_key = {shape_key(shapes.ALL[name]): shapes.ALL[name] for name in names}
        listed = {key: compiled_candidates(shape, options.list) for key, shape in by_key.items()}
        print(json.dumps(listed, default=dataclasses.asdict, indent=1))
        return 0
    if not options.choices:
        parser.error("--choices: expected the file that --list wrote")
    with open(options.choices) as file:
        options.choices = json.load(file)
    if jax.default_backend() != "gpu":
        print("bench.tune measures device time and needs a GPU; found none", file=sys.stderr)
        return 2
    device = tuning.current_device()
    ceilings = {"decode": timing.read_bandwidth(), "prefill": timing.matmul_rate()}
    print(
        f"{device}: read {ceilings['decode']:.0f} GB/s, matmul {ceilings['prefill']:.0f} TFLOP/s", flush=True
    )
    everything = {}
    for name in names:
        everything[name] = measure_shape(name, options, device)
        print_shape(name, everything[name], ceilings[shapes.ALL[name].kind], options.top)
    if options.json:
        with open(options.json, "w") as file:
            json.dump(everything, file, indent=1, default=dataclasses.asdict)
    if options.write:
        with open(options.write, "w") as file:
            file.write(tuning.dump(updated(tuning.load(device.architecture), everything)))
    return 0


def updated(table: Tuning, everything: dict[str, list[dict]]) -> Tuning:
    """The table with the best choice of each measured shape; of shapes that share an entry, the last counts.

    Where the best takes turns, the best without them stands beside it, for problems that cannot. What one shape does
    not decide, such as from how many keys on turns pay, stays as it was.
    """
    for name, results in everything.items():
        measured = [row["choice"] for row in results if "failure" not in row]
        plain = next((choice for choice in measured if not choice.turns), None)
        if plain is None:
            continue
        kind, _, _ = table_of(shapes.ALL[name])
        place = (plain.head_dim, plain.rows, plain.kv_bytes)
        entries, before = [], {}
        for entry in getattr(table, kind):
            if (entry.head_dim, entry.rows, entry.kv_bytes) == place:
                before[entry.turns] = {field: getattr(entry, field) for field in _OF_SEVERAL_SHAPES}
            else:
                entries.append(entry)
        best = [plain, measured[0]] if measured[0].turns else [plain]
        entries += [dataclasses.replace(choice, **before.get(choice.turns, {})) for choice in best]
        entries.sort(key=lambda c: (-c.kv_bytes, c.head_dim, c.rows, c.turns))
        table = dataclasses.replace(table, **{kind: tuple(entries)})
    return table


if __name__ == "__main__":
    raise SystemExit(main())
