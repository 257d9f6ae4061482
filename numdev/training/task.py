"""A task of training: a model, its data by step and seed, its loss, and how its samples score.

Everything random is a function of its purpose, a seed and a step, whatever was drawn before: a resumed run draws what the
uninterrupted one drew.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from numdev.errors import BadInput
from numdev.settings import setting

Batch = dict[str, Tensor]
"""Named tensors on the CPU, FP32 or int64, of one length in the first dimension."""


@dataclass(frozen=True)
class Samples:
    """The work of a trained model on held-out captions or beginnings: pictures [captions, 3, height, width] in [-1, 1], or text.

    `score` is the share in [0, 1] that is right, as the task measures it; NaN where the data offers no measure.
    """

    score: float
    captions: tuple[str, ...]
    pictures: Tensor | None = None
    text: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Task(ABC):
    """A frozen dataclass of what is trained; `numdev.results.record.describe` makes its key of its fields.

    Raises:
        BadInput: for the first field that cannot be used, by its name.
    """

    learning_rate: float = setting(3e-3, "largest learning rate of AdamW")
    warmup: int = setting(30, "steps over which the learning rate rises")
    weight_decay: float = setting(0.01, "of AdamW")
    clip: float = setting(1.0, "largest norm of the gradient; 0 clips nothing")

    @property
    @abstractmethod
    def steps(self) -> int:
        """Number of training steps."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """Pictures or sequences of a step, over all ranks."""

    @abstractmethod
    def model(self, seed: int) -> nn.Module:
        """The model in FP32 on the CPU; its weights are a function of the seed alone."""

    @abstractmethod
    def batch_of(self, step: int, seed: int) -> Batch:
        """Everything random of a step, the same in any order of calls."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The mean over the batch, a scalar in FP32, on the device where the batch is."""

    @abstractmethod
    def held_out(self) -> Batch:
        """One fixed batch that no training step sees."""

    @abstractmethod
    def samples(self, model: nn.Module, seed: int) -> Samples:
        """The work of the model on held-out captions, with its score."""

    def __post_init__(self) -> None:
        self.check_at_least_one("steps", "batch")
        if not 0 < self.learning_rate < math.inf:
            raise BadInput("task.learning_rate", self.learning_rate, "use a number above 0")
        if not 0 <= self.warmup <= self.steps:
            raise BadInput("task.warmup", self.warmup, f"use 0 up to task.steps, {self.steps}")
        for name in ("weight_decay", "clip"):
            if not 0 <= getattr(self, name) < math.inf:
                raise BadInput(f"task.{name}", getattr(self, name), "use a number of at least 0")

    def check_at_least_one(self, *names: str) -> None:
        """Raise BadInput for the first of these fields that is below 1."""
        for name in names:
            if getattr(self, name) < 1:
                raise BadInput(f"task.{name}", getattr(self, name), "use at least 1")

    def replicates(self, seeds: int | None = None) -> int:
        """One unless told otherwise: each is a whole run, and one of its reference."""
        return 1 if seeds is None else seeds

    def rate_at(self, step: int) -> float:
        """The learning rate of a step: linear over the first `warmup` steps, then half a cosine down to a tenth at the last."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        done = (step - self.warmup) / max(1, self.steps - self.warmup)
        return self.learning_rate * (0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * min(1.0, done))))


_Model = TypeVar("_Model", bound=nn.Module)


def seeded(make: Callable[[], _Model], seed: int) -> _Model:
    """A module whose initial weights depend on the seed alone; the caller's random state is left as it was."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.default_generator.manual_seed(seed)
        return make()


class Purpose(Enum):
    """The use of a stream of random numbers: two purposes never read the same."""

    SCENES = 1
    NOISE = 2
    TIMES = 3
    DROPPED = 4
    ORDER = 5
    SAMPLES = 6
    JUDGE = 7
    REORDERED = 8


def stream(purpose: Purpose, seed: int, step: int) -> np.random.Generator:
    """The generator of one purpose, seed and step; both are at least 0."""
    return np.random.Generator(np.random.SFC64([purpose.value, seed, step]))


def normal(purpose: Purpose, seed: int, step: int, shape: torch.Size) -> Tensor:
    """Normal numbers of one purpose, seed and step, by PyTorch, which draws them several times faster than NumPy."""
    state = np.random.SeedSequence([purpose.value, seed, step]).generate_state(1, np.uint64)
    return torch.randn(shape, generator=torch.Generator().manual_seed(int(state[0] >> np.uint64(1))))
