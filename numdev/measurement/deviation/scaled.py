"""Numbers whose squares and sums may lie outside the range of FP64, kept as a number and a power of two."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch import Tensor

_ORDINARY = 400  # squares of numbers of size 2^-400 to 2^400, and sums of 2^200 of them, neither underflow nor overflow


@dataclass(frozen=True)
class Scaled:
    """`number * 2^exponent`, which may lie outside the range of FP64 until it is divided by another."""

    number: float
    exponent: int = 0

    def __float__(self) -> float:
        try:
            return math.ldexp(self.number, self.exponent)
        except OverflowError:
            return math.copysign(math.inf, self.number)

    def over(self, other: Scaled) -> float:
        """The quotient; 0/0 is 0, no deviation, and any deviation from an all-zero reference is infinite."""
        if other.number == 0:
            return 0.0 if self.number == 0 else math.inf
        (a, i), (b, j) = math.frexp(self.number), math.frexp(other.number)
        return float(Scaled(a / b, i - j + self.exponent - other.exponent))


def exponent_of(largest: float) -> int:
    """The exponent by which numbers of at most this size are scaled before they are squared or added; 0 if none is needed."""
    exponent = math.frexp(largest)[1]
    return 0 if abs(exponent) <= _ORDINARY else exponent


def shifted(values: Tensor, exponent: int) -> Tensor:
    """`values * 2^exponent`, in two steps, since 2^exponent itself may lie outside the range of FP64."""
    if exponent == 0:
        return values
    half = exponent // 2
    return values * 2.0**half * 2.0 ** (exponent - half)
