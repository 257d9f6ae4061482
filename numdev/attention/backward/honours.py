"""The settings of the backward pass, in the sets in which its implementations read them."""

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
RECOMPUTED = (settings_of("recompute", Recompute) - {"recompute.exponential"}) | {"recompute.exp"}
TILED = STEPS | FORWARD_STEPS | RECURRENCE | RECOMPUTED | (TILES - {"tiling.splits"})
"""What both passes read where they are tiled; no range of keys has gradients of its own, so that there are no splits."""

_OUTPUT_ALONE = ("values", "accumulator", "output")  # steps of the forward pass that never enter its LSE


def idle_recompute(recompute: Recompute) -> dict[str, str]:
    """What is not read of the O that the forward pass leaves, and of its steps, and the setting under which it would be."""
    if not recompute.reads_output:
        unread = ("recompute.output", *(f"forward_precision.{name}" for name in _OUTPUT_ALONE))
        return dict.fromkeys(unread, "recompute.delta=output")
    rounded = recompute.output is OutputForDelta.ROUNDED
    return {} if rounded else {"forward_precision.output": "recompute.output=rounded"}
