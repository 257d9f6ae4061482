"""Completion by the shell: the command first, then Hydra's completion of its settings."""

from __future__ import annotations

import os
import sys

from numdev.cli import flags, process
from numdev.cli.launch import CONFIGS, launch

_WITHOUT_SETTINGS = ("compare", "studies", "tune", "--help", "--version")


def complete(arguments: list[str]) -> int:
    """`numdev -sc install=bash`, `uninstall=bash`, and the `query=bash` with which a shell asks for what may come next.

    The shell hands over its line as COMP_LINE. Hydra knows no commands, so it gets the line without that word.
    """
    wanted = arguments[1] if len(arguments) > 1 else ""
    if not wanted.startswith("query="):
        return launch("measure", arguments)
    program, *words = os.environ.get("COMP_LINE", "").split(" ")
    words = [word for word in words[:-1] if word] + words[-1:]
    if len(words) < 2:
        print((" " if wanted != "query=fish" else "\n").join([*CONFIGS, *_WITHOUT_SETTINGS]))
        return 0
    command, *rest = words
    if command not in CONFIGS:
        return 0
    rest.sort(key=lambda word: word not in flags.MULTIRUN)  # Hydra's completion wants flags before overrides
    with process.given(sys.argv[1:], COMP_LINE=" ".join([program, *rest])):
        return launch(command, arguments)
