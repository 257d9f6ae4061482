"""The values of one tensor and what every comparison with it needs again: sorted values, norms, ulp, distances.

Squares and sums of FP64 numbers may lie outside the range of FP64; they are kept as a number and a power of two.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput

_ORDINARY = 400  # squares of numbers of size 2^-400 to 2^400, and sums of 2^200 of them, neither underflow nor overflow
_CHUNK = 1 << 16  # values whose differences stay in the cache, and whose sum has one order


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


class Sample:
    """The values of a tensor in FP64, and what every comparison with it needs again."""

    def __init__(self, tensor: Float[Tensor, "*shape"]) -> None:
        self.shape = tensor.shape
        self.values = tensor.detach().double().reshape(-1)
        self._ulp: dict[Format, Tensor] = {}

    @property
    def nbytes(self) -> int:
        """Of the values and of what is computed from them at their length: the same sorted, their signs, their ulp."""
        return 4 * self.values.nbytes

    @cached_property
    def is_finite(self) -> bool:
        """Known by `largest`, which is needed anyway: a maximum of NaN and numbers is NaN."""
        return math.isfinite(self.largest)

    @cached_property
    def ordered(self) -> Tensor:
        return ascending(self.values)

    @cached_property
    def largest(self) -> float:
        return float(self.values.abs().amax())

    @cached_property
    def exponent(self) -> int:
        """Of the power of two that `scaled` leaves out; 0 where every sum of squares is safe."""
        return exponent_of(self.largest)

    @cached_property
    def scaled(self) -> Tensor:
        """`values / 2^exponent`."""
        return shifted(self.values, -self.exponent)

    @cached_property
    def norm(self) -> Scaled:
        return Scaled(float(self.scaled.norm()), self.exponent)

    @cached_property
    def l1(self) -> Scaled:
        return Scaled(float(self.scaled.abs().sum()), self.exponent)

    @cached_property
    def sign(self) -> Tensor:
        return self.values.sign()

    def ulp(self, fmt: Format) -> Tensor:
        """The spacing of a format at each value."""
        if fmt not in self._ulp:
            self._ulp[fmt] = fmt.ulp(self.values)
        return self._ulp[fmt]

    def at(self, places: Tensor) -> Sample:
        return Sample(self.values[places])


def ascending(values: Tensor) -> Tensor:
    """Ascending, with NaN at the end. NumPy sorts 17 times as fast as torch on a CPU (131,072 values in 0.6 ms)."""
    return values.sort().values if values.is_cuda else torch.from_numpy(np.sort(values.numpy()))


def wasserstein(x: Float[Tensor, " n"], y: Float[Tensor, " m"]) -> float:
    """Wasserstein-1 distance between the empirical distributions of two samples, absolute.

    On the line `W1 = int |F_x - F_y|` (Panaretos & Zemel 2019, section 2.1); for equal counts that is the mean distance of the
    sorted samples.

    Raises:
        BadInput: if a sample is empty or not finite.
    """
    if x.numel() == 0 or y.numel() == 0:
        raise BadInput("sample", 0, "each sample needs at least one value")
    first, second = Sample(x), Sample(y)
    if not (first.is_finite and second.is_finite):
        raise BadInput("sample", "NaN or Inf", "leave them out first; Deviation counts them")
    return distance(first, second)


def distance(x: Sample, y: Sample) -> float:
    """The area between two empirical distribution functions."""
    area = _area(x.ordered, y.ordered)
    if math.isfinite(area):
        return area
    down = 2 + max(x.values.numel(), y.values.numel()).bit_length()  # a difference, or a sum of them, went beyond FP64
    return float(Scaled(_area(shifted(x.ordered, -down), shifted(y.ordered, -down)), down))


def _area(x: Tensor, y: Tensor) -> float:
    if x.numel() == y.numel():
        if x.is_cuda:
            return float((x - y).abs_().mean())
        with np.errstate(over="ignore"):
            parts = (np.abs(part).sum() for part in np.split(x.numpy() - y.numpy(), range(_CHUNK, x.numel(), _CHUNK)))
            return float(sum(map(float, parts))) / x.numel()
    both = torch.cat([x, y]).sort().values
    below_x = torch.searchsorted(x, both[:-1], right=True).double() / x.numel()
    below_y = torch.searchsorted(y, both[:-1], right=True).double() / y.numel()
    return float(((below_x - below_y).abs_() * both.diff()).sum())
