"""Which settings an implementation of attention honours: nothing that is stated may be ignored.

A setting is known by its dotted name on the command line. A constant beside its class lists those that an implementation
reads; the object itself says which of them it reads only under another one (`tiling.stride` in the order `strided`): `idle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import ClassVar, Protocol, runtime_checkable

from numdev.arithmetic.formats import Format
from numdev.arithmetic.quantise import Quantised
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.tiling import Tiling
from numdev.errors import NotHonoured


def settings_of(group: str, kind: type) -> frozenset[str]:
    """The settings of a group that are the fields of a value object."""
    return frozenset(f"{group}.{field.name}" for field in fields(kind))


PRESET = frozenset({"precision.preset"})
STEPS = settings_of("precision", Precision) | settings_of("precision.quantise", Quantised)
SIDES = frozenset({"tiling.br", "tiling.bc", "tiling.sram", "tiling.shape"})
TILES = SIDES | settings_of("tiling", Tiling)
RECURRENCE = settings_of("softmax", OnlineSoftmax) | {"softmax.exp_coefficients", "softmax.exp_share"}  # of `exp`


@dataclass(frozen=True)
class Honours:
    """The settings that an implementation reads.

    Attributes:
        settings: their dotted names.
        family: of an implementation whose arithmetic is fixed, the policies that it has, `kernel` or `eager`; `precision` then
            names a format alone, or with this in front of it. Empty where the policy is free, or there is none.
        formats: those that an implementation of fixed arithmetic offers.
    """

    settings: frozenset[str] = frozenset()
    family: str = ""
    formats: tuple[Format, ...] = ()

    def refusal(self, name: str, option: str) -> str:
        """Why a setting that is not read cannot be stated, where there is more to say than that; `option` is the variant's."""
        if not (self.family and name.startswith("precision.")):
            return ""
        names, own = ", ".join(fmt.name for fmt in self.formats), f"{self.family}_{self.formats[0]}"
        return f"{option} has an arithmetic of its own, which cannot be set; name a format alone ({names}) or as in {own}"


@runtime_checkable
class Honouring(Protocol):
    """An object that says which settings it honours, as every implementation that the command line can request must."""

    honours: ClassVar[Honours]

    @property
    def idle(self) -> Mapping[str, str]:
        """Settings that it honours, but does not read as it is, and the setting under which it would."""
        ...


@runtime_checkable
class OnShape(Protocol):
    """An implementation that knows which of its settings cannot have an effect on a problem."""

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """A refusal of each setting whose value is accepted and can change no bit on this shape; None for an unknown one.

        Of what the number of keys decides, splits alone are refused: a sum, a threshold or an order of one tile is what a sweep
        over it begins with.
        """
        ...


def tiled_ineffective(precision: Precision, tiling: Tiling, softmax: OnlineSoftmax, shape: Shape | None) -> list[NotHonoured]:
    """See `OnShape`, for a forward pass over tiles."""
    lengths = dict.fromkeys(("row_sum", "values"), tiling.bc)
    if shape is not None:
        smoothed = isinstance(precision.inputs, Quantised) and precision.inputs.smoothing.of_q
        lengths["scores"] = shape.head_dim * (2 if smoothed else 1)
    of_keys = [] if shape is None else tiling.ineffective(shape.keys)
    return precision.ineffective(lengths) + of_keys + softmax.exp.ineffective(tiling.bc)
