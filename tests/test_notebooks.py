"""The notebooks are kept without outputs, and each runs from top to bottom on small data."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

nbclient = pytest.importorskip("nbclient")
nbformat = pytest.importorskip("nbformat")
pytest.importorskip("ipykernel")

pytestmark = pytest.mark.slow

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
LIMIT = 120  # seconds of a cell, after which it hangs


def read(path: Path) -> Any:
    return nbformat.read(path, as_version=4)


def code_cells(notebook: Any) -> list[Any]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


@pytest.fixture
def kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Kernels named python3 that are this interpreter, and leave nothing in the home directory."""
    from ipykernel.kernelspec import write_kernel_spec
    from jupyter_client.kernelspec import KernelSpecManager
    from jupyter_client.manager import AsyncKernelManager

    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    monkeypatch.setenv("NUMDEV_NOTEBOOK_SMALL", "1")
    write_kernel_spec(str(tmp_path / "kernels" / "python3"))
    specs = KernelSpecManager(kernel_dirs=[str(tmp_path / "kernels")])
    assert specs.get_kernel_spec("python3").argv[:3] == [sys.executable, "-m", "ipykernel_launcher"]
    return AsyncKernelManager(kernel_name="python3", kernel_spec_manager=specs)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_nothing_of_a_run_is_kept(path: Path) -> None:
    notebook = read(path)
    nbformat.validate(notebook)
    assert "widgets" not in notebook.metadata
    assert "NUMDEV_NOTEBOOK_SMALL" in code_cells(notebook)[0].source, "the first cell chooses the size"
    for cell in code_cells(notebook):
        assert cell.outputs == []
        assert cell.execution_count is None


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_and_draws(path: Path, kernels: Any) -> None:
    notebook = read(path)
    client = nbclient.NotebookClient(notebook, km=kernels, timeout=LIMIT, allow_errors=True)
    client.execute(cwd=str(FOLDER))
    outputs = [output for cell in code_cells(notebook) for output in cell.outputs]
    errors = [f"{output.ename}: {output.evalue}" for output in outputs if output.output_type == "error"]
    # What a widget shows goes to its own state, not to the cell.
    for state in client.widget_state.values():
        errors += [output["evalue"] for output in state.get("outputs", ()) if output["output_type"] == "error"]
    assert not errors
    assert any("image/png" in output.get("data", {}) for output in outputs)
