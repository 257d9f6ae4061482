"""Completion by the shell: the command first, then Hydra's completion of its settings."""

from __future__ import annotations

import os
import sys

from numdev.cli import resolved
from numdev.cli.compose import register
from numdev.cli.exit_codes import KNOWN
from numdev.cli.launch import CONFIGS, MULTIRUN, launch, process

_FEW = {
    "device": ("auto", "cpu", "cuda"),
    "metrics": ("chief", "all"),
    "format": ("csv", "parquet", "pdf", "html", "npz"),
    "problem.causal": ("true", "false"),
}
"""Values of settings that state none by themselves, as those of the run, and those that may be empty."""
_WITHOUT_SETTINGS = ("compare", "studies", "tune", "--help", "--version")


def _values(command: str, words: list[str]) -> list[str]:
    """Completions of the last word, where it gives a setting whose values are few; none where Hydra knows more, as of groups."""
    name, is_value, begun = words[-1].partition("=")
    if not is_value:
        return []
    known = list(_FEW.get(name, ()))
    if not known:
        register()
        try:
            known = resolved.values(CONFIGS[command], words[:-1], name)
        except KNOWN:  # what stands before it cannot be composed yet
            return []
    return [f"{name}={value}" for value in known if value.startswith(begun)]


def complete(arguments: list[str]) -> int:
    """`numdev -sc install=bash`, `uninstall=bash`, and the `query=bash` with which a shell asks for what may come next.

    The shell passes its line as COMP_LINE. Hydra has no commands, so it gets the line without that word.
    """
    query = arguments[1] if len(arguments) > 1 else ""
    if not query.startswith("query="):
        return launch("measure", arguments)
    between = "\n" if query == "query=fish" else " "
    program, *words = os.environ.get("COMP_LINE", "").split(" ")
    words = [word for word in words[:-1] if word] + words[-1:]
    if len(words) < 2:
        print(between.join([*CONFIGS, *_WITHOUT_SETTINGS]))
        return 0
    command, *rest = words
    if command not in CONFIGS:
        return 0
    if values := _values(command, rest):
        print(between.join(values))
        return 0
    rest.sort(key=lambda word: word not in MULTIRUN)  # Hydra's completion wants flags before overrides
    with process(sys.argv[1:], COMP_LINE=" ".join([program, *rest])):
        return launch(command, arguments)
