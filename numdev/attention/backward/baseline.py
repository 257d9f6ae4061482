"""The default baseline of a backward variant."""

from __future__ import annotations

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.naive import NaiveBackward


def baseline_for(fmt: Format) -> NaiveBackward:
    """Autograd of matmul, softmax, matmul in the format of the gradients; in FP32 below 16 bits, as in the forward pass."""
    return NaiveBackward.eager(fmt if fmt.bits >= 16 else FP32)
