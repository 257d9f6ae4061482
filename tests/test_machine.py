"""What is said of cores and memory is what this process can take."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
import torch

from numdev import machine
from numdev.machine import available_bytes


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
    monkeypatch.setattr(machine, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert machine.usable_cores() == expected


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
