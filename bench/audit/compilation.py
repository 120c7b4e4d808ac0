"""Compile a kernel for a GPU that this machine need not have."""

import os
import tempfile
import warnings
from dataclasses import dataclass
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from bench.audit.targets import TARGETS, Target


@dataclass(frozen=True)
class Compiled:
    """One kernel, compiled: its IR before and after layouts were chosen, its assembly, its memory."""

    name: str
    target: Target
    ttir: str
    ttgir: str
    assembly: str
    cubin: bytes
    shared: int
    num_warps: int


def find_target(arch: str) -> Target:
    """The record of an architecture.

    Raises:
        ValueError: the architecture is unknown.
    """
    if arch not in TARGETS:
        raise ValueError(f"arch: expected one of {', '.join(TARGETS)}, got {arch!r}")
    return TARGETS[arch]


def compile_request(request, arch: str) -> Compiled:
    """Compile a `CompileRequest` of the Triton kernels.

    Args:
        request: a `jaxattn.kernels.triton.requests.CompileRequest`.
        arch: a name in `TARGETS`.
    """
    source = ASTSource(
        fn=request.fn, signature=request.signature, constexprs=request.constexprs, attrs=request.attrs
    )
    return _compile(request.name, source, arch, request.num_warps, request.num_stages)


def compile_ir(name: str, ttir: str, arch: str, num_warps: int, num_stages: int) -> Compiled:
    """Compile printed Triton IR, such as Pallas lowers to."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"{name}.ttir")
        with open(path, "w") as file:
            file.write(ttir)
        return _compile(name, path, arch, num_warps, num_stages)


def _compile(name: str, source: Any, arch: str, num_warps: int, num_stages: int) -> Compiled:
    target = find_target(arch)
    gpu = GPUTarget("hip", arch, 64) if target.is_amd else GPUTarget("cuda", int(arch.removeprefix("sm")), 32)
    with warnings.catch_warnings():
        # Triton 3.9 announces a new default; jax-triton leaves the option alone, and so does the audit
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        kernel = triton.compile(
            source, target=gpu, options={"num_warps": num_warps, "num_stages": num_stages}
        )
    return Compiled(
        name=name,
        target=target,
        ttir=str(kernel.asm["ttir"]),
        ttgir=kernel.asm["ttgir"],
        assembly=kernel.asm["amdgcn" if target.is_amd else "ptx"],
        cubin=b"" if target.is_amd else kernel.asm["cubin"],
        shared=kernel.metadata.shared,
        num_warps=num_warps,
    )
