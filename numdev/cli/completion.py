"""Completion by a shell: the command, then its settings by Hydra, and the values of those that have few."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from enum import Enum
from typing import get_args

from numdev.cli import schema
from numdev.cli.compose import Flat, Request, composed, register
from numdev.cli.exit_codes import KNOWN
from numdev.cli.launch import CONFIGS, MULTIRUN, folders_of, launch, process, split
from numdev.settings import declared

_FEW = {
    "device": ("auto", "cpu", "cuda"),
    "metrics": ("chief", "all"),
    "format": ("csv", "parquet", "pdf", "html", "npz"),
}
"""Values of settings whose types do not state them."""
_WITHOUT_SETTINGS = ("compare", "studies", "tune", "--help", "--version")


def _settings(primary: str, arguments: Sequence[str]) -> Flat:
    """Every setting of a command line by its dotted name, as Hydra composes it."""
    overrides, flags, _ = split(arguments)
    return composed(folders_of(flags), flags.get("--config-name", primary), tuple(overrides))[0]


def formats(primary: str, arguments: Sequence[str]) -> Iterator[str]:
    """The precision policies of a command line with the format of every step, as comments of YAML.

    Raises:
        BadInput: for a policy that cannot be made.
    """
    from numdev.cli import build  # late: completion does not wait for torch

    settings = Request(_settings(primary, arguments), {}, {}).config
    for name, node in settings.items():
        if isinstance(node, dict) and "preset" in node:
            yield f"# {name}, the format of every step:"
            yield from (f"#   {step}: {text}" for step, text in build.node(settings, name).steps().items())


def _values(command: str, words: list[str]) -> list[str]:
    """Completions of the last word, where it gives a setting whose values are few; none where Hydra knows more, as of groups."""
    name, is_value, begun = words[-1].partition("=")
    if not is_value:
        return []
    known = _FEW.get(name, ())
    if not known:
        register()
        try:
            known = _members(_settings(CONFIGS[command], words[:-1]), name)
        except KNOWN:  # what stands before it cannot be composed yet
            return []
    return [f"{name}={value}" for value in known if value.startswith(begun)]


def _members(settings: Flat, name: str) -> tuple[str, ...]:
    """The values that the type of a setting has, where it is an Enum or a flag."""
    own = schema.settings().get(name)
    group, _, last = name.rpartition(".")
    if own is None and f"{group}._target_" in settings:
        from numdev.cli import build

        kind = build.made_by(str(settings[f"{group}._target_"]))
        own = next((one for one in declared(kind) if one.name == last), None) if kind else None
    if own is None:
        return ("true", "false") if isinstance(settings.get(name), bool) else ()
    for kind in (own.kind, *get_args(own.kind)):
        if isinstance(kind, type) and issubclass(kind, (Enum, bool)):
            return ("true", "false") if kind is bool else tuple(str(member.value) for member in kind)
    return ()


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
