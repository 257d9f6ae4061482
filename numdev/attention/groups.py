"""The groups of settings of attention: the class whose fields are the settings of each."""

from __future__ import annotations

from typing import Any

from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import BackwardProblem, Problem
from numdev.attention.softmax import OnlineSoftmax, Recompute
from numdev.attention.tiling import Tiling

GROUPS: dict[str, type] = {"problem": Problem, "precision": Precision, "tiling": Tiling, "softmax": OnlineSoftmax}
"""The groups whose options set values of these settings. An option of `attention` and `baseline` has settings of its own."""

BACKWARD_GROUPS: dict[str, type] = {
    "problem": BackwardProblem,
    "precision": BackwardPrecision,
    "forward_precision": Precision,
    "tiling": Tiling,
    "softmax": OnlineSoftmax,
    "recompute": Recompute,
}
"""Those of the backward pass: `precision` has its steps, and the options of the forward pass whose presets it has too."""

BACKWARD_DEFAULTS: dict[str, Any] = {"forward_precision.preset": "${precision.preset}"}
"""Defaults that differ from those of the fields."""
