"""The elementary operations of the backward pass as data, as `numdev.attention.operations` has those of the forward pass."""

from __future__ import annotations

from numdev.arithmetic.elementary import Operation
from numdev.attention.operations import CONSTANT, SAVED, Row

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
"""`stored` is P as the forward pass stored it, `exponential` P as it is recomputed."""
