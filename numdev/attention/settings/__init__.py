"""What a user can set of attention: a dataclass for each group of configs, and the constructor that its `_target_` names.

The declarations import neither torch nor Hydra, since `--help` and completion read them; a constructor imports what it makes.
"""

from __future__ import annotations

from numdev.attention.settings.backward import (
    BackwardPrecisionSettings,
    BackwardProblemSettings,
    ForwardPrecisionSettings,
    RecomputeSettings,
)
from numdev.attention.settings.precision import PrecisionSettings
from numdev.attention.settings.problem import ProblemSettings
from numdev.attention.settings.softmax import SoftmaxSettings
from numdev.attention.settings.tiling import TilingSettings

GROUPS: dict[str, type] = {
    "problem": ProblemSettings,
    "precision": PrecisionSettings,
    "tiling": TilingSettings,
    "softmax": SoftmaxSettings,
}
"""The groups whose options state values of the same settings. An option of `attention` and `baseline` has settings of its own."""

BACKWARD_GROUPS: dict[str, type] = {
    "problem": BackwardProblemSettings,
    "precision": BackwardPrecisionSettings,
    "forward_precision": ForwardPrecisionSettings,
    "tiling": TilingSettings,
    "softmax": SoftmaxSettings,
    "recompute": RecomputeSettings,
}
"""Those of the backward pass: `precision` has its steps, and the options of the forward pass whose presets it has too."""
