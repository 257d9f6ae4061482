"""The elementary operations of attention as data: the step that rounds each, and the formats of its operands."""

from __future__ import annotations

import torch

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.elementary import Operand, Operation, RoundedOnce
from numdev.arithmetic.microscale import Microscaled
from numdev.arithmetic.quantise import Quantised
from numdev.arithmetic.rounding import Cast
from numdev.attention.precision import Precision

_CONSTANT = ""
# The step whose cast rounds an operation, what is done, and the steps in whose formats its operands are.
OPERATIONS = {
    "scale scores": ("scores", Operation.MULTIPLY, "scores", _CONSTANT),
    "shift ties": ("scores", Operation.MULTIPLY, "scores", _CONSTANT),
    "shift scores": ("exponential", Operation.SUBTRACT, "scores", "scores"),
    "share": ("exponential", Operation.DIVIDE, "exponential", "row_sum"),
    "fall of the maximum": ("rescale", Operation.SUBTRACT, "scores", "scores"),
    "weigh sum": ("row_sum", Operation.MULTIPLY, "row_sum", "rescale"),
    "add sums": ("row_sum", Operation.ADD, "row_sum", "row_sum"),
    "unscale sum": ("row_sum", Operation.DIVIDE, "row_sum", _CONSTANT),
    "scale probabilities": ("probabilities", Operation.MULTIPLY, "exponential", _CONSTANT),
    "unscale values": ("values", Operation.DIVIDE, "values", _CONSTANT),
    "rescale output": ("accumulator", Operation.MULTIPLY, "accumulator", "rescale"),
    "weigh output": ("accumulator", Operation.MULTIPLY, "accumulator", "row_sum"),
    "weigh values": ("accumulator", Operation.MULTIPLY, "values", "rescale"),
    "accumulate": ("accumulator", Operation.ADD, "accumulator", "values"),
    "accumulate weighed": ("accumulator", Operation.ADD, "accumulator", "accumulator"),
    "normalise": ("accumulator", Operation.DIVIDE, "accumulator", "row_sum"),
    "unscale maximum": ("row_sum", Operation.DIVIDE, "scores", _CONSTANT),
    "log sum": ("row_sum", Operation.ADD, "scores", "row_sum"),
    "distance of splits": ("rescale", Operation.SUBTRACT, "row_sum", "row_sum"),
    "add weight": ("row_sum", Operation.ADD, "row_sum", "rescale"),
}


def operation(precision: Precision, carrier: torch.dtype, name: str, constant: float) -> RoundedOnce:
    """An operation of the table under a policy, in a carrier; `constant` is its second operand where the table has none."""
    step, kind, left, right = OPERATIONS[name]
    second: Operand = _cast(precision, right).to if right else constant
    return RoundedOnce(kind, _cast(precision, step), _cast(precision, left).to, second, carrier)


def is_harmless(precision: Precision, carrier: torch.dtype, step: str, constants: tuple[float, ...]) -> bool:
    """Whether the carrier's own operations, then the cast, round every operation of a step as if once.

    `constants` are those that its operations meet.
    """
    dot = getattr(precision, step)
    if isinstance(dot, Dot) and dot.every is not None and not dot.accumulate.is_identity_on(carrier):
        return False
    names = [name for name, (own, *_) in OPERATIONS.items() if own == step]
    return all(operation(precision, carrier, name, constant).is_harmless for name in names for constant in (1.0, *constants))


def _cast(precision: Precision, step: str) -> Cast:
    """The one cast of a step whose numbers are rounded one by one."""
    own: Cast | Dot | Microscaled | Quantised = getattr(precision, step)
    cast = own.accumulate if isinstance(own, Dot) else own
    assert isinstance(cast, Cast), "a microscaled P is not rounded number by number"
    return cast
