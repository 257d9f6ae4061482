"""Casts: rounding a tensor to a `Format`, bit-exactly, while it stays in its FP32 or FP64 carrier.

A cast rounds by `numdev.arithmetic.bits.round_scaled`, or by a faster way that gives the same bits, and then handles overflow and
subnormal results.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import cached_property

from jaxtyping import Float

from numdev.arithmetic.bits import Rounding, layout_of, magic_is_exact, round_listed, round_magic, round_scaled
from numdev.arithmetic.formats import FP32, Format, format_of
from numdev.arithmetic.noise import Noise
from numdev.errors import BadInput
from numdev.lazy import torch


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
