"""Casts: rounding a tensor to a `Format`, bit-exactly, while it stays in its FP32 or FP64 carrier.

The specification of every cast is `round_scaled`. With `E = max(floor(log2 |x|), emin)` the neighbours of `x` in a format are
multiples of the quantum `2^(E - m)`; `t = x / 2^(E - m)` is exact in the carrier because only the exponent changes, and rounding
`t` to an integer by the mode is rounding `x` to the format (IEEE 754-2019, section 4.3). `round_magic` is its fast twin. A cast
takes either, or a conversion of torch with the same bits, and then handles overflow and subnormal results.

Random numbers of stochastic rounding are a function of the seed, the rounding event and the place, and of nothing else. An event
is the rounding of one tensor in one step of the algorithm, for one tile of keys of one split. Different events draw independent
numbers at the same place, so that equal sums are rounded independently each time. A place is the position of an element in the
whole problem, so that processing fewer rows at a time changes no bit.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cache, cached_property

from jaxtyping import Float, Int

from numdev.arithmetic.formats import FP32, FP64, Format, format_of
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


_MULTIPLIERS = ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB))  # SplitMix64's finaliser (Steele et al. 2014)
_GOLDEN = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


@dataclass
class Noise:
    """Random numbers for one run over a block of rows."""

    rows: int = 0  # the first row of the block in the whole problem
    total_rows: int = 1  # rows of the whole problem, which distinguish places of different heads
    event: int = 0  # number of the next draw; `at` starts a group of events, and each draw takes the next number of the group

    def at(self, split: int, tile: int, rows: int) -> None:
        """Begin the events of one tile of one split, for a block of rows that starts at `rows`; -1 is what follows all tiles."""
        self.rows = rows
        self.event = ((split + 2) << 40) + ((tile + 1) << 16)  # above those of a run that never calls this

    def uniform(self, x: Float[torch.Tensor, "*shape"], seed: int) -> Float[torch.Tensor, "*shape"]:
        """One multiple of `2^-p` in [0, 1) for each element of `x`, where p is the precision of its dtype; uses up one event.

        The last two dimensions of `x` are rows of the block and columns; the leading ones are heads and batch entries.
        """
        key = _mix_number(_mix_number(seed * _GOLDEN + 1) ^ self.event * 0xD1342543DE82EF95)
        self.event += 1
        columns = torch.arange(x.shape[-1] if x.ndim else 1, device=x.device)
        rows = torch.arange(x.shape[-2] if x.ndim > 1 else 1, device=x.device) + self.rows
        heads = torch.arange(x.numel() // max(1, rows.numel() * columns.numel()), device=x.device)
        place = (heads[:, None] * max(self.total_rows, self.rows + rows.numel()) + rows)[..., None] * (1 << 24) + columns
        width = 24 if x.dtype is torch.float32 else 53
        hashed = _mix(place * _signed(_GOLDEN) + _signed(key))
        return (((hashed >> (64 - width)) & ((1 << width) - 1)).to(x.dtype) * 2.0**-width).view(x.shape)


def _mix(z: torch.Tensor) -> torch.Tensor:
    """The finaliser, on int64 tensors, whose arithmetic wraps."""
    for shift, factor in _MULTIPLIERS:
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * _signed(factor)
    return z ^ ((z >> 31) & ((1 << 33) - 1))


def _mix_number(z: int) -> int:
    z &= _WORD
    for shift, factor in _MULTIPLIERS:
        z = ((z ^ (z >> shift)) * factor) & _WORD
    return z ^ (z >> 31)


def _signed(value: int) -> int:
    """The two's complement reading of the low 64 bits."""
    value &= _WORD
    return value - (1 << 64) if value >= 1 << 63 else value


class Overflow(Enum):
    """Treatments of a result beyond the largest number of the format."""

    INFINITY = "infinity"  # as IEEE 754 section 7.4: infinity, or the largest number where the mode points inward
    SATURATE = "saturate"  # the largest number of the same sign, for an infinity too; but posits have NaR for that


class Subnormals(Enum):
    """Whether results below the smallest normal number are kept."""

    KEPT = "subnormals"
    FLUSHED = "flush"  # a result smaller than `min_normal` becomes a zero of the same sign


