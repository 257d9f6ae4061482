"""What a measurement of speed must know of an operation."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Cost:
    """What one call costs by a model.

    Attributes:
        operations: operations that any algorithm must do; NaN if unknown.
        algorithm: the algorithm whose traffic is counted; empty without a model.
        model_bytes: traffic with the processor's memory; NaN without a model.
        model_br: rows of a tile in the model; 0 without tiles.
    """

    operations: int | float = math.nan
    algorithm: str = ""
    model_bytes: int | float = math.nan
    model_br: int = 0


@dataclass(frozen=True)
class Beside:
    """A call that is timed beside the measured one, and what it costs by a model."""

    run: Callable[[], Any]
    cost: Cost


@dataclass(frozen=True)
class Workload:
    """Defaults for an operation of which nothing more is known; an operation overrides what it knows."""

    def sample(self, problem: Any) -> Any:
        """The part of a problem that is drawn, and whose result is compared with golden."""
        return problem

    def held(self, problem: Any, variant: Any, rounded: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The inputs of the whole problem as a call takes them, from the rounded ones of the sample."""
        return rounded

    def compared(self, problem: Any, output: Tensor) -> Tensor:
        """The part of the primary output that belongs to the sample."""
        return output

    def needed_bytes(self, problem: Any, variant: Any) -> int:
        """Memory that a call needs at least."""
        return int(problem.bytes)

    def size(self, problem: Any) -> tuple[float, ...]:
        """The quantities with which the time of a replicate grows, such as rows and pairs of a query and a key."""
        return (float(problem.bytes),)

    def smaller(self, problem: Any, tokens: int) -> Any:
        """The same kind of problem with at most so many tokens, which is quickly measured; None where there is none."""
        return None

    def cost(self, problem: Any, variant: Any, output: Any, device: torch.device) -> Cost:
        """The cost of a call that returned `output`, by a model of the variant."""
        return Cost()

    def is_tf32(self, variant: Any) -> bool:
        """Whether its products of FP32 are in TF32, which decides what rate they are compared with."""
        return False

    def call(self, variant: Any) -> Any:
        """The part of a variant that is timed, without work that it does only for its caller."""
        return variant

    def bound(self, problem: Any, variant: Any, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        """The call that is measured; preparations that are not to be timed are done here."""
        return partial(self.call(variant), *inputs, **problem.arguments())

    @property
    def beside(self) -> Mapping[str, str]:
        """Calls that are timed beside the measured one: their names, and what each is."""
        return {}

    def calls_beside(self, problem: Any, variant: Any, inputs: tuple[Tensor, ...], device: torch.device) -> dict[str, Beside]:
        """Each of `beside`, on the same inputs."""
        return {}

    def forget(self) -> None:
        """Release what the last point left in memory; the next point has another problem."""

    def counting(self) -> AbstractContextManager[None]:
        """A context in which nothing else uses the GPU's profiler."""
        return nullcontext()
