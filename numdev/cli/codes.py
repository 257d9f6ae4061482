"""Maps how points ended to the exit code of their command."""

from __future__ import annotations

from collections.abc import Iterable

from numdev.cli.outcome import BAD_OUTPUT, FAILED, UNSUPPORTED, gravest
from numdev.results import record
from numdev.results.record import Status

_CODES = {Status.ERROR: FAILED, Status.OUT_OF_MEMORY: FAILED, Status.UNSUPPORTED: UNSUPPORTED}
_CODES |= dict.fromkeys(record.BAD_OUTPUT, BAD_OUTPUT)


def code_of_point(status: Status) -> int:
    """The code of a point asked for by itself, or as a job of a sweep: 0 only if it has figures of every element.

    `FAILED` for an error and for too little memory; `UNSUPPORTED` if the variant cannot do what was asked for; `BAD_OUTPUT` for
    NaN and Inf where golden is finite, for zeros alone where golden has others, and for an output of another shape, dtype or
    device. A format that overflows ends so too: it is measured, and the command prints which output has how many.
    """
    return _CODES.get(status, 0)


def code_of_study(statuses: Iterable[Status]) -> int:
    """The code of a study: `FAILED` for an error; else `BAD_OUTPUT` where a point ended so.

    Else 0 if one of its points has figures, as others may lack them by design. If none has, the first of 2, 1, 5, 3 among the
    codes of its points.
    """
    found = list(statuses)
    codes = {code_of_point(status) for status in found}
    if Status.ERROR in found:
        return FAILED
    return BAD_OUTPUT if BAD_OUTPUT in codes else 0 if 0 in codes else gravest(codes)
