"""How long training runs would take, from a few steps of each kind of rung."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from numdev.errors import BadInput, Unsupported
from numdev.training.run import Run
from numdev.training.rung import Rung
from numdev.training.task import Task
from numdev.training.train import train
from numdev.training.trained import FILE

_STEPS = 3


@dataclass
class Trainings:
    """Estimates the steps of the runs of some points; the scoring of finished models is not counted.

    Attributes:
        device: where they would be trained.
        folder: of the runs that are there already, which take no time.
        calibrated: kinds of rung of which steps were timed.
        assumed: kinds of rung that have the time of others: none.
    """

    device: torch.device
    folder: Path
    calibrated: int = 0
    assumed: int = 0
    _counted: set[str] = field(default_factory=set)
    _seconds: dict[tuple[Any, Any], float] = field(default_factory=dict)

    def seconds(self, points: Iterable[tuple[Any, Any, Any, int]]) -> list[float]:
        """The time of each point: the steps of the runs that no point before it, and no earlier command, has trained."""
        return [
            math.fsum(self._of_run(problem, rung, seed) for seed in range(seeds) for rung in (variant, baseline))
            for problem, variant, baseline, seeds in points
        ]

    def _of_run(self, task: Task, rung: Rung, seed: int) -> float:
        key = Run(task, rung, seed).key(self.device)
        if key in self._counted or (self.folder / key / FILE).is_file():
            return 0.0
        self._counted.add(key)
        return task.steps * self._of_step(task, rung)

    def _of_step(self, task: Task, rung: Rung) -> float:
        """Seconds of one step; rungs that differ in seeds, in one last place or in restarts alone take the same time."""
        alike = Rung(rung.attention, rung.numerics)
        few: Any = replace(task, steps=min(task.steps, _STEPS), warmup=1)  # type: ignore[type-var]  # every task is a dataclass
        if (few, alike) not in self._seconds:
            self.calibrated += 1
            with tempfile.TemporaryDirectory() as folder:
                try:
                    found = train(Run(few, alike), Path(folder), self.device).seconds_per_step
                except (BadInput, Unsupported):
                    found = 0.0
            self._seconds[few, alike] = found
        return self._seconds[few, alike]
