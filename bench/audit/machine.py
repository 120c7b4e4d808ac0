"""Facts of compiled machine code: registers, spills, matrix instructions, the width of each load."""

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass

WORDS = {
    "ubyte": 1,
    "sbyte": 1,
    "ushort": 2,
    "sshort": 2,
    "short": 2,
    "dword": 4,
    "dwordx2": 8,
    "dwordx3": 12,
    "dwordx4": 16,
}
MATRIX = re.compile(r"\b(?:v_s?mfmac?_\w+|HGMMA|QGMMA|IGMMA|HMMA|IMMA|DMMA)\b")
# What CUDA multiplies float32 tiles with.
SCALAR = re.compile(r"\bFFMA\b")


@dataclass(frozen=True)
class Load:
    """A load from global memory: bytes a lane, whether it goes straight to local memory, its source line."""

    width: int
    direct: bool
    location: str


@dataclass(frozen=True)
class Machine:
    """What one kernel uses.

    `registers` counts VGPR and AGPR together, `accumulators` the AGPR among them. `spills` names what was
    spilled, with its count; `reloads` counts the moves of spilled values inside the loops over tiles.
    `barriers_in_turns` counts barriers of all warps between the two instructions of a turn.
    """

    registers: int
    accumulators: int
    spills: dict[str, int]
    reloads: int
    matrix_instructions: int
    loads: list[Load]
    barriers_in_turns: int = 0


def moves_in_tile_loops(assembly: str, moves: str) -> int:
    """Count instructions that match `moves` in the innermost loops that multiply tiles.

    Those are loops with matrix instructions, else with CUDA's for float32. Where there is none, all of the code counts.
    """
    lines = assembly.splitlines()
    labels: dict[str, int] = {}
    loops = []
    for i, line in enumerate(lines):
        if match := re.match(r"\s*(\.L\w+):", line):
            labels[match[1]] = i
        elif (match := re.search(r"\b(?:BRA|s_c?branch\w*)\b.*?(\.L\w+)", line)) and match[1] in labels:
            loops.append(range(labels[match[1]], i + 1))
    by_kind = (
        [loop for loop in loops if any(kind.search(lines[i]) for i in loop)] for kind in (MATRIX, SCALAR)
    )
    loops = next(filter(None, by_kind), [])
    inner = [a for a in loops if not any(b != a and b.start >= a.start and b.stop <= a.stop for b in loops)]
    counted = {i for loop in inner for i in loop} or range(len(lines))
    return sum(bool(re.search(moves, lines[i])) for i in counted)


def located_lines(assembly: str) -> Iterator[tuple[str, str]]:
    """Each line of code with the `file.py:12` that the debug information gives it."""
    files = {
        number: os.path.join(folder, name) if name else folder
        for number, folder, name in re.findall(
            r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?:\s+"([^"]*)")?', assembly, re.M
        )
    }
    location, inside, frozen = "", False, False
    for line in assembly.splitlines():
        if "// begin inline asm" in line:
            inside, frozen = True, False
        elif "// end inline asm" in line:
            inside = False
        elif match := re.match(r"\s*\.loc\s+(\d+)\s+(\d+)", line):
            # LLVM counts on from line to line of an inline assembly block: only its first line is true
            if not (inside and frozen):
                location = f"{files.get(match[1], '?')}:{match[2]}"
            frozen = True
        else:
            yield line.strip(), location


def read_amdgcn(assembly: str) -> Machine:
    """Facts of AMD assembly; the counts come from its metadata.

    `.vgpr_count` there is the total: it includes the AGPR of the unified register file.
    """

    def count(name: str) -> int:
        return int(re.search(rf"\.{name}:\s+(\d+)", assembly)[1])

    spills = {
        "VGPR": count("vgpr_spill_count"),
        "SGPR": count("sgpr_spill_count"),
        "scratch bytes": count("private_segment_fixed_size"),
    }
    spills = {kind: number for kind, number in spills.items() if number}
    loads = []
    for line, location in located_lines(assembly):
        if match := re.match(r"(?:global|buffer|flat)_load_(lds_)?(\w+?)(?:_d16\w*)?\s", line):
            loads.append(Load(WORDS[match[2]], bool(match[1]) or line.endswith(" lds"), location))
    return Machine(
        registers=count("vgpr_count"),
        accumulators=count("agpr_count"),
        spills=spills,
        reloads=moves_in_tile_loops(assembly, r"\bv_(?:read|write)lane_b32\b|\bscratch_") if spills else 0,
        matrix_instructions=len(re.findall(r"^\s+v_s?mfmac?_", assembly, re.M)),
        loads=loads,
    )


def read_cuda(ptx: str, cubin: bytes) -> Machine:
    """Facts of CUDA code: loads and matrix instructions of the PTX, registers and stack of the cubin."""
    usage = resource_usage(cubin)
    registers, stack, local = (
        int(re.search(rf"\b{name}:(\d+)", usage)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    spills = {kind: number for kind, number in (("stack bytes", stack), ("local bytes", local)) if number}
    loads = []
    for line, location in located_lines(ptx):
        if match := re.match(
            r"(?:@!?%p\d+ )?ld\.global(?:\.[a-zA-Z]\w*(?:::\w+)*)*?(?:\.v(\d))?\.[busf](\d+)", line
        ):
            loads.append(Load(int(match[1] or 1) * int(match[2]) // 8, False, location))
        elif match := re.match(
            r"(?:@!?%p\d+ )?cp\.async\.c[ag]\.shared\.global\b.*?\], (0x[0-9a-f]+|\d+)", line
        ):
            loads.append(Load(int(match[1], 0), True, location))
    return Machine(
        registers=registers,
        accumulators=0,
        spills=spills,
        reloads=moves_in_tile_loops(disassembly(cubin), r"\b(?:STL|LDL)\b") if spills else 0,
        matrix_instructions=len(re.findall(r"\b(?:wgmma\.mma_async|mma\.sync)\b", ptx)),
        loads=loads,
        barriers_in_turns=barriers_in_turns(ptx),
    )


def barriers_in_turns(ptx: str) -> int:
    """Count barriers of all warps within a turn: between a named barrier's `sync` and its `arrive`.

    The second half of a program waits for the first at the `sync`, and the first would wait for the second.
    """
    waiting, found = "", 0
    for line in ptx.splitlines():
        for kind, barrier in re.findall(
            r"\bbar(?:rier)?(?:\.cta)?\.(sync|arrive)(?:\.aligned)?\s+(\d+)", line
        ):
            if barrier == "0":
                found += bool(waiting)
            elif kind == "sync":
                waiting = barrier
            elif barrier == waiting:
                waiting = ""
    return found


def resource_usage(cubin: bytes) -> str:
    """What the bundled `cuobjdump` says of a kernel's registers and memory."""
    text = run_on_cubin("cuobjdump", "--dump-resource-usage", cubin)
    # the last line is the kernel's; the ones before it are constants that functions share
    return text.strip().splitlines()[-1]


def disassembly(cubin: bytes) -> str:
    """Machine code with labels, from the bundled `nvdisasm`."""
    return run_on_cubin("nvdisasm", "-c", cubin)


def run_on_cubin(tool: str, option: str, cubin: bytes) -> str:
    """Output of one of the CUDA tools that come with Triton."""
    from triton import knobs

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [getattr(knobs.nvidia, tool).path, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
