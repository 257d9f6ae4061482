"""Commands without Hydra: how they read settings, and how an error ends them."""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from textwrap import fill
from typing import NoReturn

from numdev.errors import BadInput, NumdevError, StoreError, one_of

WIDTH = 80


def wrapped(text: str) -> str:
    """The text with its long lines wrapped and indented further; its other lines stay as they are."""
    return "\n".join(line if len(line) <= WIDTH else _hanging(line) for line in text.splitlines())


def _hanging(line: str) -> str:
    indent = " " * (len(line) - len(line.lstrip()))
    return fill(line.lstrip(), WIDTH, initial_indent=indent, subsequent_indent=f"{indent}    ", break_on_hyphens=False)


def _filled(text: str) -> str:
    """Paragraphs, which end with a full stop at the end of a line, each wrapped anew."""
    paragraphs = re.split(r"(?<=[.:])\n|\n\n", text)
    return "\n".join(fill(" ".join(each.split()), WIDTH, break_on_hyphens=False) for each in paragraphs)


class Parser(ArgumentParser):
    """Takes settings as `name=value`, as commands with Hydra do, or as `--name value`; an error is a `BadInput`."""

    def __init__(self, command: str, purpose: str, more: str = "") -> None:
        super().__init__(
            prog=f"numdev {command}",
            description=_filled(purpose),
            epilog=_filled(more),
            formatter_class=RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        self.usage = self.prog
        self._settings = self.add_argument_group("settings, as name=value or as --name value")
        self._names: list[str] = []

    def format_help(self) -> str:
        """argparse's help, its long lines wrapped."""
        return wrapped(super().format_help()) + "\n"

    def folders(self, usage: str, meaning: str) -> None:
        """Take folders in any place among the settings."""
        self.usage = f"{self.usage} {usage}"
        self.add_argument("folders", nargs="*", metavar=usage, help=meaning)

    def setting(self, name: str, default: str, meaning: str, shown: str = "") -> None:
        """Take a setting; `shown` stands for its value in the usage where the default is empty."""
        self._names.append(name)
        self.usage = f"{self.usage} [{name}={default or shown}]"
        value = shown or name.upper()
        self._settings.add_argument(f"--{name}", default=default, type=_unbracketed, metavar=value, help=meaning)

    def read(self, arguments: list[str]) -> Namespace:
        """The settings and folders that these arguments give.

        Raises:
            BadInput: an argument that the command does not take.
        """
        flags = [f"--{text}" if "=" in text and text.partition("=")[0] in self._names else text for text in arguments]
        given, unknown = self.parse_known_intermixed_args(flags)
        if unknown:
            raise self.refusal(unknown[0])
        return given

    def refusal(self, argument: str) -> BadInput:
        """Says that the command does not take an argument, and what it takes."""
        name = argument.lstrip("-").partition("=")[0]
        mend = f"{one_of(name, self._names)}, or --help" if self._names else "it takes no arguments"
        return BadInput(self.prog, argument, mend)

    def error(self, message: str) -> NoReturn:
        """In place of argparse's own exit."""
        raise BadInput(self.prog, "", f"{message}; see --help")


def _unbracketed(text: str) -> str:
    """A list as text between commas, with or without the brackets that Hydra wants."""
    return text.strip("[]")


def run(command: Callable[[Namespace], int], parser: Parser, arguments: list[str]) -> int:
    """The exit code of a command: its own, 2 for what the user can mend, 1 for every other failure.

    Raises:
        SystemExit: with 0, after `--help`.
    """
    try:
        return command(parser.read(arguments))
    except NumdevError as error:
        print(error, file=sys.stderr)
        return 2 if isinstance(error, (BadInput, StoreError)) else 1
