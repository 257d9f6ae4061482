"""Number formats as data: a `Format` is a finite set of binary numbers, described by a few integers.

A format with `e` exponent bits and `m` mantissa bits holds the numbers

    +- (1 + k / 2^m) * 2^E      emin <= E <= emax     (normal)
    +- (k / 2^m) * 2^emin                             (subnormal, and zero)

with `0 <= k < 2^m`, `bias = 2^(e-1) - 1` and `emin = 1 - bias` (IEEE 754-2019, section 3.3). The OCP 8-bit formats
differ only in which codes of the top exponent are numbers (OCP OFP8, section 5). A symmetric integer format is the
same set without normal numbers and with a quantum of one: `+- k`, `0 <= k < 2^m`. Posits and codebooks do not have this form:
they are given by a list of their numbers, all of which are numbers of the binary format that the widths describe.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property, lru_cache

from jaxtyping import Float

from numdev.arithmetic.listing import LISTINGS, Listing
from numdev.errors import BadInput
from numdev.lazy import torch


class Specials(Enum):
    """Meanings of the largest exponent code of a format."""

    IEEE = "ieee"  # infinities and NaNs take the whole of it
    NAN_ONLY = "fn"  # one NaN, the all-ones mantissa; the rest are numbers (OCP E4M3)
    FINITE = "finite"  # numbers only (OCP FP4 and FP6, the integers)


@dataclass(frozen=True)
class Format:
    """A binary number format.

    Attributes:
        exponent_bits: width of the exponent field; 0 makes a symmetric integer format.
        mantissa_bits: stored fraction bits, without the hidden one.
        specials: what the top exponent code stands for.
        listing: the numbers, where they are only some of those that the widths describe.

    Raises:
        BadInput: if the widths are outside what FP64 arithmetic can carry.
    """

    exponent_bits: int
    mantissa_bits: int
    specials: Specials = Specials.IEEE
    listing: Listing | None = None

    def __post_init__(self) -> None:
        e, m = self.exponent_bits, self.mantissa_bits
        if e == 0:
            if self.specials is not Specials.FINITE or not 1 <= m <= 31:
                raise BadInput("format", f"e0m{m}", "an integer format is finite and has 1 to 31 magnitude bits")
        elif not (2 <= e <= 11 and 1 <= m <= 52):
            raise BadInput("format", f"e{e}m{m}", "give 2 to 11 exponent bits and 1 to 52 mantissa bits")
        elif e == 11 and self.specials is not Specials.IEEE:
            raise BadInput("format", f"e{e}m{m}{self.specials.value}", "beyond FP64's range; 11 exponent bits are IEEE only")

    @staticmethod
    def parse(text: str) -> Format:
        """Read a catalogue name (`bf16`), `e{x}m{y}`, `e{x}m{y}fn`, `e{x}m{y}finite` or `int{n}`."""
        if text in CATALOGUE:
            return CATALOGUE[text]
        if text in LISTINGS:
            return Format.listed(LISTINGS[text]())
        if match := re.fullmatch(r"e(\d+)m(\d+)(fn|finite)?", text):
            exponent, mantissa, suffix = match.groups()
            if int(exponent) > 0:
                return Format(int(exponent), int(mantissa), Specials(suffix or "ieee"))
        if match := re.fullmatch(r"int(\d+)", text):
            return Format(0, int(match[1]) - 1, Specials.FINITE)
        raise BadInput(
            "format",
            text,
            f"use one of {', '.join([*CATALOGUE, *LISTINGS])}, or e{{x}}m{{y}} (e5m2, e3m4fn, e2m1finite), or int{{n}}",
        )

    @staticmethod
    @lru_cache
    def listed(listing: Listing) -> Format:
        """The format of a list of numbers, with the widths of the narrowest binary format that holds them all."""
        mantissa = max(listing.significant_bits - 1, 1)
        lowest = listing.quantum + mantissa  # emin at most
        exponent = next(e for e in range(2, 12) if 2 - 2 ** (e - 1) <= lowest and listing.top < 2 ** (e - 1))
        return Format(exponent, mantissa, Specials.NAN_ONLY if listing.has_nan else Specials.FINITE, listing)

    @property
    def name(self) -> str:
        """The name that `parse` reads back to this format."""
        if self.listing is not None:
            return self.listing.name
        if self in _NAMES:
            return _NAMES[self]
        if self.is_integer:
            return f"int{self.mantissa_bits + 1}"
        suffix = "" if self.specials is Specials.IEEE else self.specials.value
        return f"e{self.exponent_bits}m{self.mantissa_bits}{suffix}"

    def __str__(self) -> str:
        return self.name

    describe = __str__  # in a configuration

    @property
    def is_integer(self) -> bool:
        return self.exponent_bits == 0

    @property
    def precision(self) -> int:
        """Significant bits `p`, the hidden one included; for a listed format, the most bits that any of its numbers needs."""
        return self.mantissa_bits + (0 if self.is_integer else 1)

    @property
    def bits(self) -> int:
        """Width of the encoding, sign included."""
        if self.listing is not None:
            return (len(self.listing.numbers) + self.listing.has_nan - 1).bit_length()
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def emin(self) -> int:
        """Exponent of the smallest normal number; for an integer format, the one that makes the quantum 1."""
        return self.mantissa_bits if self.is_integer else 2 - 2 ** (self.exponent_bits - 1)

    @cached_property
    def emax(self) -> int:
        """Exponent of the largest finite number."""
        if self.is_integer:
            return self.mantissa_bits - 1
        top = 2 ** (self.exponent_bits - 1)
        return top - 1 if self.specials is Specials.IEEE else top

    @cached_property
    def max(self) -> float:
        """The largest finite number."""
        if self.listing is not None:
            return self.listing.largest
        if self.is_integer:
            return float(2**self.mantissa_bits - 1)
        lost = 2 if self.specials is Specials.NAN_ONLY else 1
        return math.ldexp(2 ** (self.mantissa_bits + 1) - lost, self.emax - self.mantissa_bits)

    @cached_property
    def min_normal(self) -> float:
        return math.ldexp(1.0, self.emin)

    @cached_property
    def min_subnormal(self) -> float:
        """The smallest positive number, which is the spacing below `min_normal`."""
        return math.ldexp(1.0, self.emin - self.mantissa_bits)

    @cached_property
    def u(self) -> float:
        """Unit roundoff `2^-p`: the largest relative error of rounding to nearest a number in the normal range.

        For a listed format, half its spacing at 1.
        """
        return self.listing.u if self.listing is not None else math.ldexp(1.0, -self.precision)

    @property
    def has_infinity(self) -> bool:
        return self.specials is Specials.IEEE

    @property
    def has_nan(self) -> bool:
        return self.specials is not Specials.FINITE

    @property
    def dtype(self) -> torch.dtype | None:
        """The torch dtype with exactly this set of numbers, where there is one (TF32 has none)."""
        return getattr(torch, _DTYPES[self]) if self in _DTYPES else None

    def covers(self, other: Format) -> bool:
        """Whether every finite number of `other` is one of this format, so that rounding it changes nothing."""
        if self.listing is not None:
            return other.bits <= 16 and bool(torch.isin(other.values(), self.values()).all())
        return self.precision >= other.precision and self.min_subnormal <= other.min_subnormal and self.max >= other.max

    def ulp(self, x: Float[torch.Tensor, "*shape"]) -> Float[torch.Tensor, "*shape"]:
        """The spacing of the format at `|x|`, in FP64: `2^(max(floor(log2 |x|), emin) - m)` (Goldberg 1991, section 1.2)."""
        x = x.double()
        if self.listing is not None:
            return self.listing.spacing(x)
        _, exponent = torch.frexp(x)  # x = f * 2^exponent with 1/2 <= f < 1, also for subnormal x; never a logarithm
        exponent = (exponent - 1).clamp_(max=self.emax).clamp_(min=self.emin).masked_fill_(x == 0, self.emin)
        power = ((exponent.long() + 1023) << 52).view(torch.float64)  # 2^exponent, from its bits
        return power.mul_(2.0**-self.mantissa_bits)

    def values(self) -> Float[torch.Tensor, " count"]:
        """All finite numbers of a format of 16 bits or fewer, ascending, zero once, in FP64.

        Raises:
            BadInput: for a wider format.
        """
        if self.bits > 16:
            raise BadInput("format", self.name, "a table of values exists for formats of 16 bits or fewer")
        return _values(self)

    def __repr__(self) -> str:
        return f"Format({self.name})"


@lru_cache(maxsize=32)
def _values(fmt: Format) -> torch.Tensor:
    if fmt.listing is not None:
        return torch.tensor(fmt.listing.numbers, dtype=torch.float64)
    m = fmt.mantissa_bits
    magnitudes = {math.ldexp(k, fmt.emin - m) for k in range(2**m)}
    if not fmt.is_integer:
        for exponent in range(fmt.emin, fmt.emax + 1):
            magnitudes.update(math.ldexp(2**m + k, exponent - m) for k in range(2**m))
    kept = sorted(value for value in magnitudes if value <= fmt.max)
    return torch.tensor([-value for value in reversed(kept) if value] + kept, dtype=torch.float64)


FP64 = Format(11, 52)
FP32 = Format(8, 23)
TF32 = Format(8, 10)
BF16 = Format(8, 7)
FP16 = Format(5, 10)
E4M3FN = Format(4, 3, Specials.NAN_ONLY)
E5M2 = Format(5, 2)
INT8 = Format(0, 7, Specials.FINITE)
INT4 = Format(0, 3, Specials.FINITE)
# Elements of microscaled formats (OCP MX v1.0, section 5.3).
E3M2 = Format(3, 2, Specials.FINITE)
E2M3 = Format(2, 3, Specials.FINITE)
E2M1 = Format(2, 1, Specials.FINITE)

CATALOGUE = {
    "fp64": FP64,
    "fp32": FP32,
    "tf32": TF32,
    "bf16": BF16,
    "fp16": FP16,
    "e4m3fn": E4M3FN,
    "e5m2": E5M2,
    "int8": INT8,
    "int4": INT4,
}
_NAMES = {fmt: name for name, fmt in CATALOGUE.items()}
_DTYPES = {
    FP64: "float64",
    FP32: "float32",
    BF16: "bfloat16",
    FP16: "float16",
    E4M3FN: "float8_e4m3fn",
    E5M2: "float8_e5m2",
}


@cache
def format_of(dtype: torch.dtype) -> Format:
    """The format that a torch floating dtype stands for.

    Raises:
        BadInput: for a dtype that is not a floating-point format of the catalogue.
    """
    for fmt in _DTYPES:
        if fmt.dtype is dtype:
            return fmt
    raise BadInput("dtype", str(dtype), f"use one of {', '.join(f'torch.{name}' for name in _DTYPES.values())}")
