"""The settings of the backward pass, as the sets that its implementations honour."""

from __future__ import annotations

from numdev.arithmetic.quantise import Quantised
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.recompute import OutputForDelta, Recompute
from numdev.attention.base import Attention
from numdev.attention.honours import PRESET, RECURRENCE, TILES, OnShape, settings_of
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.tiling import Tiling
from numdev.errors import NotHonoured

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


def backward_ineffective(
    forward: Attention, precision: BackwardPrecision, tiling: Tiling, recompute: Recompute, shape: Shape | None
) -> list[NotHonoured]:
    """See `numdev.attention.honours.OnShape`, for both passes over tiles."""
    lengths = {"dq": tiling.bc, "dk": tiling.br, "dv": tiling.br}
    if shape is not None:
        lengths |= {"scores": shape.head_dim, "dp": shape.head_dim}
    if not recompute.reads_output:
        lengths["delta"] = tiling.bc
    elif shape is not None:
        lengths["delta"] = shape.head_dim
    of_forward = forward.ineffective(shape) if isinstance(forward, OnShape) else []
    renamed = [
        NotHonoured(error.field.replace("precision.", "forward_precision."), error.value, error.mend) for error in of_forward
    ]
    return precision.ineffective(lengths) + renamed + recompute.exponential.ineffective(tiling.bc, "recompute")


_OUTPUT_ALONE = ("values", "accumulator", "output")  # steps of the forward pass that never enter its LSE


def idle_recompute(recompute: Recompute) -> dict[str, str]:
    """Settings of the forward pass's O, and of its steps, that have no effect, and the setting under which each would."""
    if not recompute.reads_output:
        unread = ("recompute.output", *(f"forward_precision.{name}" for name in _OUTPUT_ALONE))
        return dict.fromkeys(unread, "recompute.delta=output")
    rounded = recompute.output is OutputForDelta.ROUNDED
    return {} if rounded else {"forward_precision.output": "recompute.output=rounded"}
