"""Training as an operation: what measurements, records and reports must know of it."""

from __future__ import annotations

from numdev.attention.operation import environment
from numdev.measurement.operation import Operation, Output
from numdev.results.record import Column


def settings() -> tuple[Column, ...]:
    """Every setting of a task and of a rung."""
    from numdev.training import dictionary  # late: it imports every task and every attention

    parts = {"problem": dictionary.PROBLEM, "variant": dictionary.VARIANT}
    return tuple(Column(f"{part}.{name}", *said) for part, texts in parts.items() for name, said in texts.items())


TRAINING = Operation(
    name="training",
    golden=None,
    inputs=(),
    outputs=(Output("weights", "the weights after training"),),
    settings=settings,
    environment=environment,
    smaller="a smaller model (task.width, task.depth) or a smaller task.batch",
)
"""The training of a model, whose runs are compared with one another: there is no exact run."""
