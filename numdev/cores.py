"""How many cores this process may use."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import psutil

_QUOTA = Path("/sys/fs/cgroup/cpu.max")


def usable_cores() -> int:
    """Physical cores, no more than processors of its affinity, nor than a container gives it time for."""
    cores = psutil.cpu_count(logical=False) or 1
    if sys.platform == "linux":
        cores = min(cores, len(os.sched_getaffinity(0)))
    if _QUOTA.is_file():
        quota, _, period = _QUOTA.read_text().strip().partition(" ")  # `150000 100000`, or `max 100000`
        cores = cores if quota == "max" else min(cores, int(quota) // int(period or 100_000))
    return max(cores, 1)
