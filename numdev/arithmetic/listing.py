"""Formats that field widths do not describe: each is a list of its numbers and of the rounding boundaries between them.

The numbers of posits and of codebooks such as NF4 are not equally spaced between two powers of two. A list of the numbers is
enough for every cast, since a result is always one of two neighbours.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from jaxtyping import Float

from numdev.lazy import torch


@dataclass(frozen=True)
class Listing:
    """The finite numbers of a format.

    Listings with the same name are equal.
    """

    name: str  # of the format
    numbers: tuple[float, ...] = field(repr=False, compare=False)  # all of them, ascending; zero is one. Each is a number of FP64
    # The rounding boundaries between neighbours. In rounding to nearest, what lies above a boundary goes to the upper neighbour,
    # what lies below to the lower one, and the boundary itself to the neighbour whose distance from zero, counted in places of
    # the list, is even
    turns: tuple[float, ...] = field(repr=False, compare=False)
    # Whether results beyond the largest number become NaN; without NaN they become the largest number
    has_nan: bool = field(default=False, compare=False)
    # Whether an infinity becomes NaN all the same, as posits have NaR ("not a real") for what is no real number
    has_nar: bool = field(default=False, compare=False)

    def __post_init__(self) -> None:
        pairs = zip(self.numbers, self.turns, self.numbers[1:], strict=False)
        between = all(low <= turn <= high and low < high for low, turn, high in pairs)
        if 0.0 not in self.numbers or len(self.turns) != len(self.numbers) - 1 or not between:
            raise ValueError(f"{self.name}: give ascending numbers, zero among them, and one point between each two")
        if self.has_nan and self.numbers[0] != -self.numbers[-1]:
            raise ValueError(f"{self.name}: a list with NaN ends at the same distance from zero on both sides")

    @staticmethod
    def halfway(name: str, numbers: tuple[float, ...], *, has_nan: bool = False) -> Listing:
        """The list whose points are halfway between neighbours, as in IEEE 754."""
        return Listing(name, numbers, tuple((low + high) / 2 for low, high in itertools.pairwise(numbers)), has_nan)

    @property
    def largest(self) -> float:
        """The largest magnitude."""
        return max(-self.numbers[0], self.numbers[-1])

    @cached_property
    def zero(self) -> int:
        """The place of zero."""
        return self.numbers.index(0.0)

    @cached_property
    def quantum(self) -> int:
        """The largest `k` such that every number is a multiple of `2^k`."""
        return min(_trailing(value) for value in self.numbers if value)

    @cached_property
    def top(self) -> int:
        """`floor(log2)` of the largest magnitude."""
        return math.frexp(self.largest)[1] - 1

    @cached_property
    def significant_bits(self) -> int:
        """The most that one of the numbers needs."""
        return max(math.frexp(value)[1] - _trailing(value) for value in self.numbers if value)

    @cached_property
    def u(self) -> float:
        """Half the spacing above 1, as for binary formats; below 1 where 1 is the largest number."""
        return 0.5 * float(self.spacing(torch.ones(1, dtype=torch.float64)))

    def spacing(self, x: Float[torch.Tensor, "*shape"]) -> Float[torch.Tensor, "*shape"]:
        """Spacing at each `x`, in FP64: the gap that `x` lies in; at a number, the gap on the side away from zero.

        Beyond the list it is the outermost gap.
        """
        numbers = torch.tensor(self.numbers, dtype=torch.float64, device=x.device)
        x = x.double()
        upper = torch.where(x >= 0, torch.searchsorted(numbers, x, right=True), torch.searchsorted(numbers, x))
        upper = upper.clamp(1, len(self.numbers) - 1)
        return numbers[upper] - numbers[upper - 1]

    def below(self, x: Float[torch.Tensor, "*shape"]) -> tuple[torch.Tensor, torch.Tensor]:
        """For each `x` in FP64: the place of the largest number that is not above it, and of the smallest that is not below.

        The first number has place 1. Place 0 lies below the list, and stands for values beyond it.
        """
        numbers = self._extended.to(x.device)
        clipped = x.clamp(float(numbers[0]), float(numbers[-1]))
        low = (torch.searchsorted(numbers, clipped, right=True) - 1).clamp(0, len(numbers) - 1)
        return low, torch.where(numbers[low] == clipped, low, low + 1).clamp(max=len(numbers) - 1)  # NaN equals no number

    def number(self, place: torch.Tensor) -> torch.Tensor:
        """The numbers at the places that `below` gives, in FP64."""
        return self._extended.to(place.device)[place]

    def nearest(self, x: torch.Tensor, low: torch.Tensor, high: torch.Tensor, *, away: bool) -> torch.Tensor:
        """The place of the nearer neighbour; ties go away from zero, or to an even place."""
        turn = self._turns.to(x.device)[low.clamp(max=len(self._turns) - 1)]
        tie = x > 0 if away else (high - self.zero - 1) % 2 == 0
        up = (x > turn) | ((x == turn) & tie)
        return torch.where(up, high, low)

    def is_odd(self, place: torch.Tensor) -> torch.Tensor:
        """Whether the number at a place is an odd number of places away from zero."""
        return (place - self.zero - 1) % 2 != 0

    @cached_property
    def _extended(self) -> torch.Tensor:
        first, second, *_ = self.numbers
        *_, last_but_one, last = self.numbers
        beyond = [2 * first - second, *self.numbers, 2 * last - last_but_one]
        return torch.tensor(beyond, dtype=torch.float64)

    @cached_property
    def _turns(self) -> torch.Tensor:
        low, high = (self._extended[:2].mean(), self._extended[-2:].mean())
        return torch.tensor([float(low), *self.turns, float(high)], dtype=torch.float64)


def _trailing(value: float) -> int:
    """The exponent of the last bit of a number that is not 0."""
    numerator, denominator = value.as_integer_ratio()
    return (numerator & -numerator).bit_length() - denominator.bit_length()


@lru_cache
def posit(bits: int) -> Listing:
    """Posits of 3 to 16 bits (Standard for Posit Arithmetic 2022: `es` is 2): sign, regime, two exponent bits, fraction.

    A nonzero real number never rounds to 0, nor beyond the largest number; infinities and NaN of IEEE 754 become NaR,
    which is NaN here. Rounding is defined on the encoding (section 4.1): the boundary between two neighbours is the posit with
    one bit more that lies between them.
    """
    magnitudes, finer = _posits(bits), _posits(bits + 1)
    numbers = [-value for value in reversed(magnitudes[1:])] + magnitudes
    inner = finer[3:-1:2]  # finer[2 k] is magnitudes[k]; finer[1] is no boundary, since nothing nonzero rounds to 0
    turns = [-value for value in reversed(inner)] + [0.0, 0.0] + inner
    return Listing(f"posit{bits}", tuple(numbers), tuple(turns), has_nar=True)


def _posits(bits: int) -> list[float]:
    """0 and the positive posits of a width, ascending, which is the order of their codes."""
    return [0.0, *(_decoded(code, bits) for code in range(1, 2 ** (bits - 1)))]


def _decoded(code: int, bits: int) -> float:
    text = f"{code:0{bits - 1}b}"
    run = len(text) - len(text.lstrip(text[0]))
    regime = run - 1 if text[0] == "1" else -run
    rest = text[run + 1 :]
    exponent = int(rest[:2].ljust(2, "0"), 2)
    fraction, digits = int(rest[2:] or "0", 2), len(rest[2:])
    return math.ldexp((1 << digits) + fraction, 4 * regime + exponent - digits)


@lru_cache
def fnuz(exponent_bits: int, mantissa_bits: int) -> Listing:
    """8-bit formats with one NaN, no infinity, no -0, and a bias larger by 1 (Noune et al. 2022, arXiv 2206.02915)."""
    bias = 2 ** (exponent_bits - 1)
    magnitudes = []
    for code in range(2 ** (exponent_bits + mantissa_bits)):
        exponent, fraction = divmod(code, 2**mantissa_bits)
        magnitudes.append(math.ldexp(fraction + (2**mantissa_bits if exponent else 0), max(exponent, 1) - bias - mantissa_bits))
    numbers = [-value for value in reversed(magnitudes[1:])] + magnitudes
    return Listing.halfway(f"e{exponent_bits}m{mantissa_bits}fnuz", tuple(numbers), has_nan=True)


# Quantiles of the normal distribution in [-1, 1] (Dettmers et al. 2023, arXiv 2305.14314, appendix E).
_NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)

LISTINGS: dict[str, Callable[[], Listing]] = {
    "nf4": lambda: Listing.halfway("nf4", _NF4),
    "posit8": lambda: posit(8),
    "posit16": lambda: posit(16),
    "e4m3fnuz": lambda: fnuz(4, 3),
    "e5m2fnuz": lambda: fnuz(5, 2),
}
