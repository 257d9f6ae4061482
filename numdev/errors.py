"""The errors that a user can cause, each one sentence that names the field, what was wrong, and what to do."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class NumdevError(Exception):
    """Base of everything that numdev raises on purpose."""


class BadInput(NumdevError, ValueError):
    """A value that cannot be used: `field` got `value`; `hint` says what to give instead."""

    def __init__(self, field: str, value: object, hint: str) -> None:
        super().__init__(f"{field}: {value!r} cannot be used; {hint}")
        self.field, self.value, self.hint = field, value, hint

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.hint)  # so that it survives a launcher's worker process


class BadOutput(BadInput):
    """A function of the user's returned what is no result of the operation: another shape, dtype or device."""


class NotHonoured(BadInput):
    """A setting that is stated explicitly and that the measured implementation does not read."""


class NotAChoice(BadInput):
    """A value that is none of `known`; `text` says what the setting means."""

    def __init__(self, field: str, value: object, known: Iterable[object], text: str = "") -> None:
        self.known, self.text = tuple(known), text
        super().__init__(field, value, one_of(value, map(str, self.known)) + (f": {text}" if text else ""))

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.field, self.value, self.known, self.text)


class StoreError(NumdevError):
    """Results could not be written; what was there before is untouched."""


class Unsupported(NumdevError):
    """An implementation cannot do what was asked for; `field` says which part, `reason` why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


def one_of(wrong: object, names: Iterable[str], most: int = 64) -> str:
    """A hint for a name that does not exist: similar names, and all names unless there are more than `most`."""
    known = list(names)
    similar = difflib.get_close_matches(str(wrong), known)
    rest = [name for name in known if name not in similar]
    if not similar:
        return "use one of " + ", ".join(rest if len(rest) <= most else [*rest[:most], "..."])
    question = f"did you mean {' or '.join(similar)}"
    return f"{question}, or another of {', '.join(rest)}" if 0 < len(rest) <= most else question
