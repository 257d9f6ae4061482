"""Which settings an implementation of attention honours: nothing explicit may be ignored.

A setting is known by its dotted name on the command line. A constant beside its class lists those that an implementation
reads; the object itself says which of them it reads only under another one (`tiling.stride` in the order `strided`): `idle`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Protocol, runtime_checkable

from numdev.arithmetic.formats import Format
from numdev.arithmetic.quantise import Quantised
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import OnlineSoftmax, OutputForDelta, Recompute
from numdev.attention.tiling import Tiling
from numdev.errors import BadInput, NotHonoured
from numdev.settings import declared, named


def settings_of(group: str, kind: type) -> frozenset[str]:
    """The settings of a group."""
    return frozenset(f"{group}.{one.name}" for one in declared(kind))


PRESET = frozenset({"precision.preset"})
STEPS = settings_of("precision", Precision) - PRESET
TILES = settings_of("tiling", Tiling)
SIDES = frozenset({"tiling.br", "tiling.bc", "tiling.sram", "tiling.shape"})
RECURRENCE = settings_of("softmax", OnlineSoftmax)
BACKWARD_STEPS = settings_of("precision", BackwardPrecision)
FORWARD_STEPS = settings_of("forward_precision", Precision)
RECOMPUTED = settings_of("recompute", Recompute)
TILED_BACKWARD = BACKWARD_STEPS | FORWARD_STEPS | RECURRENCE | RECOMPUTED | (TILES - {"tiling.splits"})
"""The settings that both tiled passes read; there are no splits, since gradients of ranges of keys cannot be combined."""


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

    def format_of(self, preset: str, option: str) -> Format:
        """The format that a preset names for fixed arithmetic: alone, or behind the name of its policies.

        Args:
            preset: as in `precision.preset`.
            option: that of the implementation, as in `attention=sdpa`.

        Raises:
            NotHonoured: for a precision that the implementation does not have.
        """
        named("precision.preset", Precision.parse, preset)
        family, _, name = preset.rpartition("_")
        try:
            fmt = Format.parse(name)
        except BadInput:  # of golden and others there is none
            fmt = None
        if fmt is None or fmt not in self.formats or family not in ("", self.family):
            raise NotHonoured("precision.preset", preset, self.refusal("precision.preset", option))
        return fmt

    def refusal(self, name: str, option: str) -> str:
        """Why a setting that is not read cannot be set, where there is more to say than that; `option` is the variant's."""
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
    return precision.ineffective_sums(lengths) + of_keys + softmax.exp.ineffective(tiling.bc)


def backward_ineffective(
    forward: object, precision: BackwardPrecision, tiling: Tiling, recompute: Recompute, shape: Shape | None
) -> list[NotHonoured]:
    """See `OnShape`, for both passes over tiles."""
    lengths = {"dq": tiling.bc, "dk": tiling.br, "dv": tiling.br}
    if shape is not None:
        lengths |= {"scores": shape.head_dim, "dp": shape.head_dim}
    if not recompute.reads_output:
        lengths["delta"] = tiling.bc
    elif shape is not None:
        lengths["delta"] = shape.head_dim
    of_forward = forward.ineffective(shape) if isinstance(forward, OnShape) else []
    renamed = [
        NotHonoured(error.field.replace("precision.", "forward_precision."), error.value, error.mend) for error in of_forward
    ]
    return precision.ineffective_sums(lengths) + renamed + recompute.exponential.ineffective(tiling.bc, "recompute")


_OUTPUT_ALONE = ("values", "accumulator", "output")  # steps of the forward pass that never enter its LSE


def idle_recompute(recompute: Recompute) -> dict[str, str]:
    """Settings of the forward pass's O, and of its steps, that have no effect, and the setting under which each would."""
    if not recompute.reads_output:
        unread = ("recompute.output", *(f"forward_precision.{name}" for name in _OUTPUT_ALONE))
        return dict.fromkeys(unread, "recompute.delta=output")
    rounded = recompute.output is OutputForDelta.ROUNDED
    return {} if rounded else {"forward_precision.output": "recompute.output=rounded"}
