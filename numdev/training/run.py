"""One run: a task, and how it differs; and the settings of torch under which it always has the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from numdev.attention.operation import environment as of_attention
from numdev.errors import BadInput
from numdev.results.environment import environment
from numdev.results.record import describe, key_of
from numdev.training.data import Purpose, stream
from numdev.training.rung import APART, Restart, Rung
from numdev.training.tasks import Batch, Task

_MIXED = 16  # batches whose rows another order mixes: they are in memory at once
_FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "float32_matmul": "highest"}
"""Settings that `deterministic` makes, by its name in an environment; a variable that is set already stays."""


@dataclass(frozen=True)
class Run:
    """A task, and how it is trained."""

    task: Task
    rung: Rung

    def __post_init__(self) -> None:
        if self.task.batch % self.rung.ranks:
            hint = f"give a number that divides the batch of {self.task.batch}"
            raise BadInput("rung.ranks", self.rung.ranks, hint)
        if self.half is not None and not 0 < self.half < self.task.steps:
            raise BadInput("rung.restart", self.rung.restart.value, "one step has no half; give task.steps of at least 2")

    @property
    def replicate(self) -> int:
        """The seed of the data, and of the initial weights before the rung moves it."""
        return self.rung.seed

    @property
    def init_seed(self) -> int:
        return self.replicate + APART * self.rung.init

    @property
    def half(self) -> int | None:
        """The step after which the run restarts, or None."""
        return None if self.rung.restart is Restart.NONE else self.task.steps // 2

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

    def share(self, batch: Batch, rank: int) -> Batch:
        """The rows of a batch that one of the ranks computes."""
        rows = self.task.batch // self.rung.ranks
        return {name: x[rank * rows : (rank + 1) * rows].contiguous() for name, x in batch.items()}

    def environment(self, device: torch.device) -> dict[str, str]:
        """Everything that may change a bit of the run on a device, with what training sets itself (`deterministic`)."""
        facts = environment(device) | of_attention(device)
        return facts | {name: os.environ.get(name, value) for name, value in _FIXED.items() if name in facts}

    def key(self, device: torch.device) -> str:
        """Of configuration, sources and environment: runs of one key have the same bits."""
        return key_of({"run": describe(self)}, self.environment(device))


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms alone, no TF32, no search for the fastest convolution; the settings before are restored.

    An operation that has no deterministic algorithm raises RuntimeError.
    """
    name, cudnn = "CUBLAS_WORKSPACE_CONFIG", torch.backends.cudnn
    fill: Any = torch.utils.deterministic  # whose one setting its type does not state
    with ExitStack() as before:
        warns = torch.is_deterministic_algorithms_warn_only_enabled()
        before.callback(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled(), warn_only=warns)
        before.callback(torch.set_float32_matmul_precision, torch.get_float32_matmul_precision())
        torch.use_deterministic_algorithms(True)
        torch.set_float32_matmul_precision(_FIXED["float32_matmul"])
        # Filling memory would write every new tensor once more.
        for module, one in ((fill, "fill_uninitialized_memory"), (cudnn, "allow_tf32"), (cudnn, "benchmark")):
            before.callback(setattr, module, one, getattr(module, one))
            setattr(module, one, False)
        if name not in os.environ:
            os.environ[name] = _FIXED[name]
            before.callback(os.environ.pop, name)
        yield
