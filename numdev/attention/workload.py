"""What a measurement of speed must know of attention."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from numdev.attention import cost
from numdev.attention.base import Held, Timed
from numdev.attention.cost import CostModel
from numdev.attention.mask import Mask
from numdev.attention.problem import Problem
from numdev.attention.ran import Ran
from numdev.attention.vendor import dispatch
from numdev.measurement.workload import Cost, Workload


@dataclass(frozen=True)
class AttentionWorkload(Workload):
    """Draws one group of heads and repeats it for the others.

    The time of a call does not depend on the numbers, but for the power that their bits take, and drawing every head would take
    longer than timing the call.
    """

    def sample(self, problem: Problem) -> Problem:
        """The problem of the first batch entry and the query heads that share one KV head."""
        shape, mask = problem.shape, problem.mask
        lengths = None if mask.key_lengths is None else mask.key_lengths[:1]
        small = replace(shape, batch=1, heads=shape.heads // shape.kv_heads, kv_heads=1)
        return replace(problem, shape=small, mask=Mask(mask.causal, mask.window, lengths))

    def held(self, problem: Problem, variant: Held, rounded: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """Every head and batch entry, in a dtype that a call need not convert."""
        shape, dtype = problem.shape, variant.storage or rounded[0].dtype
        return tuple(tensor.to(dtype).repeat(shape.batch, shape.kv_heads, 1, 1) for tensor in rounded)

    def compared(self, problem: Problem, output: Tensor) -> Tensor:
        """The heads that golden has: all others see the same numbers."""
        return output[:1, : problem.shape.heads // problem.shape.kv_heads]

    def needed_bytes(self, problem: Problem, variant: Timed) -> int:
        """q, k, v and the output, and the scores of an implementation that holds all of them in memory."""
        shape, size = problem.shape, (variant.storage or torch.float32).itemsize
        wanted = size * (2 * math.prod(shape.q) + 2 * math.prod(shape.kv))
        model = variant.cost_model(Ran())
        if model is not None and model.holds_scores:
            wanted += 2 * int(model.width.input) * shape.batch * shape.heads * shape.queries * shape.keys
        return int(wanted)

    def size(self, problem: Problem) -> tuple[float, ...]:
        """Rows of queries and keys, and visible pairs of the two, over heads and batch entries, times head_dim."""
        shape = problem.shape
        rows = shape.batch * (shape.heads * shape.queries + shape.kv_heads * shape.keys) * shape.head_dim
        return float(rows), float(cost.operations(problem))

    def smaller(self, problem: Problem, tokens: int) -> Problem:
        """One head of one batch entry with at most so many queries and keys."""
        shape, mask = problem.shape, problem.mask
        queries, keys = min(shape.queries, tokens), min(shape.keys, tokens)
        lengths = None if mask.key_lengths is None else (min(mask.key_lengths[0], keys),)
        small = replace(shape, batch=1, heads=1, kv_heads=1, queries=queries, keys=keys)
        return replace(problem, shape=small, mask=Mask(mask.causal, mask.window, lengths))

    def cost(self, problem: Problem, variant: Timed, output: Any, device: torch.device) -> Cost:
        """By the variant's own model of what ran."""
        return forward_cost(problem, variant.cost_model(output.ran), device)

    def is_tf32(self, variant: Held) -> bool:
        return variant.is_tf32

    def call(self, variant: Timed) -> Any:
        return variant.bare

    def forget(self) -> None:
        """Releases the dense mask, which may be as large as the scores."""
        dispatch.forget_masks()

    def counting(self) -> AbstractContextManager[None]:
        return dispatch.unproven()


def forward_cost(problem: Problem, model: CostModel | None, device: torch.device) -> Cost:
    """Of a forward pass by the model of an implementation, if it has one."""
    operations = cost.operations(problem)
    if model is None:
        return Cost(operations)
    found = cost.cost_of(problem, model, device)
    return Cost(operations, found.algorithm.value, found.bytes, found.br)