@dataclass(frozen=True)
class Cast:
    """Rounding to a format: `cast(x)` returns the nearest (by the mode) member of `to` for every element.

    NaN stays NaN even if the format has none, since the carrier can represent it. A result that overflows a format without
    infinity becomes NaN under `Overflow.INFINITY` (OCP E4M3, torch's own cast); a format with neither always saturates.

    Attributes:
        to: the format.
        rounding: the mode; stochastic rounding draws by `seed`, rounding event and place, as in `noise`, so it repeats.
        overflow: what results beyond `to.max` become; by default infinity if the format has infinity or NaN, else `to.max`.
        subnormals: kept or flushed to zero after rounding.
        seed: draws the random numbers of stochastic rounding.
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
            raise BadInput("overflow", "infinity", f"{self.to.name} has no infinity, nor NaN for what is finite; use saturate")
        if (self.to.is_integer or self.to.listing is not None) and self.subnormals is Subnormals.FLUSHED:
            raise BadInput("subnormals", "flush", f"{self.to.name} has no normal numbers: all would become 0; leave it out")
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
                    if field in chosen:
                        raise BadInput("cast", text, f"it names two ways of {field}; leave one")
                    chosen[field] = kind(option)
                    break
            else:
                if not (option.startswith("seed=") and option[5:].isdigit()):
                    known = [member.value for kind in (Rounding, Overflow, Subnormals) for member in kind]
                    raise BadInput("cast", text, f"{option!r} is none of {', '.join(known)}, seed=n")
                chosen["seed"] = int(option[5:])
        if "seed" in chosen and chosen.get("rounding") is not Rounding.STOCHASTIC:
            raise BadInput("seed", chosen["seed"], "only stochastic rounding takes a seed")
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

    describe = __str__  # in a configuration

    def __repr__(self) -> str:
        return f"Cast({self})"

    @property
    def largest(self) -> float:
        """The largest finite result."""
        return self.to.max

    def __call__(self, x: Float[torch.Tensor, "*shape"], noise: Noise | None = None) -> Float[torch.Tensor, "*shape"]:
        """`x` rounded, in a tensor of the same dtype. Shapes are free. `noise` is as in `apply_`.

        Raises:
            BadInput: if the dtype of `x` is neither FP32 nor FP64, or cannot hold the format's numbers.
        """
        return x if self.is_identity_on(x.dtype) else self.apply_(x.clone(), noise)

    def is_identity_on(self, carrier: torch.dtype) -> bool:
        """Whether every number of the carrier is already one of the format."""
        return self._way(carrier) is carrier

    def apply_(self, x: Float[torch.Tensor, "*shape"], noise: Noise | None = None) -> Float[torch.Tensor, "*shape"]:
        """Round `x` in place and return it: the implementations of attention call this.

        Stochastic rounding takes the next event of `noise`; without `noise` it takes event 0 of a new run.
        """
        way = self._way(x.dtype)
        if way is x.dtype:
            return x
        if way is not None:
            x.copy_(x.to(way))
        elif self.rounding is Rounding.STOCHASTIC and x.numel():
            x.copy_(self._rounded(x, (noise or Noise()).uniform(x, self.seed)))
            self._limit_(x)
        else:
            self._round_(x)
        if self.subnormals is Subnormals.FLUSHED:
            x.mul_((x.abs() >= self.to.min_normal).to(x.dtype))
        return x

    @property
    def keeps_minus_infinity(self) -> bool:
        """Whether minus infinity stays minus infinity."""
        return self.to.has_infinity and self.overflow is Overflow.INFINITY

    def _way(self, carrier: torch.dtype) -> torch.dtype | None:
        """The dtype to which torch's conversion from the carrier equals this cast; the carrier itself if nothing changes.

        None if there is no such dtype, and the cast must be computed. Decided once per carrier: a cast is called very often.
        """
        if carrier not in self._ways:
            self._ways[carrier] = self._decide(carrier)
        return self._ways[carrier]

    @cached_property
    def _ways(self) -> dict[torch.dtype, torch.dtype | None]:
        return {}

    def _decide(self, carrier: torch.dtype) -> torch.dtype | None:
        own = layout_of(carrier).format
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

    def _round_(self, x: torch.Tensor) -> None:
        own = format_of(x.dtype)
        flat = x.view(-1) if x.is_contiguous() else x.reshape(-1)
        chunk = _CHUNK if x.is_cpu else max(flat.numel(), 1)
        for start in range(0, flat.numel(), chunk):
            part = flat[start : start + chunk]
            if self.rounding is Rounding.NEAREST_EVEN and self.to.listing is None and magic_is_exact(self.to, own):
                round_magic(part, self.to, out=part)
            else:
                part.copy_(self._rounded(part))
            self._limit_(part)
        if not x.is_contiguous():
            x.copy_(flat.view(x.shape))

    def _rounded(self, x: torch.Tensor, bits: torch.Tensor | None = None) -> torch.Tensor:
        if self.to.listing is None:
            return round_scaled(x, self.to, self.rounding, bits)
        return round_listed(x, self.to.listing, self.rounding, bits)

    @cached_property
    def _beyond(self) -> tuple[float, float]:
        """The results above the largest number and below its negative."""
        top, beyond = self.to.max, float("inf") if self.to.has_infinity else float("nan")
        if self.overflow is Overflow.SATURATE or self.rounding in (Rounding.TOWARD_ZERO, Rounding.ODD):
            return top, -top
        if self.rounding is Rounding.UP:
            return beyond, -top
        if self.rounding is Rounding.DOWN:
            return top, -beyond
        return beyond, -beyond

    def _limit_(self, x: torch.Tensor) -> None:
        """Handle results beyond the largest number. An infinite input is exact, so that only saturation changes it."""
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
