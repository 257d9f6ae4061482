"""The bytes that a call really moves, by the GPU's counters. The bytes by a cost model are in `Workload.cost`."""

from __future__ import annotations

import math
import os
import pickle
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from numdev.errors import BadInput
from numdev.measurement.operation import Operation
from numdev.measurement.speed import nsight

METRICS = {
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    # Counted at the multiprocessors: the second-level cache merges requests of several of them for the same lines.
    "l2_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"),
}
"""By column, the metrics of Nsight Compute that it sums; `nsight` converts sectors to bytes."""

_CHUNK = 16  # points per child process: more would share its start-up time, fewer would be lost in a crash or by Ctrl-C
_START, _EACH = 300.0, 180.0  # seconds that a child process may take to start, and for each point, which it may compile

Point = tuple[Any, Any]  # problem and variant: replicates have other numbers, and traffic does not depend on them


class Traffic:
    """Counts the traffic of points in child processes; one process counts the requested point and those announced after it."""

    def __init__(self, operation: Operation, device: torch.device, tell: Callable[[str], object] = warnings.warn) -> None:
        """Calls `tell` with a sentence, once for each reason why something was not counted.

        Raises:
            BadInput: naming `counters`, on a device without them, or where Nsight Compute is not installed.
        """
        if device.type != "cuda":
            mend = f"only a GPU counts its traffic, and the device is {device.type}; use counters=false"
            raise BadInput("counters", True, mend)
        self._operation = operation
        self._ncu = nsight.find()
        self._tell = tell
        self._told: set[str] = set()
        self._ahead: list[Point] = []
        self._found: dict[Point, dict[str, float] | str] = {}  # figures, or the reason why there are none
        self._alone: set[Point] = set()  # to be counted alone: their chunk failed, perhaps because of another point
        self._refused = ""

    def announce(self, points: Iterable[Point]) -> None:
        """Keeps the points that will be requested, in this order."""
        self._ahead = list(dict.fromkeys(points))

    def of(self, problem: Any, variant: Any) -> dict[str, float | str]:
        """The columns `COUNTED` of one call; NaN, and the reason, where the call could not be counted."""
        point = (problem, variant)
        if point not in self._found:
            self._count(self._chunk(point))
        if point not in self._found:
            self._count([point])
        found = self._found[point]
        if not isinstance(found, str):
            return {name: sum(found[metric] for metric in metrics) for name, metrics in METRICS.items()} | {"not_counted": ""}
        if found not in self._told:
            self._told.add(found)
            self._tell(f"counters: traffic is not counted: {found}")
        return dict.fromkeys(METRICS, math.nan) | {"not_counted": found}

    def _chunk(self, point: Point) -> list[Point]:
        """The point, and the announced points after it that are not counted yet."""
        if point in self._alone:
            return [point]
        behind = self._ahead[self._ahead.index(point) + 1 :] if point in self._ahead else []
        return [point, *(each for each in behind if each not in self._found and each not in self._alone)][:_CHUNK]

    def _count(self, points: Sequence[Point]) -> None:
        if self._refused:
            self._found |= dict.fromkeys(points, self._refused)
            return
        packed: dict[Point, bytes] = {}
        for point in points:
            try:
                packed[point] = pickle.dumps((self._operation, *point))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self._found[point] = f"it cannot be sent to another process: {error}"
        reading = self._profile(list(packed.values())) if packed else nsight.Reading()
        if nsight.NO_PERMISSION in reading.trouble:
            self._refused = reading.trouble  # every other point would be refused too
        for number, point in enumerate(packed):
            why = reading.remarks.get(number) or reading.trouble or "ncu listed no figures for the call"
            counted = number in reading.bytes and number not in reading.remarks  # one that failed may have been counted in part
            if counted:
                self._found[point] = reading.bytes[number]
            elif len(packed) == 1 or self._refused:
                self._found[point] = why
            else:
                self._alone.add(point)

    def _profile(self, packed: list[bytes]) -> nsight.Reading:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # release unused blocks for the child process
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)  # so that the child process imports what this one can
        with TemporaryDirectory(prefix="numdev_") as folder:
            file = Path(folder, "points")
            file.write_bytes(pickle.dumps(packed))
            command = (sys.executable, "-P", "-m", "numdev.measurement.speed.counted", str(file))
            environment = os.environ | {"PYTHONPATH": path, "LC_ALL": "C"}  # ncu writes numbers as the language has them
            metrics = [metric for summed in METRICS.values() for metric in summed]
            return nsight.profile(self._ncu, metrics, command, environment, _START + _EACH * len(packed))
