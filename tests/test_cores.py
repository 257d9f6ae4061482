"""How many cores a process may use."""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest

from numdev import cores


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
    monkeypatch.setattr(cores, "_QUOTA", tmp_path / "cpu.max")
    if quota is not None:
        (tmp_path / "cpu.max").write_text(f"{quota}\n")
    assert cores.usable_cores() == expected
