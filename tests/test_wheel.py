"""The package as others get it: links of its page lead somewhere, or are none; the wheel has its configs and works anywhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytest.importorskip("hatchling")

from hatch_build import absolute, origin, urls

REPOSITORY = Path(__file__).resolve().parent.parent
README = (REPOSITORY / "README.md").read_text()
HOST = "https://example.org/people/numdev"
LINK = re.compile(r"\]\(([^)\s]+)\)")


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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_with_a_repository_every_link_is_absolute() -> None:
    shown = absolute(README, HOST)
    assert len(LINK.findall(shown)) == len(LINK.findall(README))
    assert [link for link in LINK.findall(shown) if not link.startswith("https://")] == []
    assert f"]({HOST}/raw/HEAD/reports/reference/cpu/figures/fig4.svg)" in shown
    assert f"[findings]({HOST}/blob/HEAD/docs/findings.md)" in shown
    for link in re.findall(rf"{HOST}/(?:raw|blob)/HEAD/([^)]+)", shown):
        assert (REPOSITORY / link).is_file()


def test_without_a_repository_no_link_leads_nowhere() -> None:
    shown = absolute(README, "")
    assert [link for link in LINK.findall(shown) if not link.startswith("https://")] == []
    assert "![" not in shown


@pytest.mark.parametrize(
    "remote", ["https://token@example.org/people/numdev.git", "git@example.org:people/numdev", "/srv/git/numdev"]
)
def test_the_repository_is_gits_origin(remote: str, tmp_path: Path) -> None:
    git = ["git", "-C", str(tmp_path)]
    subprocess.run([*git, "init", "--quiet"], check=True)
    assert origin(tmp_path) == ""
    subprocess.run([*git, "remote", "add", "origin", remote], check=True)
    assert origin(tmp_path) == (HOST if "example.org" in remote else "")
    assert urls(HOST)["Repository"] == HOST
