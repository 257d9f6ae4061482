"""The settings of the backward pass, as the sets that its implementations honour."""

from __future__ import annotations

from numdev.arithmetic.quantise import Quantised
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.recompute import OutputForDelta, Recompute
from numdev.attention.honours import PRESET, RECURRENCE, TILES, settings_of
from numdev.attention.precision import Precision

STEPS = PRESET | settings_of("precision", BackwardPrecision)
FORWARD_STEPS = (
    frozenset({"forward_precision.preset"})
    | settings_of("forward_precision", Precision)
    | settings_of("forward_precision.quantise", Quantised)
)
_EXPONENTIAL = {"recompute.exp", "recompute.exp_coefficients", "recompute.exp_share"}  # of `exponential`
RECOMPUTED = (settings_of("recompute", Recompute) - {"recompute.exponential"}) | _EXPONENTIAL
TILED = STEPS | FORWARD_STEPS | RECURRENCE | RECOMPUTED | (TILES - {"tiling.splits"})
"""The settings that both tiled passes read; there are no splits, since gradients of ranges of keys cannot be combined."""

_OUTPUT_ALONE = ("values", "accumulator", "output")  # steps of the forward pass that never enter its LSE


def idle_recompute(recompute: Recompute) -> dict[str, str]:
    """Settings of the forward pass's O, and of its steps, that have no effect, and the setting under which each would."""
    if not recompute.reads_output:
        unread = ("recompute.output", *(f"forward_precision.{name}" for name in _OUTPUT_ALONE))
        return dict.fromkeys(unread, "recompute.delta=output")
    rounded = recompute.output is OutputForDelta.ROUNDED
    return {} if rounded else {"forward_precision.output": "recompute.output=rounded"}
