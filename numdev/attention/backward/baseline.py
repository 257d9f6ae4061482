"""The baseline that a backward variant has unless another is asked for."""

from __future__ import annotations

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.backward.naive import NaiveBackward


def baseline_for(fmt: Format) -> NaiveBackward:
    """Autograd of matmul, softmax, matmul in the format of the gradients; one narrower than 16 bits has FP32, as forward."""
    return NaiveBackward.eager(fmt if fmt.bits >= 16 else FP32)
