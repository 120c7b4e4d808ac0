"""What a result depends on besides the code: device, driver, clocks, versions, commit, command."""

import importlib.metadata
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import jax

PACKAGES = ("jax", "jaxlib", "triton", "jax-triton", "flash-attn3-jax", "flashinfer-python", "torch")
ROOT = Path(__file__).parents[1]
NVIDIA_SMI = ("driver_version", "clocks.sm", "clocks.max.sm", "clocks.mem", "clocks.max.mem", "power.limit")


def describe(program: str, arguments) -> dict:
    """The environment of this run of `python -m PROGRAM ARGUMENTS`."""
    return {
        "device": device_name(),
        "backend": jax.default_backend(),
        "clocks": clocks(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := version_of(name))},
        "commit": commit(ROOT),
        "command": shlex.join(["python", "-m", program, *arguments]),
    }


def device_name() -> str:
    """`NVIDIA H200`, or the model of the CPU."""
    if jax.default_backend() != "cpu":
        return jax.devices()[0].device_kind
    info = _cpu_info()
    return f"CPU {info.get('model name', platform.machine())}"


def clocks() -> dict[str, str]:
    """Driver and clocks as the system reports them; empty where it reports none."""
    if jax.default_backend() == "cpu":
        speed = _cpu_info().get("cpu MHz")
        return {"clocks.cpu": f"{float(speed):.0f} MHz"} if speed else {}
    if shutil.which("nvidia-smi") is None:
        return {}
    query = ["nvidia-smi", f"--query-gpu={','.join(NVIDIA_SMI)}", "--format=csv,noheader"]
    done = subprocess.run(query, capture_output=True, text=True, check=False)
    lines = done.stdout.splitlines()
    return dict(zip(NVIDIA_SMI, (cell.strip() for cell in lines[0].split(",")), strict=True)) if lines else {}


def version_of(package: str) -> str | None:
    """The installed version of a package."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit(folder: Path) -> str | None:
    """The commit of a checkout, with `+` behind it where files differ from it; None outside of one."""

    def git(*arguments):
        return subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True
        )

    try:
        changed = git("status", "--porcelain", "--untracked-files=no").stdout.strip()
        return git("rev-parse", "--short=12", "HEAD").stdout.strip() + ("+" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def _cpu_info() -> dict[str, str]:
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return {}
    pairs = (line.partition(":") for line in path.read_text().splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, _, value in pairs}
