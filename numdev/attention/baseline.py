"""The baseline that a variant has unless another is asked for."""

from __future__ import annotations

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision


def baseline_for(fmt: Format) -> Naive:
    """The baseline of a variant whose output is in `fmt`: matmul, softmax, matmul as tensor operations in that format.

    A format narrower than 16 bits has no such operations in torch; its baseline is in FP32.
    """
    return Naive(Precision.eager(fmt if fmt.bits >= 16 else FP32))
