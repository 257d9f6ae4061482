"""The backward pass as an operation: what measurements, records and reports must know of it."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from numdev.attention.backward.events import BACKWARD_COUNTERS
from numdev.attention.backward.exact import ExactBackward
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.problem import BackwardProblem
from numdev.attention.backward.workload import BackwardWorkload
from numdev.attention.operation import environment
from numdev.errors import BadInput
from numdev.measurement.operation import Inputs, Operation, Output
from numdev.results.columns import Column

_STREAM = 0x9E3779B9  # of the 32 bits that torch's generator reads of a seed: not the draws of q, k and v of any small seed


def draw_do(problem: Any, seed: int, device: torch.device) -> dict[str, Tensor]:
    """`do` `[batch, heads, queries, head_dim]` in FP64, drawn on the CPU, so the same on every device.

    That of the problem's source where it has one, as of captured tensors; else independent N(mean, 1). The mean is 0 unless the
    problem has another.

    Raises:
        BadInput: for a mean where the source has dO, and for dO that the source cannot serve.
    """
    mean = problem.do_mean if isinstance(problem, BackwardProblem) else 0.0
    do = problem.source.gradient(problem.shape, seed)
    if do is None:
        generator = torch.Generator().manual_seed(seed ^ _STREAM)
        do = torch.randn(problem.shape.q, dtype=torch.float64, generator=generator) + mean
    elif mean != 0:
        raise BadInput("problem.do_mean", mean, "dO comes from the captured file; give 0, or a file without dO")
    return {"do": do.to(device)}


def settings() -> tuple[Column, ...]:
    """Every setting of a problem and of a variant."""
    from numdev.attention.backward import dictionary  # late: it imports every implementation

    parts = {"problem": dictionary.PROBLEM, "variant": dictionary.VARIANT}
    return tuple(Column(f"{part}.{name}", *said) for part, texts in parts.items() for name, said in texts.items())


ATTENTION_BACKWARD = Operation(
    name="attention_backward",
    golden=ExactBackward(),
    inputs=(Inputs(("q", "k", "v")), Inputs(("do",), draw_do)),
    outputs=(
        Output("dq", "dQ = scale dS K, the gradient by the queries", directed=True),
        Output("dk", "dK = scale dS^T Q, the gradient by the keys", directed=True),
        Output("dv", "dV = P^T dO, the gradient by the values", directed=True),
        Output("delta", "the sum over a row of dO * O, which is that of dP * P"),
    ),
    steps=tuple(field.name for field in fields(BackwardPrecision)),
    counters=tuple(Column(name, unit, text) for name, (unit, text) in BACKWARD_COUNTERS.items()),
    settings=settings,
    environment=environment,
    workload=BackwardWorkload(),
    smaller="fewer queries, keys, heads or batch entries, or a smaller tiling.bc",
)
"""The backward pass of attention, after a forward pass."""
