"""One run: a task, how it differs, and a replicate."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from numdev.attention.operation import environment as of_attention
from numdev.errors import BadInput
from numdev.results.canonical import describe, key_of
from numdev.results.environment import environment
from numdev.training.deterministic import FIXED
from numdev.training.rung import APART, Restart, Rung
from numdev.training.task import Task


@dataclass(frozen=True)
class Run:
    """What is trained, and how.

    Attributes:
        task: see `Task`.
        rung: see `Rung`.
        replicate: its seeds of initialisation and order, before the rung moves them.
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

    @property
    def order_seed(self) -> int:
        return self.replicate + APART * self.rung.order

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
