"""Completion by a shell: the command, then its settings by Hydra."""

from __future__ import annotations

import os
import sys

from numdev.cli.launch import CONFIGS, launch, process

_WITHOUT_SETTINGS = ("compare", "studies", "tune", "--help", "--version")


def complete(arguments: list[str]) -> int:
    """`numdev -sc install=bash`, `uninstall=bash`, and the `query=bash` with which a shell asks for what may come next.

    The shell passes its line as COMP_LINE. Hydra has no commands, so it gets the line without that word, and flags before
    overrides.
    """
    query = arguments[1] if len(arguments) > 1 else ""
    if not query.startswith("query="):
        return launch("measure", arguments)
    program, *words = os.environ.get("COMP_LINE", "").split(" ")
    words = [word for word in words[:-1] if word] + words[-1:]
    if len(words) < 2:
        print(*CONFIGS, *_WITHOUT_SETTINGS, sep="\n" if query == "query=fish" else " ")
        return 0
    command, *rest = words
    rest.sort(key=lambda word: word not in ("--multirun", "-m"))
    with process(sys.argv[1:], COMP_LINE=" ".join([program, *rest])):
        return launch(command, arguments) if command in CONFIGS else 0
