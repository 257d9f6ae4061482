"""FP32 and FP64 numbers as bits: their layout, their neighbours, and rounding to a multiple of a quantum.

The specification of every cast is `round_scaled`. With `E = max(floor(log2 |x|), emin)` the neighbours of `x` in a format are
multiples of the quantum `2^(E - m)`; `t = x / 2^(E - m)` is exact in the carrier because only the exponent changes, and rounding
`t` to an integer by the mode is rounding `x` to the format (IEEE 754-2019, section 4.3). `round_magic` is its fast twin.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache

from jaxtyping import Float, Int

from numdev.arithmetic.formats import FP32, FP64, Format
from numdev.arithmetic.listing import Listing
from numdev.errors import BadInput
from numdev.lazy import torch


class Rounding(Enum):
    """The seven rounding modes."""

    NEAREST_EVEN = "nearest_even"
    NEAREST_AWAY = "nearest_away"
    TOWARD_ZERO = "toward_zero"
    UP = "up"
    DOWN = "down"
    ODD = "odd"  # inexact results go to the neighbour with an odd last bit (von Neumann; Boldo & Melquiond 2008)
    STOCHASTIC = "stochastic"  # up with the probability of the distance from below

    @property
    def is_nearest(self) -> bool:
        return self in (Rounding.NEAREST_EVEN, Rounding.NEAREST_AWAY)


@dataclass(frozen=True)
class Layout:
    """The bits of a carrier, and the format that it is."""

    integer: torch.dtype
    mantissa_bits: int
    exponent_mask: int
    bias: int
    format: Format


@cache
def layout_of(carrier: torch.dtype) -> Layout:
    """The bits of FP32 or FP64; BadInput for another dtype."""
    if carrier is torch.float32:
        return Layout(torch.int32, 23, 0xFF, 127, FP32)
    if carrier is torch.float64:
        return Layout(torch.int64, 52, 0x7FF, 1023, FP64)
    raise BadInput("dtype", str(carrier), "a cast works on FP32 and FP64 tensors; use x.float() or x.double()")


def round_magic(
    x: Float[torch.Tensor, "*shape"], to: Format, out: Float[torch.Tensor, "*shape"]
) -> Float[torch.Tensor, "*shape"]:
    """Nearest-even by the adder: `(x + C) - C` with `C = 1.5 * 2^(E + p_carrier - 1 - m)`.

    The sum has the quantum `2^(E - m)`, so the addition itself rounds to it; the factor 1.5 keeps the sum in one binade
    for both signs. `E` is `x`'s exponent, at least `emin`. Exact while the sum is finite; see `magic_is_exact`.
    """
    layout = layout_of(x.dtype)
    magic = torch.empty_like(x)
    mask = layout.exponent_mask << layout.mantissa_bits
    torch.bitwise_and(x.view(layout.integer), mask, out=magic.view(layout.integer))
    largest = 2.0 ** (to.emax + 1)  # anything above overflows, whatever its quantum
    magic.clamp_(to.min_normal, largest).mul_(1.5 * 2.0 ** (layout.mantissa_bits - to.mantissa_bits))
    rounded = (x + magic).sub_(magic)
    return torch.copysign(rounded, x, out=out)  # a negative number that rounds to zero keeps its sign


def magic_is_exact(to: Format, carrier: Format) -> bool:
    """Whether `round_magic` is `round_scaled` to nearest even.

    The largest sum is `3 * 2^(E + carrier bits - m)`, which must stay finite for every E that does not overflow.
    """
    fits = to.emax + 2 + carrier.mantissa_bits - to.mantissa_bits <= carrier.emax
    return fits and to.mantissa_bits + 2 <= carrier.mantissa_bits


def round_scaled(
    x: Float[torch.Tensor, "*shape"], to: Format, rounding: Rounding, bits: Float[torch.Tensor, "*shape"] | None = None
) -> Float[torch.Tensor, "*shape"]:
    """`x` rounded to multiples of its quantum in `to` by any mode; overflow is not handled, and NaN stays NaN.

    `bits` are numbers in [0, 1) of the same shape for stochastic rounding.
    """
    layout = layout_of(x.dtype)
    raw = (x.view(layout.integer) >> layout.mantissa_bits) & layout.exponent_mask
    exponent = (raw - layout.bias).clamp(min=to.emin)
    shift = to.mantissa_bits - exponent
    # One factor 2^shift can itself overflow (2^133 for bf16's subnormals); two halves cannot, and each product is exact.
    half = torch.div(shift, 2, rounding_mode="floor")
    down, rest = _power_of_two(half, layout, x.dtype), _power_of_two(shift - half, layout, x.dtype)
    up, up_rest = _power_of_two(-half, layout, x.dtype), _power_of_two(half - shift, layout, x.dtype)
    rounded = _round_to_integer(x * down * rest, rounding, bits)
    finite = x.isfinite()
    return torch.where(finite, (rounded * up * up_rest).copysign(x), x)


def round_listed(
    x: Float[torch.Tensor, "*shape"], to: Listing, rounding: Rounding, bits: Float[torch.Tensor, "*shape"] | None = None
) -> Float[torch.Tensor, "*shape"]:
    """`x` rounded to a number of a list by any mode; NaN stays NaN, and an infinity becomes NaN where the list has NaR.

    A value beyond the list becomes the last number; or, if the list has NaN, the number that would follow, which the cast then
    handles as overflow.
    """
    wide = x.double()
    low, high = to.below(wide)
    if rounding.is_nearest:
        place = to.nearest(wide, low, high, away=rounding is Rounding.NEAREST_AWAY)
    elif rounding is Rounding.TOWARD_ZERO:
        place = torch.where(wide > 0, low, high)
    elif rounding is Rounding.UP:
        place = high
    elif rounding is Rounding.DOWN:
        place = low
    elif rounding is Rounding.ODD:
        place = torch.where(to.is_odd(low), low, high)
    else:
        assert bits is not None, "stochastic rounding needs random bits"
        share = (wide - to.number(low)) / (to.number(high) - to.number(low))
        place = torch.where(bits < share, high, low)  # where low equals high, share is NaN and low is taken
    if not to.has_nan:
        place = place.clamp(1, len(to.numbers))
    lost = ~x.isfinite() if to.has_nar else x.isnan()
    return torch.where(lost, torch.full_like(x, float("nan")), to.number(place).to(x.dtype))


def _power_of_two(exponent: Int[torch.Tensor, "*shape"], layout: Layout, carrier: torch.dtype) -> torch.Tensor:
    return ((exponent + layout.bias) << layout.mantissa_bits).view(carrier)


def _round_to_integer(t: torch.Tensor, rounding: Rounding, bits: torch.Tensor | None) -> torch.Tensor:
    """Round to an integer by the mode; `t` is below 2^(m+1), so every integer near it is exact."""
    if rounding is Rounding.NEAREST_EVEN:
        return t.round()
    if rounding is Rounding.UP:
        return t.ceil()
    if rounding is Rounding.DOWN:
        return t.floor()
    toward_zero = t.trunc()
    if rounding is Rounding.TOWARD_ZERO:
        return toward_zero
    away = toward_zero + torch.where(t == toward_zero, 0.0, 1.0).to(t.dtype).copysign(t)
    distance = (t - toward_zero).abs()  # exact: both are multiples of the same quantum
    if rounding is Rounding.NEAREST_AWAY:
        return torch.where(distance >= 0.5, away, toward_zero)
    if rounding is Rounding.ODD:
        return torch.where(torch.remainder(toward_zero, 2) == 0, away, toward_zero)
    assert bits is not None, "stochastic rounding needs random bits"
    return torch.where(bits < distance, away, toward_zero)


def toward(x: Float[torch.Tensor, "*shape"], error: Float[torch.Tensor, "*#shape"]) -> Float[torch.Tensor, "*shape"]:
    """The neighbour of each finite `x` in the carrier on the side to which `error`, not 0, points."""
    integer = layout_of(x.dtype).integer
    away_from_zero = (x > 0) == (error > 0)
    moved = (x.view(integer) + torch.where(away_from_zero, 1, -1).to(integer)).view(x.dtype)
    return torch.where(x == 0, torch.full_like(x, layout_of(x.dtype).format.min_subnormal).copysign(error.to(x.dtype)), moved)


def is_odd(x: Float[torch.Tensor, "*shape"]) -> torch.Tensor:
    """Whether the last bit of the carrier's mantissa is set."""
    return (x.view(layout_of(x.dtype).integer) & 1).bool()
