"""Every notebook runs from start to end; its own asserts check what it claims."""

import os
from pathlib import Path

import pytest

nbclient = pytest.importorskip(
    "nbclient", reason="the notebooks need the extra `bench`: pip install -e '.[bench]'"
)
nbformat = pytest.importorskip(
    "nbformat", reason="the notebooks need the extra `bench`: pip install -e '.[bench]'"
)

FOLDER = Path(__file__).parents[1] / "bench" / "notebooks"
NOTEBOOKS = ("attention", "page_tables", "speculative", "int64")


def test_every_notebook_is_executed():
    assert {path.stem for path in FOLDER.glob("*.ipynb")} == {*NOTEBOOKS}


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_committed_without_outputs(name):
    for cell in nbformat.read(FOLDER / f"{name}.ipynb", 4).cells:
        assert not cell.get("outputs")
        assert cell.get("execution_count") is None


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs(name, monkeypatch):
    # Small mode, whatever the machine: a full run belongs to a person.
    monkeypatch.setitem(os.environ, "JAX_PLATFORMS", "cpu")
    notebook = nbformat.read(FOLDER / f"{name}.ipynb", 4)
    nbclient.NotebookClient(
        notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}
    ).execute()
    figures = [o for c in notebook.cells for o in c.get("outputs", []) if "image/png" in o.get("data", {})]
    assert figures
