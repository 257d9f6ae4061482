"""What a point was asked for, in the words of the command line, as a terminal shows it above the figures."""

from __future__ import annotations

from dataclasses import dataclass

from numdev.cli import honoured, nodes
from numdev.cli.requests import Request, written

_SIZE = "problem.n"
_USUAL = "default"  # an option of this name says nothing that a reader does not expect


@dataclass(frozen=True)
class Asked:
    """A point by the names that the user knows.

    Attributes:
        line: groups, the size of the problem and every stated setting, as overrides.
        variant: the option that is measured, such as `tiled`.
        baseline: the option of the baseline, such as `eager`.
    """

    line: str
    variant: str
    baseline: str


def asked(request: Request) -> Asked:
    """The names of what a request measures."""
    read = honoured.reads(request)
    chosen = honoured.kind_of(request)
    shown = {chosen.partition("=")[0]: chosen} if "=" in chosen else {}
    for group, option in request.options.items():
        is_read = any(name == group or name.startswith(f"{group}.") for name in read)
        is_said = any(one.name == group for one in request.said.values())
        if is_said or (is_read and group != "baseline" and option != _USUAL):
            shown.setdefault(group, f"{group}={option}")
    if _SIZE in request.raw:
        shown[_SIZE] = f"{_SIZE}={written(nodes.at(request.config, _SIZE))}"
    for one in request.said.values():
        shown.setdefault(one.name, str(one))
    name = chosen.rpartition("=")[2]
    return Asked(" ".join(shown.values()), name, request.options.get("baseline", "baseline"))
