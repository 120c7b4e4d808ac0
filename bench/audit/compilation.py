"""Compile a kernel for a GPU that this machine need not have."""

import contextlib
import os
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import triton
from triton._C.libtriton import ir
from triton.backends.compiler import GPUTarget, Language
from triton.compiler import ASTSource
from triton.compiler.compiler import make_backend

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
    """Compile printed Triton IR, such as Pallas lowers to.

    Triton skips its first passes for IR that it is given; they are run here, as XLA runs them for Pallas.
    """
    target = find_target(arch)
    backend = make_backend(gpu_target(target))
    with quiet_about_fusion():
        options = backend.parse_options({"num_warps": num_warps, "num_stages": num_stages})
    stages: dict[str, Any] = {}
    backend.add_stages(stages, options, Language.TRITON)
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, f"{name}.ttir")
        with open(path, "w") as file:
            file.write(ttir)
        module = ir.parse_mlir_module(path, context)
        module.context = context
        with open(path, "w") as file:
            file.write(str(stages["ttir"](module, {})))
        return _compile(name, path, arch, num_warps, num_stages)


@contextlib.contextmanager
def quiet_about_fusion() -> Iterator[None]:
    """Silence Triton 3.9's note on a coming default: jax-triton leaves that option alone, and so does the audit."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="TRITON_DEFAULT_FP_FUSION")
        yield


def gpu_target(target: Target) -> GPUTarget:
    """Triton's own record of an architecture."""
    backend, arch = ("hip", target.arch) if target.is_amd else ("cuda", int(target.arch.removeprefix("sm")))
    return GPUTarget(backend, arch, target.warp_size)


def _compile(name: str, source: Any, arch: str, num_warps: int, num_stages: int) -> Compiled:
    target = find_target(arch)
    with quiet_about_fusion():
        kernel = triton.compile(
            source, target=gpu_target(target), options={"num_warps": num_warps, "num_stages": num_stages}
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
