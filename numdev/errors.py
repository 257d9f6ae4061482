"""The errors that a user can cause, each one sentence that names the field, what was wrong, and what to do."""

from __future__ import annotations


class NumdevError(Exception):
    """Base of everything that numdev raises on purpose."""


class BadInput(NumdevError, ValueError):
    """A value that cannot be used: `field` got `value`; `mend` says what to give instead."""

    def __init__(self, field: str, value: object, mend: str) -> None:
        super().__init__(f"{field}: {value!r} cannot be used; {mend}")
        self.field, self.value, self.mend = field, value, mend

    def __reduce__(self) -> tuple[type[BadInput], tuple[str, object, str]]:
        return type(self), (self.field, self.value, self.mend)  # so that it survives a launcher's worker process


class BadOutput(BadInput):
    """A function of the user's returned what is no result of the operation: another shape, dtype or device."""


class StoreError(NumdevError):
    """Results could not be written; what was there before is untouched."""


class NotHonoured(BadInput):
    """A setting that is stated explicitly and that the measured implementation does not read."""


class Unsupported(NumdevError):
    """An implementation cannot do what was asked for; `field` says which part, `reason` why."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
