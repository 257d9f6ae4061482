"""`dry_run=true`: how many points a command would measure, for how long and with how much memory."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch
from omegaconf import DictConfig
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from numdev.machine import available_bytes, size_text
from numdev.measurement.estimate import Estimator, needed_bytes
from numdev.measurement.runner import Runner
from numdev.results.store import Store
from numdev.results.study import StudyPoint, stored

_UNITS = (("days", 86400.0), ("h", 3600.0), ("min", 60.0), ("s", 1.0))


@runtime_checkable
class Estimates(Protocol):
    """Estimates how long points take."""

    calibrated: int
    assumed: int

    def seconds(self, points: Iterable[tuple[Any, Any, Any, int]]) -> list[float]: ...


@dataclass(frozen=True)
class Plan:
    """The work of a command.

    Attributes:
        points: of the study, or 1.
        there: of these, those whose figures are stored.
        replicates: of the others.
        seconds: of the others; NaN where it is not known.
        bytes: that the largest of the others needs; None where it is not known.
        free: memory of the device.
        larger: points that need more than that.
    """

    points: int
    there: int
    replicates: int
    seconds: float
    bytes: int | None
    free: int
    larger: int

    @staticmethod
    def of(points: Sequence[tuple[str, StudyPoint]], bench: Runner, store: Store, estimates: Estimates, *, fresh: bool) -> Plan:
        """The plan of points with their keys."""
        left = [point for key, point in points if not point.refused and (fresh or stored(store, key) is None)]
        refused = sum(bool(point.refused) for _, point in points)
        needed = [needed_bytes(bench.kind, point.problem, point.variant) for point in left]
        known, free = [size for size in needed if size is not None], available_bytes(bench.device)
        fitting = [point for point, size in zip(left, needed, strict=True) if size is None or size <= free]
        return Plan(
            points=len(points),
            there=len(points) - len(left) - refused,
            replicates=sum(point.seeds for point in left),
            seconds=math.fsum(estimates.seconds((p.problem, p.variant, p.baseline, p.seeds) for p in fitting)),
            bytes=max(known, default=None if left else 0),
            free=free,
            larger=sum(size > free for size in known),
        )

    def __add__(self, other: Plan) -> Plan:
        sizes = [one for one in (self.bytes, other.bytes) if one is not None]
        names = ("points", "there", "replicates", "seconds", "larger")
        sums: dict[str, Any] = {name: getattr(self, name) + getattr(other, name) for name in names}
        return Plan(**sums, bytes=max(sizes, default=None), free=min(self.free, other.free))

    def cells(self) -> tuple[str, ...]:
        """Replicates, time and memory as text; no figures where nothing is left to measure."""
        if not self.replicates:
            return "0", "", ""
        return str(self.replicates), time_text(self.seconds), "unknown" if self.bytes is None else size_text(self.bytes)

    def sentence(self) -> str:
        """All of it in words."""
        text = f"{self.points} point{'s' * (self.points != 1)}, {self.there} measured already"
        if not self.replicates:
            return f"{text}; nothing is left to measure."
        replicates, seconds, memory = self.cells()
        text += f"; {replicates} replicates to measure: {seconds}, {memory} of the {size_text(self.free)} that are free."
        text += f" {self.larger} points need more memory than is free." if self.larger else ""
        return text if math.isnan(self.seconds) else f"{text} Other work on the machine makes it longer."


def estimates(command: str, cfg: DictConfig, bench: Runner) -> Estimates:
    """The estimator of the time of a command's points; kept, so that a sweep calibrates each variant once."""
    kind: Any = bench.kind  # a frozen dataclass, which the protocol does not say
    return _trainings(bench.device, cfg.results) if command == "train" else _estimator(kind, str(bench.device))


@lru_cache(maxsize=2)
def _trainings(device: torch.device, results: str) -> Estimates:
    from numdev.training.weights import Trainings  # late: it imports every attention and every model

    return Trainings(device, Store(Path(results)).shared)


@lru_cache(maxsize=2)
def _estimator(kind: Any, device: str) -> Estimator:
    return Estimator(kind, device)


def time_text(seconds: float) -> str:
    """A duration with the two digits that an estimate deserves."""
    if math.isnan(seconds):
        return "unknown"
    unit, size = next(((unit, size) for unit, size in _UNITS if seconds >= 2 * size), _UNITS[-1])
    number = seconds / size
    return "under 1 s" if seconds < 1 else f"about {number:.2g} {unit}" if number < 10 else f"about {number:.0f} {unit}"


def table(plans: dict[str, Plan]) -> Table:
    """The studies of a command, a row each."""
    rows = Table("study", box=SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ("points", "there", "replicates", "time", "memory"):
        rows.add_column(name, justify="right")
    for name, plan in plans.items():
        rows.add_row(name, str(plan.points), str(plan.there), *plan.cells())
    return rows


def notes(console: Console, known: Estimates, workers: int = 1) -> None:
    """How the estimates were made, and for how many processes."""
    own = f"{known.calibrated} variant{'s' * (known.calibrated != 1)}"
    others = f"; {known.assumed} further ones are taken to be as fast as their mean" if known.assumed else ""
    processes = f", for {workers} processes" if workers > 1 else ""
    made = f"Estimated from short calibrations of {own}{others}{processes}. " if known.calibrated else ""
    console.print(f"{made}Nothing was measured or written.", markup=False)
