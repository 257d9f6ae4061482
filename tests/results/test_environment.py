"""Where a measurement was made: devices by name, the revision, and everything that is read anew."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import psutil
import pytest
import torch

from numdev.errors import BadInput
from numdev.results import environment as module
from numdev.results.environment import available_bytes, environment, resolve_device
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


@pytest.mark.parametrize(
    ("physical", "affinity", "quota", "expected"),
    [
        (8, 16, None, 8),
        (8, 4, None, 4),
        (8, 4, "max 100000", 4),
        (8, 4, "250000 100000", 2),
        (8, 4, "50000", 1),
        (None, 4, None, 1),
    ],
)
def test_the_least_of_cores_affinity_and_quota(
    physical: int | None, affinity: int, quota: str | None, expected: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(psutil, "cpu_count", lambda logical: physical)
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(affinity)), raising=False)
    monkeypatch.setattr(module, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert module.usable_cores() == expected


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs /proc/meminfo")
def test_memory_is_what_the_kernel_estimates_to_be_available_without_swapping() -> None:
    """Not what is free: pages of the file cache can be taken too. Processes beside this one change it meanwhile."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    estimate = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))
    assert available_bytes(torch.device("cpu")) == pytest.approx(estimate, rel=0.1)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_what_the_allocator_holds_for_nobody_is_available() -> None:
    device = torch.device("cuda")
    kept = torch.empty(1 << 28, dtype=torch.uint8, device=device)
    before = available_bytes(device)
    del kept
    assert available_bytes(device) >= before + (1 << 28)
