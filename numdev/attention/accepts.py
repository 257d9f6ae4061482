"""Lists of what a fast path implements: the fields of value objects that it reads, with the values that it knows.

A path gives the bits of the reference only for what it reads. So it lists that, and a field that is not listed, such as one added
to the reference later, refuses the path wherever it is not at its default: a kernel that was requested by name then raises
`Unsupported`, and where the path was chosen for its speed, tensor operations run.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import MISSING, Field, dataclass, fields
from enum import Enum
from typing import Any

from numdev.arithmetic.formats import Format, Specials
from numdev.attention.mask import Mask
from numdev.attention.softmax import (
    DeltaForm,
    Exponential,
    OutputForDelta,
    Recompute,
)
from numdev.attention.tiling import Tiling
from numdev.errors import Unsupported


class _All(tuple[()]):
    def __contains__(self, value: object) -> bool:
        return True


ALL = _All()
"""Every value: for numbers, and for what the path does not read as it is, but after code that it shares with the reference."""


@dataclass(frozen=True)
class Refusal:
    """Why a path cannot take a value object."""

    setting: str  # the first setting that it does not implement, such as `softmax.tie_shift`
    value: str  # the value of this setting, or of a part of it
    choices: str  # the values that it implements, if they can be counted

    def __str__(self) -> str:
        return f"{self.setting}: {self.value} is not implemented" + (f"; give {self.choices}" if self.choices else "")


_Choices = tuple[Collection[Any], tuple["Accepts", ...]]  # values, and lists for value objects


class Accepts:
    """The fields of a value object that a path reads, each with the values that it implements; others must have their default.

    Args:
        kind: the class of the value object.
        group: of its settings, as in `softmax.normalise`; none for a value that is one setting as a whole, such as a cast.
        listed: for each field its values, or the list of the value object that it holds; or both in one tuple.
    """

    def __init__(self, kind: type, group: str = "", /, **listed: Collection[Any] | Accepts) -> None:
        self.kind, self._group = kind, group
        self.listed: dict[str, Any] = listed
        self._choices: dict[type, dict[str, _Choices]] = {}

    def but(self, **listed: Collection[Any] | Accepts) -> Accepts:
        """The list with other values of some fields."""
        return Accepts(self.kind, self._group, **(self.listed | listed))

    def refusal(self, value: Any, setting: str = "") -> Refusal | None:
        """The first field of `value`, or of a value object within it, that is not accepted; None where all are."""
        choices = self._choices.get(type(value))
        if choices is None:  # looked up once for each class: a kernel is asked at every launch
            choices = self._choices[type(value)] = {field.name: self._choices_of(field) for field in fields(value)}
        for name, (values, lists) in choices.items():
            held, place = getattr(value, name), f"{self._group}.{name}" if self._group else setting
            for each in lists:
                if isinstance(held, each.kind):
                    if (inner := each.refusal(held, place)) is not None:
                        return inner
                    break
            else:
                if held not in values:
                    part, counted = ("" if self._group else f"{name} "), _counted(values)
                    what = f"{_text(value)} ({part}{_text(held)})" if part else _text(held)
                    return Refusal(place, what, f"{part}{counted}" if counted else "")
        return None

    def _choices_of(self, field: Field[Any]) -> _Choices:
        listed = self.listed.get(field.name, _default(field))
        if isinstance(listed, Accepts):
            return (), (listed,)
        return listed, tuple(each for each in listed if isinstance(each, Accepts))

    def check(self, value: Any, path: str, instead: str, setting: str = "") -> None:
        """Raise Unsupported, naming the setting, if `path` does not accept `value`; `instead` names what does."""
        if (refusal := self.refusal(value, setting)) is not None:
            hint = f"{refusal.choices}, or {instead}" if refusal.choices else instead
            raise Unsupported(refusal.setting, f"{path} does not implement {refusal.value}; give {hint}")


def _default(field: Field[Any]) -> tuple[Any, ...]:
    if field.default_factory is not MISSING:
        return (field.default_factory(),)
    return () if field.default is MISSING else (field.default,)


def _counted(choices: Collection[Any]) -> str:
    if isinstance(choices, range):
        return f"{choices.start} to {choices.stop - 1}"
    return " or ".join(_text(value) for value in choices if not isinstance(value, Accepts))


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "none" if value == () else str(value.value if isinstance(value, Enum) else value)


def of(names: str, listed: Collection[Any] | Accepts) -> dict[str, Any]:
    """One list for each of some fields."""
    return dict.fromkeys(names.split(), listed)


BINARY = Accepts(Format, exponent_bits=ALL, mantissa_bits=ALL, specials=(Specials.IEEE, Specials.NAN_ONLY, Specials.FINITE))
RECOMPUTE = Accepts(
    Recompute,
    "recompute",
    delta=(DeltaForm.OUTPUT, DeltaForm.PROBABILITIES),
    output=(OutputForDelta.ROUNDED, OutputForDelta.UNROUNDED),
    exponential=Accepts(Exponential, binary=ALL),
)
TILING = Accepts(Tiling, "tiling", **of("br bc order splits stride seed split_size", ALL))
MASK = Accepts(Mask, "problem", **of("causal window key_lengths", ALL))
