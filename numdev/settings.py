"""A setting is declared once: a field with its default, its sentence and its unit, from which everything else is derived."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, field, fields
from typing import Any

_KEY = "setting"


@dataclass(frozen=True)
class Overruled:
    """Settings that together replace another one; it is then read only if they have the value `value`, None any."""

    by: tuple[str, ...]
    value: Any = None


@dataclass(frozen=True)
class Setting:
    """One thing that a user can set.

    Attributes:
        name: in its group; a dot leads into a nested node.
        default: of the command line.
        text: what it means, for `--help`, the data dictionary and the reference.
        unit: of its value; empty where it has none.
        column: of tables, behind `problem.` or what the group is part of, where it is not the name; empty where there is none.
        overruled: see `Overruled`.
        word: what stands on the axis of a figure; empty where that is the name.
    """

    name: str
    default: Any
    text: str
    unit: str
    column: str
    overruled: Overruled | None
    word: str = ""


@dataclass(frozen=True)
class _Declared:
    text: str
    unit: str
    column: str | None
    overruled: Overruled | None
    word: str


def setting(
    default: Any, text: str, unit: str = "", *, column: str | None = None, overruled: Overruled | None = None, word: str = ""
) -> Any:  # as `dataclasses.field`: the type is the annotation's
    """A field of a dataclass that a user can set; see `Setting`."""
    return field(default=default, metadata={_KEY: _Declared(text, unit, column, overruled, word)})


def declared(kind: type, prefix: str = "") -> Iterator[Setting]:
    """The settings that the fields of a dataclass declare, those of a nested one with its name in front."""
    for each in fields(kind):
        name = f"{prefix}{each.name}"
        if _KEY in each.metadata:
            said: _Declared = each.metadata[_KEY]
            column = name if said.column is None else said.column
            yield Setting(name, each.default, said.text, said.unit, column, said.overruled, said.word)
        elif (nested := _nested(each)) is not None:
            yield from declared(nested, f"{name}.")


def _nested(each: Field[Any]) -> type | None:
    factory = each.default_factory
    return factory if factory is not MISSING and isinstance(factory, type) else None
