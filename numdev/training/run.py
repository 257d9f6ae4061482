"""One run: a task, how it differs, and a replicate."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from numdev.attention.operation import environment as of_attention
from numdev.errors import BadInput
from numdev.results.environment import environment
from numdev.results.record import describe, key_of
from numdev.training.data.counter import Purpose, stream
from numdev.training.deterministic import FIXED
from numdev.training.rung import APART, Restart, Rung
from numdev.training.task import Batch, Task

_MIXED = 16  # batches whose rows another order mixes: they are in memory at once


@dataclass(frozen=True)
class Run:
    """What is trained, and how.

    Attributes:
        task: see `Task`.
        rung: see `Rung`.
        replicate: the seed of the data, and of the initial weights before the rung moves it.
    """

    task: Task
    rung: Rung
    replicate: int = 0

    def __post_init__(self) -> None:
        if self.replicate < 0 or self.replicate >= APART:
            raise BadInput("replicate", self.replicate, f"give an integer from 0 to {APART - 1}")
        if self.task.steps < 1:
            raise BadInput("task.steps", self.task.steps, "give at least 1")
        if self.task.batch % self.rung.ranks:
            mend = f"give a number that divides the batch of {self.task.batch}"
            raise BadInput("rung.ranks", self.rung.ranks, mend)
        if self.half is not None and not 0 < self.half < self.task.steps:
            raise BadInput("rung.restart", self.rung.restart.value, "one step has no half; give task.steps of at least 2")

    @property
    def init_seed(self) -> int:
        return self.replicate + APART * self.rung.init

    def batches(self, start: int = 0) -> Iterator[Batch]:
        """The batches of the steps from `start` on: those of the task, or their examples in the order of the rung.

        Another order is a permutation of the rows of all batches of the run: the steps are permuted, and then the rows within
        each 16 batches that follow each other. What the task draws for a row (noise, a time, a dropped caption) stays with it.
        """
        task, order = self.task, self.rung.order
        if not order:
            yield from (task.batch_of(step, self.replicate) for step in range(start, task.steps))
            return
        seed = self.replicate + APART * order
        steps = stream(Purpose.REORDERED, seed, 0).permutation(task.steps).tolist()
        for first in range(start - start % _MIXED, task.steps, _MIXED):
            parts = [task.batch_of(step, self.replicate) for step in steps[first : first + _MIXED]]
            whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
            rows = torch.from_numpy(stream(Purpose.REORDERED, seed, first + 1).permutation(len(parts) * task.batch))
            for own in rows.split(task.batch)[max(start - first, 0) :]:
                yield {name: x[own] for name, x in whole.items()}

    @property
    def half(self) -> int | None:
        """The step after which the run restarts, or None."""
        return None if self.rung.restart is Restart.NONE else self.task.steps // 2

    @property
    def config(self) -> dict[str, Any]:
        """Everything that states what is computed."""
        return {"run": describe(self)}

    def environment(self, device: torch.device) -> dict[str, str]:
        """What may change a bit of the run on a device, with what training sets itself (`deterministic`)."""
        found = environment(device) | of_attention(device)
        return found | {name: os.environ.get(name, value) for name, value in FIXED.items() if name in found}

    def key(self, device: torch.device) -> str:
        """Of configuration, sources and environment: runs of one key have the same bits."""
        return key_of(self.config, self.environment(device))
