"""Rounding by looking it up: a sorted table of a format's numbers, exact comparisons, and a rule for what is beyond.

Nothing is shared with `numdev.rounding`. The numbers are decoded code by code (IEEE 754-2019, section 3.4; OCP OFP8,
section 5), so the index of a number in the table is its code without the sign, and the parity of the index is that of
the last bit. The table and every comparison are exact in FP64, since a format of 16 bits or fewer has at most 16
significant bits. `round_exactly` says the same in rational arithmetic, for formats too wide for a table.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np
import numpy.typing as npt

from numdev.formats import Format, Specials
from numdev.rounding import Overflow, Rounding, Subnormals

Floats = npt.NDArray[np.floating]
Doubles = npt.NDArray[np.float64]


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


@dataclass(frozen=True)
class Table:
    """The non-negative numbers of a format, ascending, and the one that would follow them."""

    fmt: Format

    @cached_property
    def numbers(self) -> Doubles:
        """All magnitudes and, last, the next one if the range went on: what an overflow rounds to before it is one."""
        return np.array([float(decode(code, self.fmt)) for code in range(count_of_codes(self.fmt) + 1)])

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

    def neighbours(self, x: Floats) -> tuple[npt.NDArray[np.intp], npt.NDArray[np.intp]]:
        """Indices of the largest number not above `|x|` and of the smallest not below it; the last one is beyond."""
        magnitude = np.minimum(np.nan_to_num(np.abs(x.astype(np.float64)), posinf=np.inf), self.numbers[-1])
        below = np.searchsorted(self.numbers, magnitude, side="right") - 1
        above = np.searchsorted(self.numbers, magnitude, side="left")
        return below, above

    def round(self, x: Floats, mode: Rounding, overflow: Overflow, subnormals: Subnormals) -> Doubles:
        """`x` rounded, in FP64, by any mode but the stochastic one."""
        below, above = self.neighbours(x)
        return self.result(x, np.where(self._goes_up(x, below, above, mode), above, below), mode, overflow, subnormals)

    def result(
        self, x: Floats, index: npt.NDArray[np.intp], mode: Rounding, overflow: Overflow, subnormals: Subnormals
    ) -> Doubles:
        """The numbers of the given indices with the signs of `x`, and what overflow and flushing make of them."""
        magnitude = self.numbers[index]
        if subnormals is Subnormals.FLUSHED:
            magnitude = np.where(magnitude < self.smallest_normal, 0.0, magnitude)
        for negative in (False, True):
            over = (index == len(self.numbers) - 1) & (np.signbit(x) == negative)
            magnitude = np.where(over, overflowed(self.fmt, mode, overflow, negative), magnitude)
        infinite = overflowed(self.fmt, Rounding.NEAREST_EVEN, overflow, False)
        magnitude = np.where(np.isinf(x), infinite, magnitude)
        return np.where(np.isnan(x), np.nan, np.copysign(magnitude, x))

    def _goes_up(
        self, x: Floats, below: npt.NDArray[np.intp], above: npt.NDArray[np.intp], mode: Rounding
    ) -> npt.NDArray[np.bool_]:
        inexact = below != above
        magnitude = np.abs(x.astype(np.float64))
        low, high = self.numbers[below], self.numbers[above]
        with np.errstate(invalid="ignore", over="ignore"):
            compared = np.sign((magnitude - low) - (high - magnitude))  # exact near a tie (Sterbenz)
        if mode is Rounding.NEAREST_EVEN:
            up = (compared > 0) | ((compared == 0) & (below % 2 == 1))
        elif mode is Rounding.NEAREST_AWAY:
            up = compared >= 0
        elif mode is Rounding.TOWARD_ZERO:
            up = np.zeros_like(inexact)
        elif mode is Rounding.UP:
            up = ~np.signbit(x)
        elif mode is Rounding.DOWN:
            up = np.signbit(x)
        else:
            assert mode is Rounding.ODD, "stochastic rounding has no single result"
            up = below % 2 == 0
        return inexact & up


def overflowed(fmt: Format, mode: Rounding, overflow: Overflow, negative: bool) -> float:
    """The magnitude of a result beyond the largest number (IEEE 754-2019, section 7.4; OCP OFP8, section 6)."""
    inward = mode in (Rounding.TOWARD_ZERO, Rounding.ODD, Rounding.UP if negative else Rounding.DOWN)
    if overflow is Overflow.SATURATE or inward:
        return float(decode(count_of_codes(fmt) - 1, fmt))
    return math.inf if fmt.specials is Specials.IEEE else math.nan


def round_exactly(x: float, fmt: Format, mode: Rounding, overflow: Overflow) -> float:
    """A finite `x` rounded by any mode but the stochastic one, in rational arithmetic; subnormals are kept."""
    magnitude, negative = abs(Fraction(x)), math.copysign(1.0, x) < 0
    exponent = 2 - 2 ** (fmt.exponent_bits - 1)
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
    got, want, given = (np.asarray(value, dtype=np.float64) for value in (actual, expected, x))
    both_nan = np.isnan(got) & np.isnan(want)
    wrong = ~both_nan & ((got != want) | (np.signbit(got) != np.signbit(want)))
    if wrong.any():
        first = int(np.flatnonzero(wrong)[0])
        pair = f"{given.flat[first]!r} became {got.flat[first]!r}, expected {want.flat[first]!r}"
        raise AssertionError(f"{what}: {int(wrong.sum())} of {wrong.size} differ; the first: {pair}")
