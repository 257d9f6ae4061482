"""What a training run trains: a model, its data by step and seed, its loss, and how its samples score."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import Tensor, nn

from numdev.errors import BadInput
from numdev.settings import setting

Batch = dict[str, Tensor]
"""Named tensors on the CPU, FP32 or int64, of one length in the first dimension."""


@dataclass(frozen=True)
class Samples:
    """What a trained model makes of held-out captions or beginnings.

    Attributes:
        score: share in [0, 1] that is right, as the task measures it; NaN where the data offers no measure.
        captions: what was asked for.
        pictures: [captions, 3, height, width] in [-1, 1], or None.
        text: what a language model wrote for each caption; empty where it makes pictures.
        details: further figures by name, such as the score of the rendered pictures themselves, which no model exceeds.
    """

    score: float
    captions: tuple[str, ...]
    pictures: Tensor | None = None
    text: tuple[str, ...] = ()
    details: tuple[tuple[str, float], ...] = ()


@runtime_checkable
class Task(Protocol):
    """A frozen dataclass of what is trained; `numdev.results.record.describe` makes its key of its fields.

    Attributes:
        steps: number of training steps.
        batch: pictures or sequences of a global batch.
        learning_rate: the largest; see `rate_at`.
        warmup: steps over which it rises.
        weight_decay: of AdamW.
        clip: largest norm of the gradient; 0 for no clipping.
    """

    @property
    def steps(self) -> int: ...
    @property
    def batch(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup(self) -> int: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def clip(self) -> float: ...

    def model(self, seed: int) -> nn.Module:
        """The model in FP32 on the CPU; its weights are a function of the seed alone."""

    def batch_of(self, step: int, seed: int) -> Batch:
        """Everything random of a step, the same in any order of calls."""

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch, a scalar in FP32, on the device where the batch is."""

    def held_out(self) -> Batch:
        """One fixed batch that no training step sees."""

    def samples(self, model: nn.Module, seed: int) -> Samples:
        """What the model makes of held-out captions, with its score."""


@dataclass(frozen=True, kw_only=True)
class Optimised:
    """The settings of AdamW that tasks share, and how many replicates a point has that is measured on one."""

    learning_rate: float = setting(3e-3, "largest learning rate of AdamW")
    warmup: int = setting(30, "steps over which the learning rate rises")
    weight_decay: float = setting(0.01, "of AdamW")
    clip: float = setting(1.0, "largest norm of the gradient; 0 clips nothing")

    def replicates(self, seeds: int | None = None) -> int:
        """One unless told otherwise: each is a whole run, and one of its reference."""
        return 1 if seeds is None else seeds


@runtime_checkable
class Scheduled(Protocol):
    """What a learning rate is a function of; a task is one."""

    @property
    def steps(self) -> int: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def warmup(self) -> int: ...


@dataclass(frozen=True)
class Schedule:
    """A learning rate over steps, without a task."""

    steps: int
    learning_rate: float
    warmup: int


def rate_at(task: Scheduled, step: int) -> float:
    """The learning rate of a step: linear over the first `warmup` steps, then half a cosine down to a tenth at the last."""
    if step < task.warmup:
        return task.learning_rate * (step + 1) / task.warmup
    done = (step - task.warmup) / max(1, task.steps - task.warmup)
    return task.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


_Model = TypeVar("_Model", bound=nn.Module)


def seeded(make: Callable[[], _Model], seed: int) -> _Model:
    """A module whose initial weights depend on the seed alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make()


def check_schedule(task: Task) -> None:
    """What holds for the fields of every task.

    Raises:
        BadInput: for the first that does not, by its name.
    """
    at_least_one(task, "steps", "batch")
    if not 0 < task.learning_rate < math.inf:
        raise BadInput("task.learning_rate", task.learning_rate, "use a number above 0")
    if not 0 <= task.warmup <= task.steps:
        raise BadInput("task.warmup", task.warmup, f"use 0 up to task.steps, {task.steps}")
    for name in ("weight_decay", "clip"):
        if not 0 <= getattr(task, name) < math.inf:
            raise BadInput(f"task.{name}", getattr(task, name), "use a number of at least 0")


def at_least_one(task: Task, *names: str) -> None:
    """Refuses a count that is below 1.

    Raises:
        BadInput: for the first such field.
    """
    for name in names:
        if getattr(task, name) < 1:
            raise BadInput(f"task.{name}", getattr(task, name), "use at least 1")
