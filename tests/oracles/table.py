"""Rounding by looking it up: a sorted table of a format's numbers, exact comparisons, and a rule for what is beyond.

Nothing is shared with `numdev.arithmetic.rounding`. The numbers are decoded code by code (IEEE 754-2019, section 3.4; OCP OFP8,
section 5), so the index of a number in the table is its code without the sign, and the parity of the index is that of
the last bit. The table and every comparison are exact in FP64, since a format of 16 bits or fewer has at most 16
significant bits. `round_exactly` says the same in rational arithmetic, for formats too wide for a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from numdev.arithmetic.formats import Format, Specials
from numdev.arithmetic.rounding import Overflow, Rounding, Subnormals

Floats = npt.NDArray[np.floating]
Doubles = npt.NDArray[np.float64]
Indices = npt.NDArray[np.intp]


def decode(code: int, fmt: Format) -> Fraction:
    """The magnitude that a code without sign stands for, were no code special."""
    field, fraction = divmod(code, 2**fmt.mantissa_bits)
    if fmt.exponent_bits == 0:
        return Fraction(code)
    bias = 2 ** (fmt.exponent_bits - 1) - 1
    significand = Fraction(fraction, 2**fmt.mantissa_bits) + (1 if field else 0)
    return significand * Fraction(2) ** (max(field, 1) - bias)


def count_of_codes(fmt: Format) -> int:
    """How many codes without sign are numbers; they are the first ones."""
    codes = 2 ** (fmt.exponent_bits + fmt.mantissa_bits)
    special = {Specials.IEEE: 2**fmt.mantissa_bits, Specials.NAN_ONLY: 1, Specials.FINITE: 0}
    return codes - special[fmt.specials]


@lru_cache
def _numbers(fmt: Format) -> Doubles:
    return np.array([float(decode(code, fmt)) for code in range(count_of_codes(fmt) + 1)])


@dataclass(frozen=True)
class Table:
    """The non-negative numbers of a format, ascending, and the one that would follow them."""

    fmt: Format

    @property
    def numbers(self) -> Doubles:
        """All magnitudes and, last, the next one if the range went on: what an overflow rounds to before it is one."""
        return _numbers(self.fmt)

    @property
    def largest(self) -> float:
        return float(self.numbers[-2])

    @property
    def smallest_normal(self) -> float:
        return float(self.numbers[2**self.fmt.mantissa_bits])

    def breakpoints(self, carrier: type[np.floating]) -> Floats:
        """Where a rounding can change, and what is beyond: both signs of `v, v+, mid-, mid, mid+, w-` for every gap.

        `v` and `w` are neighbours in the format, `+` and `-` the neighbours in the carrier.
        """
        with np.errstate(over="ignore"):  # the number after the largest of bf16 is infinite in FP32
            v, w = self.numbers[:-1].astype(carrier), self.numbers[1:].astype(carrier)
            middle = ((self.numbers[:-1] + self.numbers[1:]) / 2).astype(carrier)
            far = [self.numbers[-1], 2 * self.numbers[-1], np.finfo(carrier).max, np.inf, np.nan]
            beyond = np.array(far).astype(carrier)
            tiny = np.array([np.finfo(carrier).smallest_subnormal, np.finfo(carrier).tiny]).astype(carrier)
            zero, infinity = carrier(0), carrier(np.inf)
            points = [v, np.nextafter(v, infinity), np.nextafter(middle, zero), middle, np.nextafter(middle, infinity)]
            points += [np.nextafter(w, zero), beyond, np.nextafter(beyond, infinity), tiny]
        magnitudes = np.concatenate(points)
        return np.concatenate([magnitudes, -magnitudes])

    def locate(self, x: Floats) -> Located:
        """Between which numbers each element stands; NaN and what is beyond stand at the last one."""
        with np.errstate(invalid="ignore"):
            exact = x.astype(np.float64)
        clipped = np.nan_to_num(np.minimum(np.abs(exact), self.numbers[-1]), nan=self.numbers[-1])
        below = np.searchsorted(self.numbers, clipped, side="right") - 1
        above = below + (self.numbers[below] != clipped)
        # Both differences are exact near a tie (Sterbenz), which is all that the comparison needs.
        compared = np.sign((clipped - self.numbers[below]) - (self.numbers[above] - clipped))
        return Located(self, exact, below, above, compared)


@dataclass(frozen=True)
class Located:
    """Inputs with the indices of the largest number not above `|x|` and the smallest not below; equal if `x` is one."""

    table: Table
    x: Doubles
    below: Indices
    above: Indices
    compared: Doubles  # the sign of `|x|` minus the middle

    def round(self, mode: Rounding, overflow: Overflow, subnormals: Subnormals) -> Doubles:
        """`x` rounded, in FP64, by any mode but the stochastic one."""
        return self.result(np.where(self.goes_up(mode), self.above, self.below), mode, overflow, subnormals)

    def goes_up(self, mode: Rounding) -> npt.NDArray[np.bool_]:
        """Whether the magnitude rounds to the upper neighbour; where both neighbours are one, either will do."""
        if mode is Rounding.NEAREST_EVEN:
            return (self.compared > 0) | ((self.compared == 0) & (self.below % 2 == 1))
        if mode is Rounding.NEAREST_AWAY:
            return self.compared >= 0
        if mode is Rounding.TOWARD_ZERO:
            return np.zeros(self.x.shape, dtype=bool)
        if mode is Rounding.UP:
            return ~np.signbit(self.x)
        if mode is Rounding.DOWN:
            return np.signbit(self.x)
        assert mode is Rounding.ODD, "stochastic rounding has no single result"
        return self.below % 2 == 0

    def result(self, index: Indices, mode: Rounding, overflow: Overflow, subnormals: Subnormals) -> Doubles:
        """The numbers of the given indices with the signs of `x`, and what overflow and flushing make of them."""
        fmt, numbers = self.table.fmt, self.table.numbers.copy()
        if subnormals is Subnormals.FLUSHED:
            numbers[numbers < self.table.smallest_normal] = 0.0
        magnitude = numbers[index]
        beyond, negative, finite = index == len(numbers) - 1, np.signbit(self.x), np.isfinite(self.x)
        magnitude[beyond & finite & ~negative] = overflowed(fmt, mode, overflow, False)
        magnitude[beyond & finite & negative] = overflowed(fmt, mode, overflow, True)
        magnitude[np.isinf(self.x)] = overflowed(fmt, Rounding.NEAREST_EVEN, overflow, False)  # exact in any mode
        magnitude[np.isnan(self.x)] = math.nan
        return np.copysign(magnitude, self.x)


def overflowed(fmt: Format, mode: Rounding, overflow: Overflow, negative: bool) -> float:
    """The magnitude of a result beyond the largest number (IEEE 754-2019, section 7.4; OCP OFP8, section 6)."""
    inward = mode in (Rounding.TOWARD_ZERO, Rounding.ODD, Rounding.UP if negative else Rounding.DOWN)
    if overflow is Overflow.SATURATE or inward:
        return float(decode(count_of_codes(fmt) - 1, fmt))
    return math.inf if fmt.specials is Specials.IEEE else math.nan


def round_exactly(x: float | Fraction, fmt: Format, mode: Rounding, overflow: Overflow) -> float:
    """A finite `x` rounded by any mode but the stochastic one, in rational arithmetic; subnormals are kept."""
    magnitude, negative = abs(Fraction(x)), x < 0 or (x == 0 and math.copysign(1.0, x) < 0)
    smallest = 2 - 2 ** (fmt.exponent_bits - 1)
    exponent = max(smallest, magnitude.numerator.bit_length() - magnitude.denominator.bit_length() - 1)
    while magnitude >= Fraction(2) ** (exponent + 1):
        exponent += 1
    quantum = Fraction(2) ** (exponent - fmt.mantissa_bits)
    whole, rest = divmod(magnitude, quantum)
    half = quantum / 2
    goes_up = {
        Rounding.NEAREST_EVEN: rest > half or (rest == half and whole % 2 == 1),
        Rounding.NEAREST_AWAY: rest >= half,
        Rounding.TOWARD_ZERO: False,
        Rounding.UP: not negative,
        Rounding.DOWN: negative,
        Rounding.ODD: whole % 2 == 0,
    }
    rounded = (whole + (1 if rest and goes_up[mode] else 0)) * quantum
    over = rounded > decode(count_of_codes(fmt) - 1, fmt)
    value = overflowed(fmt, mode, overflow, negative) if over else float(rounded)
    return math.copysign(value, -1.0 if negative else 1.0)


def assert_same(actual: npt.ArrayLike, expected: npt.ArrayLike, x: npt.ArrayLike, what: str) -> None:
    """Equal element by element, the sign of a zero and the places of NaN included; names the first difference."""
    with np.errstate(invalid="ignore"):  # raised by signalling NaN on their way to FP64
        got, want, given = (np.atleast_1d(np.asarray(value).astype(np.float64)) for value in (actual, expected, x))
    assert got.shape == want.shape, f"{what}: shape {got.shape} instead of {want.shape}"
    same = (got.view(np.int64) == want.view(np.int64)) | (np.isnan(got) & np.isnan(want))
    if not same.all():
        first = int(np.flatnonzero(~same)[0])
        pair = f"{given.flat[first]!r} became {got.flat[first]!r}, expected {want.flat[first]!r}"
        raise AssertionError(f"{what}: {int((~same).sum())} of {same.size} differ; the first: {pair}")
