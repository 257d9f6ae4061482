"""What a measurement of speed must know of the backward pass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.attention.backward import cost as backward_cost
from numdev.attention.backward.timed import TimedBackward
from numdev.attention.base import Modelled
from numdev.attention.problem import Problem
from numdev.attention.ran import Ran
from numdev.attention.workload import AttentionWorkload, forward_cost
from numdev.measurement.workload import Beside, Cost


@dataclass(frozen=True)
class BackwardWorkload(AttentionWorkload):
    """The backward pass alone is timed, from what one forward pass left; beside it the forward pass, and both together.

    A variant is a `TimedBackward`.
    """

    @property
    def beside(self) -> Mapping[str, str]:
        return {"forward": "the forward pass alone", "both": "the forward pass and then the backward pass"}

    def bound(self, problem: Problem, variant: TimedBackward, inputs: tuple[Tensor, ...]) -> Callable[[], Any]:
        q, k, v, do = inputs
        return variant.passes(q, k, v, do, problem.mask, problem.softmax_scale).backward

    def calls_beside(
        self, problem: Problem, variant: TimedBackward, inputs: tuple[Tensor, ...], device: torch.device
    ) -> dict[str, Beside]:
        q, k, v, do = inputs
        passes = variant.passes(q, k, v, do, problem.mask, problem.softmax_scale)
        forward = _of_forward(problem, variant, passes.forward().ran, device)
        both = _sum(forward, self.cost(problem, variant, passes.backward(), device))
        return {"forward": Beside(passes.forward, forward), "both": Beside(passes.both, both)}

    def needed_bytes(self, problem: Problem, variant: Any) -> int:
        """q, k, v, dO, O and the gradients, and S, P and dP of an implementation that holds all of them in memory."""
        shape, size = problem.shape, (variant.storage or torch.float32).itemsize
        wanted = size * 4 * (math.prod(shape.q) + math.prod(shape.kv))
        declared = variant.cost_model(Ran())
        if declared is not None and declared.model.holds_scores:
            wanted += 3 * int(declared.model.width.input) * shape.batch * shape.heads * shape.queries * shape.keys
        return int(wanted)

    def cost(self, problem: Problem, variant: Any, output: Any, device: torch.device) -> Cost:
        """By the variant's own model of what ran."""
        operations, declared = backward_cost.operations(problem), variant.cost_model(output.ran)
        if declared is None:
            return Cost(operations)
        found = backward_cost.cost_of(problem, declared, device)
        return Cost(operations, found.algorithm.value, found.bytes, found.br)


def _of_forward(problem: Problem, variant: TimedBackward, ran: Ran, device: torch.device) -> Cost:
    forward = variant.forward_pass
    return forward_cost(problem, forward.cost_model(ran) if isinstance(forward, Modelled) else None, device)


def _sum(one: Cost, other: Cost) -> Cost:
    """Of two calls, one after the other; without a model where either has none."""
    algorithm = one.algorithm if one.algorithm == other.algorithm else ""
    return Cost(one.operations + other.operations, algorithm, one.model_bytes + other.model_bytes)
