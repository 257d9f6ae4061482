"""What is said of a device's memory can be taken."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
import torch

from numdev.memory import available_bytes


def test_available_memory_of_a_cpu() -> None:
    free = available_bytes(torch.device("cpu"))
    assert 1 << 20 < free <= psutil.virtual_memory().total


@pytest.mark.skipif(not Path("/proc/meminfo").is_file(), reason="needs /proc/meminfo")
def test_it_is_what_the_kernel_estimates_to_be_available_without_swapping() -> None:
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
