"""What every precision policy is: one value object per arithmetic step, its carrier, and its text."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import cached_property, lru_cache
from typing import Any, TypeVar, get_args, get_type_hints

import torch
from torch import Tensor

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, TF32, Format
from numdev.arithmetic.noise import Noise
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.attention.policystep import Step, as_step, casts_of, reseeded
from numdev.errors import BadInput, NotHonoured

FORMATS = (FP32, TF32, BF16, FP16, E5M2, E4M3FN, FP64)
"""The formats whose presets a policy is told by."""


_FP32 = Cast(FP32)  # made once: every step of every policy is compared with it
_FP64 = Cast(FP64)

Kind = TypeVar("Kind", bound="Policy")


@dataclass(frozen=True)
class Policy:
    """The fields of a policy are its steps, in the order of execution, the last of them `output`.

    The result of every elementary operation of a step is rounded once, by the step's cast; max and comparison never round.
    """

    def __post_init__(self) -> None:
        for cast in self.casts():
            if cast.to.precision >= 52 and cast != _FP64:
                mend = "FP64 arithmetic can only round it as fp64 does, to nearest even; give fp64, or at most 50 mantissa bits"
                raise BadInput("precision", str(cast), mend)

    def with_step(self: Kind, **steps: Step | Format | str) -> Kind:  # beartype knows no Self in a method
        """The policy with some steps changed: `policy.with_step(row_sum="bf16@64", output=FP32)`.

        Raises:
            BadInput: naming the step, for one that the policy does not have, and for a value that it cannot hold.
        """
        allowed = _allowed(type(self))  # type: ignore[arg-type]  # mypy takes the hash of instances for that of the class
        changed: dict[str, Any] = {}
        for name, value in steps.items():
            if name not in allowed:
                raise BadInput(f"precision.{name}", value, f"there is no such step; give one of {', '.join(allowed)}")
            changed[name] = as_step(name, allowed[name], value)
        return replace(self, **changed)

    def casts(self) -> Iterator[Cast]:
        """Every cast of the policy, in the order of execution."""
        for field in fields(self):
            yield from casts_of(getattr(self, field.name))

    @cached_property
    def carrier(self) -> torch.dtype:
        """The dtype that the arithmetic runs in: FP32 if every step is FP32's own or has at most 11 bits, else FP64.

        In either, `numdev.arithmetic.elementary` rounds the result of every operation once; with formats of `p` bits and a
        carrier of at least `2p + 2` the carrier's own operation, then the cast, mostly does so by itself (Figueroa 1995).
        """
        narrow = all(c == _FP32 or (c.to.precision <= 11 and FP32.covers(c.to)) for c in self.casts())
        return torch.float32 if narrow else torch.float64

    @property
    def is_random(self) -> bool:
        """Whether a step rounds stochastically."""
        return any(cast.rounding is Rounding.STOCHASTIC for cast in self.casts())

    def replicate(self: Kind, seed: int) -> Kind:
        """The policy of one replicate: stochastic rounding draws anew in each."""
        if not self.is_random:
            return self
        steps: dict[str, Any] = {field.name: reseeded(getattr(self, field.name), seed) for field in fields(self)}
        return replace(self, **steps)

    def ineffective(self, lengths: Mapping[str, int], group: str = "precision") -> list[NotHonoured]:
        """Sums that end before the products after which they would be rounded; `lengths` are the terms of each, by its step."""
        dots = {name: getattr(self, name) for name in lengths}
        return [
            NotHonoured(
                f"{group}.{name}",
                str(dot),
                f"a sum of {lengths[name]} terms is never rounded after {dot.every}; give {dot.accumulate}, or at most "
                f"{lengths[name]} behind @",
            )
            for name, dot in dots.items()
            if dot.every is not None and dot.every > lengths[name]
        ]

    @property
    def format(self) -> Format:
        """The format of the output, in whose ulp and unit roundoff deviations are counted."""
        output: Cast = vars(self)["output"]
        return output.to

    @cached_property
    def name(self) -> str:
        """The preset that this policy is, as `parse` reads it; `custom` for any other."""
        return self.preset_names().get(self, "custom")

    @classmethod
    def preset_names(cls) -> Mapping[Any, str]:
        """The presets and their names."""
        raise NotImplementedError

    def steps(self) -> dict[str, str]:
        """Every step and its format as text, as the command line takes them."""
        return dict(self._texts)

    @cached_property
    def _texts(self) -> dict[str, str]:
        return {field.name: str(getattr(self, field.name)) for field in fields(self)}

    def describe(self) -> dict[str, Any]:
        """What stands for it in a configuration: its steps as text, and its name."""
        return self.steps() | {"name": self.name}

    def __repr__(self) -> str:
        return f"{type(self).__name__}(" + ", ".join(f"{name}={text}" for name, text in self.steps().items()) + ")"


def saturating(fmt: Format) -> Cast:
    """The cast to `fmt` whose results beyond the largest number are the largest number."""
    return Cast(fmt, overflow=Overflow.SATURATE)


def stored(fmt: Format) -> Cast:
    """The cast by which a kernel stores in `fmt`.

    Formats of 8 bits and fewer saturate, as the conversions of the hardware do (PTX ISA, `cvt.satfinite`).
    """
    return saturating(fmt) if fmt.bits <= 8 else Cast(fmt)


def inside(fmt: Format) -> Format:
    """The format in which kernels, and the softmax of torch, compute on tensors in `fmt`."""
    return FP64 if fmt == FP64 else FP32


def round_each(cast: Cast, carrier: torch.dtype, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The inputs rounded by a cast, in the carrier; each is a rounding event of its own."""
    noise = Noise()
    return tuple(cast(t.double(), noise).to(carrier) for t in tensors)  # FP64 to FP32 to the format would round twice


def by_name(name: str, whole: Mapping[str, Callable[[], Kind]], families: Mapping[str, Callable[[Format], Kind]]) -> Kind:
    """The policy called so: one of `whole`, or a format behind the name of a family and `_`; the family "" needs none.

    Raises:
        BadInput: for any other name.
    """
    if name in whole:
        return whole[name]()
    family, _, fmt = name.rpartition("_")
    try:
        return families[family](Format.parse(fmt))
    except (BadInput, KeyError):
        mend = f"use {', '.join(whole)}, or a format (bf16, fp16, fp32, e5m2, ...), alone or behind kernel_ or eager_"
        raise BadInput("precision", name, mend) from None


@lru_cache(maxsize=8)
def _allowed(kind: type[Policy]) -> dict[str, tuple[type, ...]]:
    """The kinds of value that each step may hold, by its name."""
    return {name: get_args(hint) or (hint,) for name, hint in get_type_hints(kind).items()}
