"""`jaxattn doctor`: what works on this machine, why the rest does not, and whether an index wraps."""

import importlib.metadata
import platform
import textwrap
from collections.abc import Iterable
from typing import TextIO

import jax
import numpy as np

import jaxattn
from jaxattn.attention import automatic_choice, implementations
from jaxattn.errors import JaxattnError
from jaxattn.routing import AttentionConfig, routing_table
from jaxattn.selftest import run_selftest

_PACKAGES = ("jax", "jaxlib", "numpy", "triton", "jax-triton", "gguf", "tokenizers", "safetensors")
_WIDTH = 100


def examine(out: TextIO) -> None:
    """Write the whole report to `out`.

    Raises:
        JaxattnError: a self-test failed; the report is complete all the same.
    """
    sections = {
        "Versions": versions(),
        "Devices": devices(),
        "64-bit indices": index_width(),
        "Implementations of attention": implementation_lines(),
        "Routing": routing_lines(),
    }
    for title, lines in sections.items():
        _write(out, title, lines)
    failed = []

    def selftest_lines() -> Iterable[str]:
        for result in run_selftest():
            if result.passed is False:
                failed.append(result.name)
            yield f"{_VERDICTS[result.passed]:8} {result.name}: {result.detail}"

    _write(out, "Self-test", selftest_lines())
    if failed:
        raise JaxattnError(f"the self-test failed: {', '.join(failed)}; do not trust results on this machine")


_VERDICTS = {True: "ok", False: "FAILED", None: "skipped"}


def versions() -> list[str]:
    """The versions of Python, jaxattn and what it works with."""
    return [
        f"jaxattn {jaxattn.__version__}, Python {platform.python_version()}, {platform.machine()}",
        ", ".join(f"{package} {_version(package)}" for package in _PACKAGES),
    ]


def devices() -> list[str]:
    """The devices that JAX sees, with their memory where they say it."""

    def line(device) -> str:
        limit = (device.memory_stats() or {}).get("bytes_limit")
        memory = "" if limit is None else f", {limit / 2**30:.1f} GiB"
        return f"{device.platform} {device.id}: {device.device_kind}{memory}"

    return [line(device) for device in jax.devices()]


def index_width() -> list[str]:
    """Whether x64 is on, and what that means for a caller's own indices, shown on one number."""
    if jax.config.jax_enable_x64:
        return ["x64 is on: int64 arrays keep their values in your code as they do in jaxattn."]
    number = 2**31 + 5
    seen = int(jax.jit(lambda x: x)(np.int64(number)))
    return [
        "x64 is off. jaxattn computes every index in a 64-bit scope of its own, and int64 arrays that it gives you "
        "pass through your jit, scan and vmap unharmed as long as nothing computes with them there: use the methods "
        "of AttentionMetadata (advance, with_lengths, slots).",
        f"Out of its reach: a numpy int64 argument of your own jit is cut before jaxattn sees it; here {number} "
        f"arrived as {seen}. Build metadata outside jit from numpy, or turn x64 on (JAX_ENABLE_X64=1).",
    ]


def implementation_lines() -> list[str]:
    """Each implementation, in the order of preference: why it cannot be used here, and which is taken by default."""
    reasons = implementations()
    chosen = automatic_choice(reasons)

    def verdict(name: str, reason: str | None) -> str:
        if reason is not None:
            return "not usable: " + " ".join(reason.split())
        return "usable, and the automatic choice" if name == chosen else "usable"

    return [f"{name:10} {verdict(name, reason)}" for name, reason in reasons.items()]


def routing_lines() -> list[str]:
    """The path of each forward mode under the configuration of the environment, and why."""
    table = routing_table(AttentionConfig.from_environment())
    return [f"{mode:13} {decision.path:11} {decision.reason}" for mode, decision in table.items()]


def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _write(out: TextIO, title: str, lines: Iterable[str]) -> None:
    out.write(f"{title}\n")
    for line in lines:
        out.write(textwrap.fill(line, _WIDTH, initial_indent="  ", subsequent_indent="      ") + "\n")
        out.flush()
    out.write("\n")
