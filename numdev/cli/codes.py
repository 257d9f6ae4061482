"""Maps how points ended to the exit code of their command."""

from __future__ import annotations

from collections.abc import Iterable

from numdev.cli.outcome import FAILED, UNSUPPORTED, gravest
from numdev.results.record import Status

_CODES = {Status.ERROR: FAILED, Status.OUT_OF_MEMORY: FAILED, Status.UNSUPPORTED: UNSUPPORTED}


def code_of_point(status: Status) -> int:
    """The code of a point asked for by itself, or as a job of a sweep: 0 only if it has figures.

    `FAILED` for an error and for too little memory; `UNSUPPORTED` if the variant cannot do what was asked for. NaN and Inf are
    results, and the command prints which subject has them.
    """
    return _CODES.get(status, 0)


def code_of_study(statuses: Iterable[Status]) -> int:
    """The code of a study: `FAILED` for an error; else 0 if one of its points has figures, as others may lack them by design.

    If none has figures, the first of 2, 1, 3 among the codes of its points.
    """
    found = list(statuses)
    if Status.ERROR in found:
        return FAILED
    return gravest(map(code_of_point, found)) if found and all(map(code_of_point, found)) else 0
