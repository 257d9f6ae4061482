"""Commands that Hydra has no part in: their help, and how an error ends them."""

from __future__ import annotations

import sys
from collections.abc import Callable

from numdev.errors import BadInput, NumdevError


def run(command: Callable[[list[str]], int], arguments: list[str], text: str) -> int:
    """The exit code of a command; 0 after its help, 2 for what the user asked for, 1 for what happened then."""
    if arguments and arguments[0] in ("--help", "-h"):
        print(text)
        return 0
    try:
        return command(arguments)
    except NumdevError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, BadInput) else 1
