"""Where a measurement was made: devices by name, the revision, and everything that is read anew."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from numdev.errors import BadInput
from numdev.results import environment as module
from numdev.results.environment import environment, resolve_device
from numdev.results.record import key_of

CPU = torch.device("cpu")
revision = module._revision.__wrapped__  # past its cache


@pytest.mark.parametrize("has_gpu", [False, True])
def test_devices(monkeypatch: pytest.MonkeyPatch, has_gpu: bool) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert resolve_device("cpu") == CPU
    assert resolve_device("auto").type == ("cuda" if has_gpu else "cpu")
    if has_gpu:
        assert resolve_device("cuda") == torch.device("cuda")
    else:
        with pytest.raises(BadInput, match="^device: 'cuda' .*device=cpu"):
            resolve_device("cuda")
    for name in ("gpu", "CPU", "cuda:0", ""):
        with pytest.raises(BadInput, match="^device: .*use auto, cpu or cuda"):
            resolve_device(name)


def test_settings_are_read_at_every_call() -> None:
    """The number of threads orders a summation: set between two measurements, it makes them two environments."""
    threads, matmul = torch.get_num_threads(), torch.get_float32_matmul_precision()
    assert environment(CPU)["threads"] == str(threads)
    try:
        torch.set_num_threads(threads + 1)
        torch.set_float32_matmul_precision("medium")
        changed = environment(CPU)
    finally:
        torch.set_num_threads(threads)
        torch.set_float32_matmul_precision(matmul)
    assert changed["threads"] == str(threads + 1)
    assert changed["float32_matmul"] == "medium"
    assert environment(CPU) == changed | {"threads": str(threads), "float32_matmul": matmul}


@pytest.mark.skipif(shutil.which("git") is None, reason="needs git")
def test_revision_of_a_checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Twelve digits; `-dirty` with a tracked file changed, and not with an untracked one. A broken checkout has none."""
    root = tmp_path
    monkeypatch.setattr(module, "__file__", str(root / "numdev" / "results" / "environment.py"))

    def git(*arguments: str) -> str:
        who = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false"]
        return subprocess.run(["git", "-C", str(root), *who, *arguments], check=True, capture_output=True, text=True).stdout

    assert revision() == "none", "an installed package"
    git("init")
    assert revision() == "none"
    (root / "tracked").write_text("one")
    git("add", "tracked")
    git("commit", "-m", "one")
    git("tag", "-a", "v1", "-m", "one")
    head = git("rev-parse", "HEAD").strip()
    (root / "untracked").write_text("x")
    assert revision() == head[:12]
    (root / "tracked").write_text("two")
    assert revision() == f"{head[:12]}-dirty"
    monkeypatch.setenv("PATH", "")
    assert revision() == "none", "without git"


def test_the_path_of_the_mathematics_libraries(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each variable that chooses it is a fact, and another key."""
    for name in module._PATHS:
        monkeypatch.delenv(name, raising=False)
        assert environment(CPU)[name] == "unset"
        before = key_of({}, environment(CPU))
        monkeypatch.setenv(name, "COMPATIBLE")
        assert environment(CPU)[name] == "COMPATIBLE"
        assert key_of({}, environment(CPU)) != before


def test_a_revision_makes_no_other_key_and_the_sources_do(monkeypatch: pytest.MonkeyPatch) -> None:
    before = environment(CPU)
    monkeypatch.setattr(module, "_revision", lambda: "another-dirty")
    assert environment(CPU)["revision"] == "another-dirty"
    assert key_of({}, environment(CPU)) == key_of({}, before)
    monkeypatch.setattr(module, "sources_digest", lambda: "other sources")
    assert key_of({}, environment(CPU)) != key_of({}, before)
