"""Casts: rounding a tensor to a `Format`, bit-exactly, while it stays in its FP32 or FP64 carrier.

The specification is `round_scaled`. With `E = max(floor(log2 |x|), emin)` the neighbours of `x` are multiples of the
quantum `2^(E - m)`; `t = x / 2^(E - m)` is exact in the carrier because only the exponent changes, and rounding `t` to an
integer by the mode is rounding `x` to the format (IEEE 754-2019, section 4.3). Everything faster is tested against it.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch
from jaxtyping import Float, Int
from torch import Tensor

from numdev.errors import BadInput
from numdev.formats import FP32, FP64, Format


class Rounding(Enum):
    """The seven rounding modes."""

    NEAREST_EVEN = "nearest_even"
    NEAREST_AWAY = "nearest_away"
    TOWARD_ZERO = "toward_zero"
    UP = "up"
    DOWN = "down"
    ODD = "odd"  # inexact results go to the neighbour with an odd last bit (von Neumann; Boldo & Melquiond 2008)
    STOCHASTIC = "stochastic"  # up with the probability of the distance from below


class Overflow(Enum):
    """What a result beyond the largest number of the format becomes."""

    INFINITY = "infinity"  # as IEEE 754 section 7.4: infinity, or the largest number where the mode points inward
    SATURATE = "saturate"  # the largest number of the same sign, for an infinity too


class Subnormals(Enum):
    """Whether results below the smallest normal number are kept."""

    KEPT = "subnormals"
    FLUSHED = "flush"  # a result smaller than `min_normal` becomes a zero of the same sign


@dataclass(frozen=True)
class _Layout:
    """The bits of a carrier."""

    integer: torch.dtype
    mantissa_bits: int
    exponent_mask: int
    bias: int


_LAYOUTS = {
    torch.float32: _Layout(torch.int32, 23, 0xFF, 127),
    torch.float64: _Layout(torch.int64, 52, 0x7FF, 1023),
}
_CARRIER_FORMATS = {torch.float32: FP32, torch.float64: FP64}


@dataclass(frozen=True)
class Cast:
    """Rounding to a format: `cast(x)` returns the nearest (by the mode) member of `to` for every element.

    NaN stays NaN, also where the format has none: the carrier can say so. An overflowing result of a format without
    infinity is NaN under `Overflow.INFINITY` (OCP E4M3, torch's own cast); a format without either saturates always.

    Attributes:
        to: the format.
        rounding: the mode; stochastic rounding takes its bits from a hash of `seed`, position and value, so it repeats.
        overflow: what is beyond `to.max`; by default infinity where the format has one or a NaN, else saturation.
        subnormals: kept or flushed to zero after rounding.
        seed: of stochastic rounding.
    """

    to: Format
    rounding: Rounding = Rounding.NEAREST_EVEN
    overflow: Overflow | None = None
    subnormals: Subnormals = Subnormals.KEPT
    seed: int = 0

    def __post_init__(self) -> None:
        default = Overflow.INFINITY if self.to.has_nan else Overflow.SATURATE
        if self.overflow is None:
            object.__setattr__(self, "overflow", default)
        elif self.overflow is Overflow.INFINITY and not self.to.has_nan:
            raise BadInput("overflow", "infinity", f"{self.to.name} has neither infinity nor NaN; use saturate")
        if self.to.is_integer and self.subnormals is Subnormals.FLUSHED:
            raise BadInput("subnormals", "flush", f"{self.to.name} has no normal numbers, so that nothing would be left")
        if self.seed and self.rounding is not Rounding.STOCHASTIC:
            raise BadInput("seed", self.seed, "only stochastic rounding takes a seed")

    @staticmethod
    def parse(text: str) -> Cast:
        """Read `format[:rounding][:overflow][:flush][:seed=n]`, for example `e4m3fn:toward_zero:saturate`."""
        name, *options = text.split(":")
        chosen: dict[str, object] = {}
        for option in options:
            for field, kind in (("rounding", Rounding), ("overflow", Overflow), ("subnormals", Subnormals)):
                if option in {member.value for member in kind}:
                    chosen[field] = kind(option)
                    break
            else:
                if not (option.startswith("seed=") and option[5:].isdigit()):
                    known = [member.value for kind in (Rounding, Overflow, Subnormals) for member in kind]
                    raise BadInput("cast", text, f"{option!r} is none of {', '.join(known)}, seed=n")
                chosen["seed"] = int(option[5:])
        return Cast(Format.parse(name), **chosen)  # type: ignore[arg-type]

    def __str__(self) -> str:
        parts = [self.to.name]
        if self.rounding is not Rounding.NEAREST_EVEN:
            parts.append(self.rounding.value)
        if self.overflow is not Cast(self.to).overflow:
            parts.append(self.overflow.value)  # type: ignore[union-attr]
        if self.subnormals is not Subnormals.KEPT:
            parts.append(self.subnormals.value)
        if self.seed:
            parts.append(f"seed={self.seed}")
        return ":".join(parts)

    def __repr__(self) -> str:
        return f"Cast({self})"

    @property
    def largest(self) -> float:
        """The largest finite result."""
        return self.to.max

    def __call__(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """`x` rounded, in a tensor of the same dtype. Shapes are free.

        Raises:
            BadInput: if the dtype of `x` is neither FP32 nor FP64, or cannot hold the format's numbers.
        """
        return x if self.is_identity_on(x.dtype) else self.apply_(x.clone())

    def is_identity_on(self, carrier: torch.dtype) -> bool:
        """Whether every number of the carrier is already one of the format."""
        return self._way(carrier) is carrier

    def apply_(self, x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        """Round `x` in place and return it: what the attention implementations use."""
        way = self._way(x.dtype)
        if way is x.dtype:
            return x
        if way is None:
            self._round_(x)
        else:
            x.copy_(x.to(way))
        if self.subnormals is Subnormals.FLUSHED:
            x.mul_((x.abs() >= self.to.min_normal).to(x.dtype))
        return x

    def _way(self, carrier: torch.dtype) -> torch.dtype | None:
        """The dtype whose own conversion from the carrier is this cast: the carrier itself where nothing changes.

        None where there is none, and arithmetic must do it. Decided once per carrier: a cast is called very often.
        """
        if carrier not in self._ways:
            self._ways[carrier] = self._decide(carrier)
        return self._ways[carrier]

    @cached_property
    def _ways(self) -> dict[torch.dtype, torch.dtype | None]:
        return {}

    def _decide(self, carrier: torch.dtype) -> torch.dtype | None:
        own = _CARRIER_FORMATS.get(carrier)
        if own is None:
            raise BadInput("dtype", str(carrier), "a cast works on FP32 and FP64 tensors; use x.float() or x.double()")
        exact = self.to.covers(own)
        if not exact and not own.covers(self.to):
            raise BadInput("dtype", str(carrier), f"it cannot hold every number of {self.to.name}; use x.double()")
        if self.overflow is not Overflow.INFINITY:
            return None
        if exact:
            return carrier if self.subnormals is Subnormals.KEPT else None
        # Only from FP32, or to it: torch converts FP64 to narrower dtypes through FP32 and so rounds twice. Its FP8
        # conversions are slower on a CPU than the arithmetic here, and treat overflow differently between versions.
        direct = self.to == FP32 or (carrier is torch.float32 and self.to.dtype in (torch.bfloat16, torch.float16))
        return self.to.dtype if direct and self.rounding is Rounding.NEAREST_EVEN else None

    def _round_(self, x: Tensor) -> None:
        own = _CARRIER_FORMATS[x.dtype]
        flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)
        chunk = _CHUNK if x.is_cpu else max(flat.numel(), 1)
        for start in range(0, flat.numel(), chunk):
            part = flat[start : start + chunk]
            if self.rounding is Rounding.NEAREST_EVEN and self._magic_is_exact(own):
                round_magic(part, self.to, out=part)
            else:
                bits = _uniform_bits(part, self.seed, start) if self.rounding is Rounding.STOCHASTIC else None
                part.copy_(round_scaled(part, self.to, self.rounding, bits))
            self._limit_(part)
        if not x.is_contiguous():
            x.copy_(flat.view(x.shape))

    def _magic_is_exact(self, own: Format) -> bool:
        # The largest sum is 3 * 2^(E + carrier bits - m), which must stay finite for every E that does not overflow.
        fits = self.to.emax + 2 + own.mantissa_bits - self.to.mantissa_bits <= own.emax
        return fits and self.to.mantissa_bits + 2 <= own.mantissa_bits

    @cached_property
    def _beyond(self) -> tuple[float, float]:
        """What a positive and a negative result beyond the largest number become."""
        top, beyond = self.to.max, float("inf") if self.to.has_infinity else float("nan")
        if self.overflow is Overflow.SATURATE or self.rounding in (Rounding.TOWARD_ZERO, Rounding.ODD):
            return top, -top
        if self.rounding is Rounding.UP:
            return beyond, -top
        if self.rounding is Rounding.DOWN:
            return top, -beyond
        return beyond, -beyond

    def _limit_(self, x: Tensor) -> None:
        """Treat results beyond the largest number. Infinite inputs overflow exactly: only saturation changes them."""
        if x.is_cpu:  # on a GPU the answer would cost a synchronisation
            low, high = torch.aminmax(x)
            if bool((low >= -self.to.max) & (high <= self.to.max)):
                return
        above, below = self._beyond
        infinite = x.isinf() if self.overflow is Overflow.INFINITY else torch.zeros_like(x, dtype=torch.bool)
        kept = x if self.to.has_infinity else torch.full_like(x, float("nan"))
        over = torch.where(x > self.to.max, above, torch.where(x < -self.to.max, below, x))
        x.copy_(torch.where(infinite, kept, over))


_CHUNK = 1 << 18  # elements: one FP32 chunk and its scratch stay in a core's L2 cache


def round_magic(x: Float[Tensor, "*shape"], to: Format, out: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Nearest-even by the adder: `(x + C) - C` with `C = 1.5 * 2^(E + p_carrier - 1 - m)`.

    The sum has the quantum `2^(E - m)`, so the addition itself rounds to it; the factor 1.5 keeps the sum in one binade
    for both signs. `E` is `x`'s exponent, at least `emin`. Exact while the sum is finite; see `Cast._magic_is_exact`.
    """
    layout = _LAYOUTS[x.dtype]
    magic = torch.empty_like(x)
    mask = layout.exponent_mask << layout.mantissa_bits
    torch.bitwise_and(x.view(layout.integer), mask, out=magic.view(layout.integer))
    largest = 2.0 ** (to.emax + 1)  # anything above overflows whatever its own quantum
    magic.clamp_(to.min_normal, largest).mul_(1.5 * 2.0 ** (layout.mantissa_bits - to.mantissa_bits))
    rounded = (x + magic).sub_(magic)
    return torch.copysign(rounded, x, out=out)  # a negative number that rounds to zero keeps its sign


def round_scaled(
    x: Float[Tensor, "*shape"], to: Format, rounding: Rounding, bits: Float[Tensor, "*shape"] | None = None
) -> Float[Tensor, "*shape"]:
    """`x` rounded to multiples of its quantum in `to` by any mode, overflow and NaN left as they come.

    `bits` are numbers in [0, 1) of the same shape for stochastic rounding.
    """
    layout = _LAYOUTS[x.dtype]
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


def _power_of_two(exponent: Int[Tensor, "*shape"], layout: _Layout, carrier: torch.dtype) -> Tensor:
    return ((exponent + layout.bias) << layout.mantissa_bits).view(carrier)


def _round_to_integer(t: Tensor, rounding: Rounding, bits: Tensor | None) -> Tensor:
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


def _uniform_bits(x: Float[Tensor, " count"], seed: int, start: int) -> Float[Tensor, " count"]:
    """Numbers in [0, 1) from a hash of seed, position and value (the finaliser of SplitMix64, Steele et al. 2014).

    A function of those three alone, so the same on every device; position and value both enter so that equal values at
    different places, and different steps at the same place, round independently.
    """
    position = torch.arange(start, start + x.numel(), device=x.device, dtype=torch.int64)
    value = x.view(_LAYOUTS[x.dtype].integer).to(torch.int64)
    z = position * _signed(0x9E3779B97F4A7C15) + value * _signed(0xD1342543DE82EF95) + _signed(seed * 0x2545F4914F6CDD1D)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    width = _LAYOUTS[x.dtype].mantissa_bits + 1  # as many bits as the carrier can hold exactly below 1
    return ((z >> (64 - width)) & ((1 << width) - 1)).to(x.dtype) * 2.0**-width


def _signed(value: int) -> int:
    """The two's complement reading of the low 64 bits, which is what int64 arithmetic wraps to."""
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value
