"""`dry_run=true`: how many points a command would measure, for how long and with how much memory."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from numdev.cli.progress import output
from numdev.machine import available_bytes, size_text
from numdev.measurement.estimate import Estimator, needed_bytes
from numdev.measurement.runner import Runner
from numdev.results.store import Store
from numdev.results.study import StudyPoint, stored

_UNITS = {"days": 86400.0, "h": 3600.0, "min": 60.0, "s": 1.0}


@dataclass(frozen=True)
class Plan:
    """The work of a command.

    Attributes:
        points: of the study, or 1.
        there: of these, those whose figures are stored.
        replicates: of the others.
        seconds: of the others; NaN where it is not known.
        bytes: that the largest of the others needs; 0 where it is not known.
        free: memory of the device.
    """

    points: int
    there: int
    replicates: int
    seconds: float
    bytes: int
    free: int

    @staticmethod
    def of(points: Sequence[tuple[str, StudyPoint]], bench: Runner, store: Store, estimator: Any, *, fresh: bool) -> Plan:
        """The plan of points with their keys; `estimator` is a `numdev.measurement.estimate.Estimator`, or estimates likewise."""
        left = [point for key, point in points if not point.refused and (fresh or stored(store, key) is None)]
        free, needed = (
            available_bytes(bench.device),
            [needed_bytes(bench.kind, point.problem, point.variant) or 0 for point in left],
        )
        seconds = estimator.seconds(point.parts for point, size in zip(left, needed, strict=True) if size <= free)
        there = len(points) - len(left) - sum(bool(point.refused) for _, point in points)
        replicates = sum(point.seeds for point in left)
        return Plan(len(points), there, replicates, math.fsum(seconds), max(needed, default=0), free)

    def __add__(self, other: Plan) -> Plan:
        bytes, free = max(self.bytes, other.bytes), min(self.free, other.free)
        replicates, seconds = self.replicates + other.replicates, self.seconds + other.seconds
        return Plan(self.points + other.points, self.there + other.there, replicates, seconds, bytes, free)

    def row(self) -> dict[str, str]:
        """Replicates, time and memory as text; no figures where nothing is left to measure."""
        if not self.replicates:
            return {"replicates": "0", "time": "", "memory": ""}
        memory = size_text(self.bytes) if self.bytes else "unknown"
        return {"replicates": str(self.replicates), "time": time_text(self.seconds), "memory": memory}

    def sentence(self) -> str:
        """All of it in words."""
        text = f"{self.points} point{'s' * (self.points != 1)}, {self.there} measured already"
        if not self.replicates:
            return f"{text}; nothing is left to measure."
        replicates, seconds, memory = self.row().values()
        text += f"; {replicates} replicates to measure: {seconds}, {memory} of the {size_text(self.free)} that are free."
        return text if math.isnan(self.seconds) else f"{text} Other work on the machine makes it longer."


@lru_cache(maxsize=2)
def estimator(command: str, bench: Runner, results: str) -> Any:
    """Estimates the time of a command's points; kept, so that a sweep calibrates each variant once."""
    if command == "train":
        from numdev.training.weights import Trainings  # late: it imports every attention and every model

        return Trainings(bench.device, Store(Path(results)).shared)
    return Estimator(bench.kind, str(bench.device))


def show(plans: Mapping[str, Plan]) -> None:
    """Print the plans of some studies, a row each, and their sum."""
    rows, (first, *others) = Table("study", "points", "there", "replicates", "time", "memory", box=SIMPLE_HEAD), plans.values()
    for name, one in plans.items():
        rows.add_row(name, str(one.points), str(one.there), *one.row().values())
    console = output()
    console.print(rows)
    console.print(sum(others, first).sentence(), markup=False)
    console.print("Estimated from short calibrations. Nothing was measured or written.", markup=False)


def time_text(seconds: float) -> str:
    """A duration with the two digits that an estimate deserves."""
    if math.isnan(seconds):
        return "unknown"
    unit, size = next(((unit, size) for unit, size in _UNITS.items() if seconds >= 2 * size), ("s", 1.0))
    number = seconds / size
    return "under 1 s" if seconds < 1 else f"about {number:.2g} {unit}" if number < 10 else f"about {number:.0f} {unit}"
