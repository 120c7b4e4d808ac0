"""The same audit for Pallas kernels: lower for a GPU that is not there, take out the Triton IR, compile it."""

import dataclasses
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax._src.interpreters import mlir as jax_mlir
from jax._src.lib import triton as triton_dialect
from jax._src.lib.mlir import ir
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, use_abstract_mesh

from bench.audit.compilation import compile_ir, find_target
from bench.audit.mlir_text import closing_bracket
from bench.audit.report import Report, audit
from jaxattn.kernels.pallas.backend import quiet_about_deprecation

NUMBERED = "pallas"
DEVICE_KINDS = {"sm90": "NVIDIA H100"}


@dataclasses.dataclass(frozen=True)
class PallasKernel:
    """One kernel of a lowered function, with its arguments numbered: `%arg0`, `%arg1`, ..."""

    name: str
    ttir: str
    num_warps: int
    num_stages: int


def lower_abstractly(function: Callable, arguments: Sequence[Any], arch: str) -> Any:
    """Lower a jitted function of abstract arguments for an architecture that this machine need not have.

    Args:
        function: traced in x64 mode.
        arguments: arrays or `jax.ShapeDtypeStruct`s.
        arch: `gfx942`, `gfx950`, `sm90`, ...

    Returns:
        The `jax.stages.Lowered`.
    """
    target = find_target(arch)
    kind = DEVICE_KINDS.get(arch, arch)
    device = AbstractDevice(device_kind=kind, num_cores=None, platform="gpu")
    mesh = AbstractMesh((1,), ("x",), (AxisType.Explicit,), abstract_device=device)
    with jax.enable_x64(True), use_abstract_mesh(mesh), quiet_about_deprecation():
        traced = jax.jit(function).trace(*arguments)
        return traced.lower(lowering_platforms=("rocm" if target.is_amd else "cuda",))


def pallas_kernels(function: Callable, arguments: Sequence[Any], arch: str) -> list[PallasKernel]:
    """Lower a function and return the Triton IR of its `pallas_call`s, in order."""
    lowered = lower_abstractly(function, arguments, arch)
    kernels = []
    for call in custom_calls(lowered.compiler_ir().operation):
        if "mhlo.backend_config" not in call.attributes:
            continue
        config = call.attributes["mhlo.backend_config"]
        if "ir" not in config:
            continue
        kernels.append(
            PallasKernel(
                name=ir.StringAttr(config["name"]).value,
                ttir=printed(ir.StringAttr(config["ir"]).value_bytes),
                num_warps=ir.IntegerAttr(config["num_warps"]).value,
                num_stages=ir.IntegerAttr(config["num_stages"]).value,
            )
        )
    return kernels


def audit_pallas(
    function: Callable,
    arguments: Sequence[Any],
    arch: str,
    operands: Mapping[str, Sequence[str] | Callable[[int], Sequence[str]]],
    *,
    tuned: bool = True,
) -> list[Report]:
    """Audit the `pallas_call`s of a function.

    Args:
        function: calls Pallas kernels of the Triton backend.
        arguments: arrays or `jax.ShapeDtypeStruct`s.
        arch: a name in `TARGETS`.
        operands: name of a kernel -> names of its inputs and then its outputs, as the audit knows them:
            `k_cache` and `v_cache` for what must be loaded at full width, `seqused_k` for lengths; or a function
            that gives the names for a number of them.
        tuned: as in `audit`.

    Raises:
        ValueError: a kernel's operands are not named, or not all of them.
    """
    reports = []
    for kernel in pallas_kernels(function, arguments, arch):
        if kernel.name not in operands:
            raise ValueError(f"operands: expected names for kernel {kernel.name!r}, got {sorted(operands)}")
        names = operands[kernel.name]
        if callable(names):
            names = names(argument_count(kernel.ttir))
        ttir, lines = number_lines(name_arguments(kernel.ttir, names))
        compiled = compile_ir(kernel.name, ttir, arch, kernel.num_warps, kernel.num_stages)
        report = audit(compiled, tuned=tuned)
        reports.append(
            dataclasses.replace(
                report,
                failures=tuple(restore_lines(text, lines) for text in report.failures),
                notes=tuple(restore_lines(text, lines) for text in report.notes),
            )
        )
    return reports


def custom_calls(operation: Any) -> Iterator[Any]:
    """Every `stablehlo.custom_call` below an operation."""
    for region in operation.regions:
        for block in region:
            for child in block:
                if child.operation.name == "stablehlo.custom_call":
                    yield child.operation
                yield from custom_calls(child.operation)


def printed(bytecode: bytes) -> str:
    """Print Triton IR from MLIR bytecode, with its source lines."""
    with jax_mlir.make_ir_context() as context:
        triton_dialect.dialect.register_dialect(context)
        return ir.Module.parse(bytecode).operation.get_asm(enable_debug_info=True)


def number_lines(ttir: str) -> tuple[str, list[str]]:
    """Number the source lines through, as lines of one file, and return what they stand for.

    Triton's debug information puts every line into the file of the function, whose own place Pallas leaves
    unknown; the lines of a kernel come from many files.
    """
    lines = ["unknown line"]

    def number(match: re.Match) -> str:
        lines.append(f"{match[1]}:{match[2]}")
        return f'"{NUMBERED}":{len(lines) - 1}:1'

    text = re.sub(r'"([^"]+)":(\d+):\d+(?: to (?:\d+)?:\d+)?', number, ttir)
    return text.replace("loc(unknown)", f'loc("{NUMBERED}":0:0)'), lines


def restore_lines(text: str, lines: Sequence[str]) -> str:
    """Put the source lines back into a message."""
    return re.sub(rf"\b{NUMBERED}:(\d+)", lambda match: lines[int(match[1])], text)


def argument_span(ttir: str) -> tuple[int, int]:
    """Where the arguments of the IR's function are."""
    start = ttir.index("(", ttir.index("tt.func")) + 1
    return start, closing_bracket(ttir, start)


def argument_count(ttir: str) -> int:
    """How many inputs and outputs the IR's function has."""
    start, end = argument_span(ttir)
    return ttir.count("!tt.ptr", start, end)


def name_arguments(ttir: str, names: Sequence[str]) -> str:
    """Give the arguments of the IR's function the names that the audit goes by."""
    start, end = argument_span(ttir)
    given = iter(names)
    signature, count = re.subn(
        r"loc\(unknown\)", lambda _: f'loc("{next(given, "")}"(unknown))', ttir[start:end]
    )
    if count != len(names):
        raise ValueError(
            f"operands: the kernel has {count} inputs and outputs, got {len(names)} names: {list(names)}"
        )
    return ttir[:start] + signature + ttir[end:]
