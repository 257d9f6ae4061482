"""Hands a command to Hydra, and derives its exit code from what its jobs returned."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from numdev.cli import flags, plotted, process, resolved, schema, sources
from numdev.cli.composed import Composer, composer
from numdev.cli.jobs import Job, NoFigure, Outlet, kept
from numdev.cli.library import config_folder
from numdev.cli.outcome import FAILED, KNOWN, Ended, code_of, gravest, sentence_of, unforeseen
from numdev.cli.width import wrapped
from numdev.errors import BadInput

CONFIGS = {"map": "map", "measure": "config", "paper": "paper", "report": "report", "speed": "speed", "train": "train"}


def launch(command: str, arguments: list[str]) -> int:
    """Run a command with Hydra's arguments; returns the exit code.

    Hydra prints an error with its own frames and exits with 1, unless HYDRA_FULL_ERROR is set. So this function sets it and
    prints one sentence for an error. If the user has set it, errors keep their tracebacks.
    """
    schema.register()
    sources.register()
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return _run(command, arguments, tracebacks=True)
    try:
        if {"--help", "-h"} & set(arguments):
            print(help_of(command, arguments))
            return 0
        return _run(command, arguments)
    except KNOWN as error:
        print(sentence_of(error, _asked(command, arguments)), file=sys.stderr)
        return code_of(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        print(unforeseen(error), file=sys.stderr)
        return FAILED


def help_of(command: str, arguments: list[str]) -> str:
    """Hydra's help of a command, its long lines wrapped for a terminal of 80 columns."""
    said = io.StringIO()
    ends = contextlib.suppress(SystemExit)  # Hydra ends the process after its help
    with ends, contextlib.redirect_stdout(said), process.given(arguments, HYDRA_FULL_ERROR="1"):
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIGS[command])(lambda _: None)()
    return wrapped(said.getvalue().rstrip())


def _asked(command: str, arguments: list[str]) -> Composer | None:
    """The settings of the operation and the folders that the arguments name; None where these cannot be composed."""
    overrides, given = flags.read(arguments)
    folders = (config_folder(), *((Path(given.config_dir).resolve(),) if "config_dir" in given else ()))
    chosen = [text.partition("=")[2].partition(",")[0] for text in overrides if text.startswith("operation=")]
    try:
        return composer(folders, getattr(given, "config_name", CONFIGS[command]), chosen[-1] if chosen else None)
    except (*KNOWN, OSError):
        return None


def _run(command: str, arguments: list[str], *, tracebacks: bool = False) -> int:
    arguments = [plotted.braced(text) for text in arguments]
    job = Job(command, Outlet.here(), tracebacks, tuple(arguments))
    with kept() as ended:
        try:
            with process.given(ordered(command, arguments), HYDRA_FULL_ERROR="1"):
                hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIGS[command])(job)()
        except NoFigure as error:
            print(f"the sweep ended early: {error.ended.job} has no figure, and the sweeper needs one", file=sys.stderr)
            return gravest(each.code for each in ended.values()) or FAILED
        finally:
            _tell(list(ended.values()))
    if not ended:
        _show_formats(command, arguments)
    if plans := [each.plan for each in ended.values() if each.plan is not None]:
        print(sum(plans[1:], plans[0]).sentence())
        print("Nothing was measured or written.")
    if drawings := [each.drawing for each in ended.values() if each.drawing is not None]:
        from numdev.cli import drawing

        drawing.draw(drawings)
    return gravest(each.code for each in ended.values())


def _show_formats(command: str, arguments: list[str]) -> None:
    """Behind the settings that `--cfg job` shows, the format of every step: null, as they have it, is that of the preset."""
    _, given = flags.read(arguments)
    if getattr(given, "cfg", None) not in ("job", "all") or "package" in given or command == "report":
        return
    for line in resolved.formats(CONFIGS[command], arguments):
        print(line)


def _tell(ended: Sequence[Ended]) -> None:
    """Print what was wrong with each job, with its overrides if there are several jobs."""
    for each in ended:
        if each.sentence:
            print(f"{each.job}: {each.sentence}" if len(ended) > 1 else each.sentence, file=sys.stderr)


def ordered(command: str, arguments: list[str]) -> list[str]:
    """The arguments with overrides before flags, which Hydra's parser wants in one piece, and with the number of shards.

    A sweep over `shard` says by itself how many shards there are; `shards=` is added unless it is given.

    Raises:
        BadInput: for a flag that Hydra does not have, and for a setting that is given twice.
    """
    overrides, others = flags.split(command, arguments)
    if command == "report":  # `study` alone is a group of files to Hydra, and results outlive the files
        overrides = [re.sub("^study=", "studies=", text) for text in overrides]
    try:
        every = OverridesParser.create().parse_overrides(overrides)
    except OverrideParseException:
        return [*overrides, *others]  # Hydra reports the error
    given: dict[str, Override] = {}
    for override in every:
        key = override.get_key_element().lstrip("+~")
        if key in given and not key.startswith("hydra"):
            one, other = (str(each.input_line).partition("=")[2] for each in (given[key], override))
            both = "" if command == "report" else f", or -m {key}={one},{other} for both"
            raise BadInput(key, other, f"{key}={one} is given too; give one value{both}")
        given[key] = override
    if command == "report":
        return [*overrides, *others]
    folder = ["hydra.sweep.dir=."] if "dry_run" in given and given["dry_run"].value() is True else []  # or Hydra makes one
    return [*overrides, *_shards(given), *folder, *others]


def _shards(given: Mapping[str, Override]) -> list[str]:
    if "shard" not in given or "shards" in given or not given["shard"].is_sweep_override():
        return []
    return [f"shards={len(list(given['shard'].sweep_iterator()))}"]
