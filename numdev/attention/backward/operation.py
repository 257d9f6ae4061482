"""The backward pass as an operation: what measurements, records and reports must know of it."""

from __future__ import annotations

from dataclasses import fields

from numdev.attention.backward.events import BACKWARD_COUNTERS
from numdev.attention.backward.exact import ExactBackward
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.problem import draw_do
from numdev.attention.backward.workload import BackwardWorkload
from numdev.attention.operation import environment
from numdev.measurement.operation import Inputs, Operation, Output
from numdev.results.record import Column


def settings() -> tuple[Column, ...]:
    """Every setting of a problem and of a variant."""
    from numdev.attention.backward import dictionary  # imported late: it imports every implementation

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
