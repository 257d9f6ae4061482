"""Which settings an implementation of attention accepts: nothing explicit may be ignored.

A setting is known by its dotted name on the command line. A constant of its class lists those that an implementation reads; the
object itself says which of them it reads only under another one (`tiling.stride` in the order `strided`): `idle`.
"""

from __future__ import annotations

from dataclasses import dataclass

from numdev.arithmetic.formats import Format
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import OnlineSoftmax, Recompute
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


@dataclass(frozen=True)
class AcceptedSettings:
    """The settings that an implementation reads.

    Attributes:
        names: dotted, as `tiling.bc`.
        family: of an implementation whose arithmetic is fixed, the policies that it has, `kernel` or `eager`; `precision` then
            names a format alone, or with this in front of it. Empty where the policy is free, or there is none.
        formats: those that an implementation of fixed arithmetic offers.
    """

    names: frozenset[str] = frozenset()
    family: str = ""
    formats: tuple[Format, ...] = ()

    def format_of(self, preset: str, option: str) -> Format:
        """The format that `precision.preset` names for fixed arithmetic: alone, or behind the name of its policies.

        `option` is that of the implementation, as in `attention=sdpa`.

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
