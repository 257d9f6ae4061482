"""The wheel brings its configs along and works from any folder."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parent.parent

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif("__import__('importlib.util').util.find_spec('hatchling') is None", reason="needs hatchling"),
]


def run(*command: str, cwd: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    ran = subprocess.run(command, check=False, cwd=cwd, env=os.environ | environment, capture_output=True, text=True, timeout=250)
    assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
    return ran


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--quiet")
    run(*pip, "--no-deps", "--no-build-isolation", "--wheel-dir", str(folder), str(REPOSITORY), cwd=folder)
    (built,) = folder.glob("numdev-*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with numdev and nothing else installed into it; its dependencies are those of the tests."""
    target = tmp_path_factory.mktemp("target")
    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps", "--no-index")
    run(*pip, "--target", str(target), str(wheel), cwd=target)
    return target


def test_holds_every_config_and_the_captured_tensors(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    configs = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "configs").rglob("*.yaml")}
    assert {f"numdev/{name}" for name in configs} <= names
    assert "hydra_plugins/numdev_sweep.py" in names
    assert "hydra_plugins/__init__.py" not in names, "it would hide the plugins of other packages"
    assert "numdev/data/minilm_qkv.safetensors" in names
    assert "numdev/report/document/templates/report.typ" in names
    assert not [name for name in names if name.startswith(("configs/", "tests/", "experiments/"))]


def test_measures_from_an_empty_folder(installed: Path, tmp_path: Path) -> None:
    where = {"PYTHONPATH": str(installed)}
    result = run(sys.executable, "-c", "import numdev; print(numdev.__file__)", cwd=tmp_path, **where).stdout
    assert Path(result.strip()).is_relative_to(installed)
    command = (sys.executable, "-m", "numdev.cli.main", "measure")
    ran = run(*command, "seeds=1", "problem.n=64", cwd=tmp_path, **where)
    assert "max_difference" in ran.stdout
    assert "ok, 1 replicate" in ran.stdout
    ran = run(*command, "seeds=1", "problem=captured", "problem.n=32", "precision=kernel_bf16", cwd=tmp_path, **where)
    assert "ok, 1 replicate" in ran.stdout
    assert len(list((tmp_path / "results" / "records").iterdir())) == 2
    ran = run(*command, "-m", "seeds=1,2", "problem.n=32", cwd=tmp_path, **where)
    assert [line.partition(" ")[0] for line in ran.stdout.splitlines()[2:]] == ["1", "2"]
