"""The elementary operations of attention as data: the step that rounds each, and the formats of its operands."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.elementary import Operand, Operation, RoundedOnce
from numdev.arithmetic.formats import format_of
from numdev.arithmetic.microscale import Microscaled
from numdev.arithmetic.quantise import Quantised
from numdev.arithmetic.rounding import Cast
from numdev.attention.precision import Policy

Row = tuple[str, Operation, str, str]
"""The step whose cast rounds an operation, its kind, and the steps in whose formats its operands are."""
CONSTANT, SAVED = "", "saved"  # operands of no step: a number, and what another pass left, which may be any number of the carrier

OPERATIONS: dict[str, Row] = {
    "scale scores": ("scores", Operation.MULTIPLY, "scores", CONSTANT),
    "shift ties": ("scores", Operation.MULTIPLY, "scores", CONSTANT),
    "shift scores": ("exponential", Operation.SUBTRACT, "scores", "scores"),
    "share": ("exponential", Operation.DIVIDE, "exponential", "row_sum"),
    "fall of the maximum": ("rescale", Operation.SUBTRACT, "scores", "scores"),
    "weigh sum": ("row_sum", Operation.MULTIPLY, "row_sum", "rescale"),
    "add sums": ("row_sum", Operation.ADD, "row_sum", "row_sum"),
    "unscale sum": ("row_sum", Operation.DIVIDE, "row_sum", CONSTANT),
    "scale probabilities": ("probabilities", Operation.MULTIPLY, "exponential", CONSTANT),
    "unscale values": ("values", Operation.DIVIDE, "values", CONSTANT),
    "rescale output": ("accumulator", Operation.MULTIPLY, "accumulator", "rescale"),
    "weigh output": ("accumulator", Operation.MULTIPLY, "accumulator", "row_sum"),
    "weigh values": ("accumulator", Operation.MULTIPLY, "values", "rescale"),
    "accumulate": ("accumulator", Operation.ADD, "accumulator", "values"),
    "accumulate weighed": ("accumulator", Operation.ADD, "accumulator", "accumulator"),
    "normalise": ("accumulator", Operation.DIVIDE, "accumulator", "row_sum"),
    "unscale maximum": ("row_sum", Operation.DIVIDE, "scores", CONSTANT),
    "log sum": ("row_sum", Operation.ADD, "scores", "row_sum"),
    "distance of splits": ("rescale", Operation.SUBTRACT, "row_sum", "row_sum"),
    "add weight": ("row_sum", Operation.ADD, "row_sum", "rescale"),
}
"""Of the forward pass."""

BACKWARD_OPERATIONS: dict[str, Row] = {
    "scale scores": ("scores", Operation.MULTIPLY, "scores", CONSTANT),
    "scale lse": ("exponential", Operation.MULTIPLY, SAVED, CONSTANT),
    "shift scores": ("exponential", Operation.SUBTRACT, "scores", SAVED),
    "weigh output": ("delta", Operation.MULTIPLY, "inputs", SAVED),
    "weigh dp": ("delta", Operation.MULTIPLY, "dp", "exponential"),
    "weigh dp by stored": ("delta", Operation.MULTIPLY, "dp", SAVED),
    "add delta": ("delta", Operation.ADD, "delta", "delta"),
    "shift dp": ("difference", Operation.SUBTRACT, "dp", "delta"),
    "weigh difference": ("difference", Operation.MULTIPLY, "difference", "exponential"),
    "weigh difference by stored": ("difference", Operation.MULTIPLY, "difference", SAVED),
    "scale ds": ("ds", Operation.MULTIPLY, "ds", CONSTANT),
    "add dq": ("dq_sum", Operation.ADD, "dq_sum", "dq"),
    "add dk": ("dk_sum", Operation.ADD, "dk_sum", "dk"),
    "add dv": ("dv_sum", Operation.ADD, "dv_sum", "dv"),
    "scale dq": ("dq_sum", Operation.MULTIPLY, "dq_sum", CONSTANT),
    "scale dk": ("dk_sum", Operation.MULTIPLY, "dk_sum", CONSTANT),
}
"""Of the backward pass; `stored` is P as the forward pass stored it, `exponential` P as it is recomputed."""


def operation(
    policy: Policy, carrier: torch.dtype, name: str, constant: float, table: Mapping[str, Row] = OPERATIONS
) -> RoundedOnce:
    """An operation of the table under a policy, in a carrier; `constant` is its second operand where the table has none."""
    step, kind, left, right = table[name]
    second = _operand(policy, carrier, right) if right else constant
    return RoundedOnce(kind, _cast(policy, step), _operand(policy, carrier, left), second, carrier)


def is_harmless(
    policy: Policy, carrier: torch.dtype, step: str, constants: tuple[float, ...], table: Mapping[str, Row] = OPERATIONS
) -> bool:
    """Whether the carrier's own operations, then the cast, round every operation of a step as if once.

    `constants` are those that its operations meet.
    """
    dot = getattr(policy, step)
    if isinstance(dot, Dot) and dot.every is not None and not dot.accumulate.is_identity_on(carrier):
        return False
    names = [name for name, (own, *_) in table.items() if own == step]
    return all(operation(policy, carrier, name, constant, table).is_harmless for name in names for constant in (1.0, *constants))


def _operand(policy: Policy, carrier: torch.dtype, step: str) -> Operand:
    return format_of(carrier) if step == SAVED else _cast(policy, step).to


def _cast(policy: Policy, step: str) -> Cast:
    """The one cast of a step whose numbers are rounded one by one."""
    own: Cast | Dot | Microscaled | Quantised = getattr(policy, step)
    cast = own.accumulate if isinstance(own, Dot) else own
    assert isinstance(cast, Cast), "a microscaled P is not rounded number by number"
    return cast
