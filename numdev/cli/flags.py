"""The flags that Hydra documents for every command (https://hydra.cc/docs/advanced/hydra-command-line-flags)."""

from __future__ import annotations

from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Sequence

from numdev.errors import BadInput

_ALONE = (("--help", "-h"), ("--hydra-help",), ("--version",), ("--resolve",), ("--run", "-r"), ("--multirun", "-m"))
_COMPLETION = ("--shell-completion", "-sc")
_WITH_VALUE = (
    ("--cfg", "-c"),
    ("--package", "-p"),
    ("--config-path", "-cp"),
    ("--config-name", "-cn"),
    ("--config-dir", "-cd"),
    ("--experimental-rerun",),
)
_WITH_OPTIONAL_VALUE = ("--info", "-i")
MULTIRUN = ("--multirun", "-m")


def parser() -> ArgumentParser:
    """Reads a command line as Hydra does; Hydra itself checks the values of flags."""
    found = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    found.add_argument("overrides", nargs="*", default=[])
    for names in (*_ALONE, _COMPLETION):
        found.add_argument(*names, action="store_true")
    for names in _WITH_VALUE:
        found.add_argument(*names)
    found.add_argument(*_WITH_OPTIONAL_VALUE, nargs="?")
    return found


def read(arguments: Sequence[str]) -> tuple[list[str], Namespace]:
    """Return the overrides, and the given flags by name; drop unknown flags."""
    parsed, _ = parser().parse_known_intermixed_args(arguments)
    return parsed.overrides, parsed


def split(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate overrides from flags with their values, which may stand between them on the command line.

    Raises:
        BadInput: for a flag that Hydra does not have.
    """
    parsed, unknown = parser().parse_known_intermixed_args(arguments)
    if unknown:
        raise BadInput(f"numdev {command}", unknown[0], f"there is no such flag; numdev {command} --hydra-help lists them")
    flags = list(arguments)
    for override in parsed.overrides:
        flags.remove(override)
    return parsed.overrides, flags
