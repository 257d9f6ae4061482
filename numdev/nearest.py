"""Names similar to a misspelt one, and members of an Enum by name."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, TypeVar

from numdev.errors import BadInput

E = TypeVar("E", bound=Enum)
T = TypeVar("T")
_CUTOFF = 0.6  # the least similarity of what is near, difflib's own


def is_near(wrong: object, names: Iterable[str]) -> bool:
    """Whether one of the names looks like it."""
    return bool(difflib.get_close_matches(str(wrong), list(names), n=1, cutoff=_CUTOFF))


def one_of(wrong: object, names: Iterable[str], most: int = 64) -> str:
    """A hint for a name that does not exist: similar names, and all names unless there are more than `most`."""
    known = list(names)
    near = difflib.get_close_matches(str(wrong), known, n=3, cutoff=_CUTOFF)
    rest = [name for name in known if name not in near]
    if not near:
        return "use one of " + ", ".join(rest if len(rest) <= most else [*rest[:most], "..."])
    question = f"did you mean {' or '.join(near)}"
    return f"{question}, or another of {', '.join(rest)}" if 0 < len(rest) <= most else question


class NotAChoice(BadInput):
    """A value that is none of `known`; `text` says what the setting means."""

    def __init__(self, field: str, value: object, known: Iterable[object], text: str = "") -> None:
        self.known, self.text = tuple(known), text
        super().__init__(field, value, one_of(value, map(str, self.known)) + (f": {text}" if text else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.known, self.text)


def choice(field: str, kind: type[E], value: object) -> E:
    """The member of an Enum with this value.

    Raises:
        NotAChoice: naming the setting and its possible values.
    """
    known = [member.value for member in kind]
    if value not in known:
        raise NotAChoice(field, value, known)
    return kind(value)


def named(field: str, parse: Callable[[str], T], text: str) -> T:
    """`parse(text)`, whose error names the setting."""
    try:
        return parse(text)
    except BadInput as error:
        raise BadInput(field, text, error.mend) from None
