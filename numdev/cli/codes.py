"""The exit code that the points of a command lead to."""

from __future__ import annotations

from collections.abc import Iterable

from numdev.cli.outcome import FAILED, UNSUPPORTED, gravest
from numdev.results.record import Status

_CODES = {Status.ERROR: FAILED, Status.OUT_OF_MEMORY: FAILED, Status.UNSUPPORTED: UNSUPPORTED}


def code_of_point(status: Status) -> int:
    """Of a point that was asked for by itself, or as a job of a sweep: 0 only where there are figures.

    `FAILED` for an error and for memory that did not suffice; `UNSUPPORTED` where the variant cannot do what was asked
    for. NaN and Inf are a result, and the command says whose they are.
    """
    return _CODES.get(status, 0)


def code_of_study(statuses: Iterable[Status]) -> int:
    """Of a study: `FAILED` for an error; else 0 if a point of it has figures, since others may lack them by design.

    Where none has any, the gravest code of its points.
    """
    found = list(statuses)
    if Status.ERROR in found:
        return FAILED
    return gravest(map(code_of_point, found)) if found and all(map(code_of_point, found)) else 0
