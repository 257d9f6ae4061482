"""The meaning of a command line: the composed settings, the format of every step, and the values that a setting takes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from numdev.cli import launch, nodes
from numdev.cli.compose import Flat, Request, composed, config_folder, flat, plain
from numdev.errors import BadInput, NotAChoice

_UNKNOWN = "?"  # a value that no setting takes
_PRESET = "preset"  # what a node has that makes a precision policy
_BUILT = ("problem", "variant", "baseline")


def formats(primary: str, arguments: Sequence[str]) -> Iterator[str]:
    """The precision policies of a command line with the format of every step, as comments of YAML.

    Raises:
        BadInput: for a policy that cannot be made.
    """
    settings = Request(_settings(primary, arguments), {}, {}).config
    for name, node in settings.items():
        if isinstance(node, dict) and _PRESET in node:
            yield f"# {name}, the format of every step:"
            yield from (f"#   {step}: {text}" for step, text in nodes.build(settings, name).steps().items())


def values(primary: str, arguments: Sequence[str], name: str) -> list[str]:
    """The values that a setting takes beside these arguments, where they are few; none where they are not, or not known."""
    settings = _settings(primary, arguments)
    if name not in settings:
        return []
    if isinstance(settings[name], bool):
        return ["true", "false"]
    asked = Request(settings | {name: _UNKNOWN}, {}, {}).config
    for part in (name.partition(".")[0], *_BUILT):
        try:
            nodes.build(asked, part)
        except NotAChoice as error:
            return list(map(str, error.known)) if error.field == name else []
        except (BadInput, TypeError):  # what takes a number computes with the unknown value
            continue
    return []


def _settings(primary: str, arguments: Sequence[str]) -> Flat:
    overrides, given = launch.read(arguments)
    own = (Path(given.config_dir).resolve(),) if "config_dir" in given else ()
    return dict(flat(plain(composed((config_folder(), *own), getattr(given, "config_name", primary), tuple(overrides))[0])))
