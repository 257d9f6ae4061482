"""The machine: cores that this process may use, memory that a device still has, and torch's profiler."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Physical cores, no more than processors of its affinity, nor than a container gives it time for."""
    import psutil  # late, as below: few of those who import numdev measure

    cores = psutil.cpu_count(logical=False) or 1
    if sys.platform == "linux":
        cores = min(cores, len(os.sched_getaffinity(0)))
    if _QUOTA.is_file():
        quota, _, period = _QUOTA.read_text().strip().partition(" ")  # `150000 100000`, or `max 100000`
        cores = cores if quota == "max" else min(cores, int(quota) // int(period or 100_000))
    return max(cores, 1)


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, without swapping on a CPU."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # what the allocator caches is free
        return int(torch.cuda.mem_get_info(device)[0]) + held
    import psutil

    return psutil.virtual_memory().available


def size_text(size: int) -> str:
    """A number of bytes in the unit in which it has one to four digits, such as `37 MiB`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size / 1024:.3g} KiB"


def profiler(device: torch.device, **options: Any) -> profile:
    """torch's profiler of a device, without the lines that some versions of its library write to the terminal."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    return profile(activities=activities, **options)
