"""How many physical cores this process may use."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import psutil

_GROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Those of its affinity, as many as its control groups give it time for; of the whole machine where it is no Linux."""
    if sys.platform != "linux":
        return psutil.cpu_count(logical=False) or 1
    return cores_of(map(_siblings, os.sched_getaffinity(0)), _limits())


def cores_of(siblings: Iterable[str], limits: Iterable[str]) -> int:
    """The number of cores, at least 1.

    Args:
        siblings: of each processor that may be used, the processors of its core, as in `thread_siblings_list`.
        limits: of each control group, its time in a period and the period, as in `cpu.max`: `150000 100000`, or `max 100000`.
    """
    found = len(set(siblings))
    for limit in limits:
        time, _, period = limit.partition(" ")
        if time != "max":
            found = min(found, int(time) // int(period or 100_000))
    return max(found, 1)


def _siblings(processor: int) -> str:
    """Itself where the system does not say."""
    path = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
    return path.read_text().strip() if path.is_file() else str(processor)


def _limits() -> Iterator[str]:
    """Those of the control group of this process and of the groups around it (version 2)."""
    groups = Path("/proc/self/cgroup")
    lines = groups.read_text().splitlines() if groups.is_file() else []
    for own in (line.removeprefix("0::/") for line in lines if line.startswith("0::/")):
        for group in (_GROUPS / own, *(_GROUPS / own).parents):
            if (group / "cpu.max").is_file():
                yield (group / "cpu.max").read_text().strip()
