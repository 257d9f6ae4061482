"""The two consoles: results go to stdout, everything else to stderr."""

from __future__ import annotations

from rich.console import Console

_NARROWEST_FILE = 120  # columns where no terminal sets a width

ERRORS = Console(stderr=True, highlight=False, soft_wrap=True)


def output() -> Console:
    """For results: as wide as the terminal, and wide enough for a table where there is none."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console.width = max(console.width, _NARROWEST_FILE)
    return console
