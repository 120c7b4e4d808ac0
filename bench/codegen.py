"""Audit every kernel configuration in the code that it compiles to, without a GPU.

    python -m bench.codegen                      # gfx942, gfx950 and sm90
    python -m bench.codegen --arch gfx950 --only D256

Columns: regs, registers a lane (AMD: VGPR and AGPR together); AGPR, those among them; spills; LDS KiB, shared
memory of a workgroup; waves, per SIMD (warps per SM quarter) that registers and shared memory leave room for;
MMA, matrix instructions in the code; K/V bytes, the narrowest load of K or V in bytes a lane, "LDS" where it goes
straight to shared memory.

Exit code 1 if a configuration does not compile, spills registers in a way that costs something for each tile,
computes a product without matrix instructions, needs more shared memory than there is, loads K or V in narrow
pieces, or lets a page or slot id reach a 32-bit offset. Launches that no tuning entry is for (every option at once,
page tables, plans, cache writes, MXFP4 products) may spill and load narrowly. Nothing is executed: a pass is a
statement about machine code, not about a run on that GPU.
"""

import argparse
import dataclasses
import functools
import json
import sys
from collections.abc import Callable, Iterator, Sequence

import triton

from bench.audit.launches import other_requests
from bench.audit.pallas_launches import pallas_launches
from bench.audit.report import Report, audit_request
from bench.audit.targets import KIB, TARGETS
from jaxattn.kernels.triton.requests import compile_requests

# Room for ": attention" behind the name of a call of several kernels.
_KERNEL_NAME = 13
DEFAULT_ARCHS = ("gfx942", "gfx950", "sm90")
COLUMNS = (
    ("regs", 5),
    ("AGPR", 5),
    ("spills", 11),
    ("LDS KiB", 8),
    ("waves", 6),
    ("MMA", 5),
    ("K/V bytes", 10),
    ("verdict", 8),
)


def audits(arch: str) -> Iterator[tuple[str, Callable[[], list[Report]]]]:
    """Each configuration of an architecture by its name, and what audits it."""

    def audit_one(request, tuned: bool) -> list[Report]:
        return [audit_request(request, arch, tuned=tuned)]

    for request in compile_requests(arch):
        yield request.name, functools.partial(audit_one, request, True)
    for request in other_requests(arch):
        yield request.name, functools.partial(audit_one, request, False)
    for launches in pallas_launches(arch):
        yield launches.name, launches.audit


def row(report: Report, width: int) -> str:
    """One line of the table."""
    load = "-" if report.load_bytes is None else f"{report.load_bytes}{' LDS' if report.direct_loads else ''}"
    spills = next((f"{number} {kind.removesuffix(' bytes')}" for kind, number in report.spills.items()), "")
    cells = (
        report.registers or "-",
        report.accumulators or "-",
        spills or "-",
        f"{report.shared / KIB:.1f}",
        f"{report.occupancy:g}",
        report.matrix_instructions or "-",
        load,
        "ok" if report.passed else "FAIL",
    )
    return f"{report.name:<{width}}" + "".join(
        f"{cell!s:>{size}}" for cell, (_, size) in zip(cells, COLUMNS, strict=True)
    )


def heading(arch: str, width: int) -> str:
    """The two lines above a table."""
    target = TARGETS[arch]
    unit = "wave" if target.is_amd else "warp"
    about = f"{arch}: {target.shared_limit // KIB} KiB of shared memory, up to {target.max_waves} {unit}s per SIMD"
    columns = f"{'configuration':<{width}}" + "".join(f"{name:>{size}}" for name, size in COLUMNS)
    return f"{about} (Triton {triton.__version__})\n{columns}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 where a configuration failed or none was found."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.codegen",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--arch", action="append", choices=tuple(TARGETS), help="default: " + ", ".join(DEFAULT_ARCHS)
    )
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="only configurations whose name contains TEXT"
    )
    parser.add_argument(
        "--notes",
        action="store_true",
        help="also print what does not fail: cheap spills, lengths in 32-bit offsets",
    )
    parser.add_argument("--json", action="store_true", help="print the reports as JSON")
    options = parser.parse_args(arguments)

    found: list[Report] = []
    for arch in options.arch or DEFAULT_ARCHS:
        wanted = [(name, find) for name, find in audits(arch) if options.only in name]
        width = max((len(name) for name, _ in wanted), default=0) + _KERNEL_NAME
        if not options.json:
            print(heading(arch, width))
        for _, find in wanted:
            for report in find():
                found.append(report)
                if not options.json:
                    print(row(report, width), flush=True)
        if not options.json:
            print()
    failed = [report for report in found if not report.passed]
    if options.json:
        print(json.dumps([dataclasses.asdict(report) for report in found], indent=2))
    else:
        for report in failed:
            print(*(f"FAIL {report.arch} {report.name}: {failure}" for failure in report.failures), sep="\n")
        if options.notes:
            print(*(f"note {r.arch} {r.name}: {note}" for r in found for note in r.notes), sep="\n")
        print(f"{len(found)} configurations, {len(failed)} failed")
    return 1 if failed or not found else 0


if __name__ == "__main__":
    sys.exit(main())
