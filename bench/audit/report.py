"""The verdict on one compiled kernel."""

from collections.abc import Collection
from dataclasses import dataclass

from bench.audit.addresses import COUNTS, Provenance, base_name, find_narrow, index_arrays
from bench.audit.compilation import Compiled, compile_request, find_target
from bench.audit.machine import Load, Machine, read_amdgcn, read_cuda
from bench.audit.mlir import Module, read_module
from bench.audit.mlir_text import UnreadableIR
from bench.audit.targets import Target

CACHES = frozenset({"k", "v", "k_cache", "v_cache"})
PRODUCTS = ("tt.dot", "tt.dot_scaled", "ttng.warp_group_dot")
FULL_WIDTH = 16


@dataclass(frozen=True)
class Report:
    """What a kernel uses on one architecture, what is wrong with it, and what is worth knowing.

    `load_bytes` is the narrowest load of K or V in bytes a lane, None for a kernel that reads neither;
    `occupancy` counts waves per SIMD. `notes` name what costs little, and counts that reach a 32-bit offset,
    which is safe: they are never multiplied by a pool's stride.
    """

    name: str
    arch: str
    registers: int
    accumulators: int
    spills: dict[str, int]
    shared: int
    shared_limit: int
    occupancy: float
    matrix_instructions: int
    load_bytes: int | None
    direct_loads: bool
    failures: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def passed(self) -> bool:
        """True where nothing failed."""
        return not self.failures


def audit(compiled: Compiled, *, tuned: bool = True) -> Report:
    """Audit one compiled kernel.

    Args:
        compiled: the kernel. Its integer arrays are followed, save `COUNTS`; where it multiplies tiles, its
            loads of `CACHES` must be of full width.
        tuned: False where the tiles were chosen for another configuration; spills and narrow loads are then
            notes, while a kernel that is unsafe or does not fit still fails.
    """
    target = compiled.target
    machine = (
        read_amdgcn(compiled.assembly) if target.is_amd else read_cuda(compiled.assembly, compiled.cubin)
    )
    slow, notes = judge_spills(machine)
    failures: list[str] = []
    if compiled.shared > target.shared_limit:
        failures.append(f"shared memory: {compiled.shared} bytes, {target.arch} has {target.shared_limit}")
    if machine.barriers_in_turns:
        failures.append(
            f"{machine.barriers_in_turns} barriers of all warps within a turn, which no warp would leave"
        )
    loads: list[Load] = []
    try:
        before, after = read_module(compiled.ttir), read_module(compiled.ttgir)
        failures += scalar_products(after, machine, target)
        findings = [f for m in (before, after) for f in find_narrow(m, index_arrays(m))]
        failures += dict.fromkeys(str(finding) for finding in findings)
        lengths = {name for name in after.arguments.values() if base_name(name) in COUNTS}
        notes += dict.fromkeys(str(finding) for finding in find_narrow(after, lengths) if finding.is_address)
        if any(operation.name in PRODUCTS for operation in after.operations):
            loads, missing = cache_loads(after, machine.loads)
            slow += narrow_loads(loads, missing)
    except UnreadableIR as error:
        failures.append(f"the audit cannot follow this kernel: {error}")
    (failures if tuned else notes).extend(slow)
    return Report(
        name=compiled.name,
        arch=target.arch,
        registers=machine.registers,
        accumulators=machine.accumulators,
        spills=machine.spills,
        shared=compiled.shared,
        shared_limit=target.shared_limit,
        occupancy=target.occupancy(machine.registers, compiled.shared, compiled.num_warps),
        matrix_instructions=machine.matrix_instructions,
        load_bytes=min((load.width for load in loads), default=None),
        direct_loads=bool(loads) and all(load.direct for load in loads),
        failures=tuple(failures),
        notes=tuple(notes),
    )


def audit_request(request, arch: str, *, tuned: bool = True) -> Report:
    """Compile a `CompileRequest` and audit it; a kernel that does not compile gets a report that says so."""
    target = find_target(arch)
    try:
        compiled = compile_request(request, arch)
    except Exception as error:  # the compiler's failures have many types, and each is a finding
        reason = str(error).strip().splitlines() or [""]
        return Report(
            name=request.name,
            arch=arch,
            registers=0,
            accumulators=0,
            spills={},
            shared=0,
            shared_limit=target.shared_limit,
            occupancy=0,
            matrix_instructions=0,
            load_bytes=None,
            direct_loads=False,
            failures=(f"does not compile: {type(error).__name__}: {reason[0]}",),
            notes=(),
        )
    return audit(compiled, tuned=tuned)


def judge_spills(machine: Machine) -> tuple[list[str], list[str]]:
    """Failures and notes on spills.

    AMD's compiler may spill an SGPR to a lane of a VGPR, and CUDA's a value that is needed once: neither costs
    anything unless it is moved for each tile. A VGPR that is spilled to memory always fails.
    """
    found = [f"spills: {number} {kind}" for kind, number in machine.spills.items()]
    if machine.reloads:
        found[0] += f", {machine.reloads} moves inside the loops over tiles"
    cheap = not machine.reloads and not {"VGPR", "scratch bytes"} & machine.spills.keys()
    return ([], found) if cheap else (found, [])


def scalar_products(module: Module, machine: Machine, target: Target) -> list[str]:
    """Products of tiles that the matrix unit could compute, and does not.

    CUDA has no matrix instruction for float32 in full precision, AMD has.
    """
    products = [
        operation
        for operation in module.operations
        if operation.name in PRODUCTS and (target.is_amd or module.element(operation.operands[0]) != "f32")
    ]
    failures = [
        f"{operation.location}: a product of tiles without matrix instructions"
        for operation in products
        if not uses_layout(module, module.types[operation.results[0]], target.matrix_layout)
    ]
    if products and not machine.matrix_instructions:
        failures.append("no matrix instruction in the machine code")
    return list(dict.fromkeys(failures))


def uses_layout(module: Module, type_text: str, layout: str) -> bool:
    """Whether a tensor type's layout, which is printed as an alias, is of the kind `layout`."""
    alias = type_text.rstrip(">").rpartition(", ")[2]
    return layout in module.aliases.get(alias, alias)


def cache_loads(module: Module, loads: Collection[Load]) -> tuple[list[Load], list[str]]:
    """The loads of K and V in the machine code, found by their source lines; and the lines without any.

    The compiler may move a load to a line that reads nothing. The widest of those stands in for what is missing.
    """
    provenance = Provenance(module)
    lines = {
        operation.location: any(base_name(root) in CACHES for root in provenance.roots(pointer))
        for operation, pointer in provenance.reads_of_memory()
    }
    wanted = {line for line, is_cache in lines.items() if is_cache}
    found = [load for load in loads if load.location in wanted]
    missing = sorted(wanted - {load.location for load in found})
    moved = [load for load in loads if load.location not in lines]
    if missing and moved:
        return [*found, max(moved, key=lambda load: load.width)], []
    return found, missing


def narrow_loads(loads: Collection[Load], missing: Collection[str]) -> list[str]:
    """Loads of K and V that move less than 16 bytes a lane without going straight to local memory."""
    failures = [f"{line}: no load of K or V found in the machine code" for line in missing]
    failures += [
        f"{load.location}: K or V is loaded {load.width} bytes a lane, not {FULL_WIDTH}"
        for load in loads
        if load.width < FULL_WIDTH and not load.direct
    ]
    return list(dict.fromkeys(failures))
