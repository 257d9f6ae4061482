"""Hands a command to Hydra, and derives its exit code from what its jobs returned."""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
import tempfile
from argparse import SUPPRESS, ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import hydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from numdev.cli import plotted
from numdev.cli.compose import Composer, composer, config_folder, register
from numdev.cli.exit_codes import FAILED, KNOWN, code_of, sentence_of, unforeseen, worst
from numdev.cli.jobs import Job, NoFigure, Outlet, ended_jobs
from numdev.cli.plain import wrapped
from numdev.errors import BadInput

CONFIGS = {"map": "map", "measure": "config", "paper": "paper", "report": "report", "speed": "speed", "train": "train"}
MULTIRUN = ("--multirun", "-m")
_FLAGS = (("--help", "-h"), ("--hydra-help",), ("--version",), ("--resolve",), ("--run", "-r"), MULTIRUN)
_FLAGS_WITH_VALUE = (
    *(("--cfg", "-c"), ("--package", "-p"), ("--config-path", "-cp"), ("--config-name", "-cn"), ("--config-dir", "-cd")),
    ("--experimental-rerun",),
)


def flag_parser() -> ArgumentParser:
    """Reads a command line as Hydra does, with the flags that it documents; Hydra itself checks their values."""
    parser = ArgumentParser(add_help=False, argument_default=SUPPRESS)
    parser.add_argument("overrides", nargs="*", default=[])
    for names in (*_FLAGS, ("--shell-completion", "-sc")):
        parser.add_argument(*names, action="store_true")
    for names in _FLAGS_WITH_VALUE:
        parser.add_argument(*names)
    parser.add_argument("--info", "-i", nargs="?")
    return parser


def read(arguments: Sequence[str]) -> tuple[list[str], Namespace]:
    """The overrides, and the flags by name, without unknown ones."""
    parsed, _ = flag_parser().parse_known_intermixed_args(arguments)
    return parsed.overrides, parsed


def split(command: str, arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Separate overrides from flags with their values, which may stand between them on the command line.

    Raises:
        BadInput: for a flag that Hydra does not have.
    """
    parsed, unknown = flag_parser().parse_known_intermixed_args(arguments)
    if unknown:
        raise BadInput(f"numdev {command}", unknown[0], f"there is no such flag; numdev {command} --hydra-help lists them")
    flags = list(arguments)
    for override in parsed.overrides:
        flags.remove(override)
    return parsed.overrides, flags


@contextlib.contextmanager
def process(arguments: Sequence[str], **environment: str) -> Iterator[None]:
    """Set the arguments of the process and some variables of its environment, which Hydra reads; both are put back at the end."""
    argv, before = sys.argv, {name: os.environ.get(name) for name in environment}
    sys.argv = [argv[0], *arguments]
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv = argv
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def launch(command: str, arguments: list[str]) -> int:
    """Run a command with Hydra's arguments; returns the exit code.

    Hydra prints an error with its own frames and exits with 1, unless HYDRA_FULL_ERROR is set. So this function sets it and
    prints one sentence for an error. If the user has set it, errors keep their tracebacks.
    """
    register()
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return _run(command, arguments, tracebacks=True)
    try:
        if {"--help", "-h"} & set(arguments):
            print(help_of(command, arguments))
            return 0
        return _run(command, arguments)
    except KNOWN as error:
        print(sentence_of(error, _composer(command, arguments)), file=sys.stderr)
        return code_of(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        print(unforeseen(error), file=sys.stderr)
        return FAILED


def help_of(command: str, arguments: list[str]) -> str:
    """Hydra's help of a command, its long lines wrapped for a terminal of 80 columns."""
    printed = io.StringIO()
    ends = contextlib.suppress(SystemExit)  # Hydra ends the process after its help
    with ends, contextlib.redirect_stdout(printed), process(arguments, HYDRA_FULL_ERROR="1"):
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIGS[command])(lambda _: None)()
    return wrapped(printed.getvalue().rstrip())


def _composer(command: str, arguments: list[str]) -> Composer | None:
    """The settings of the operation and the folders that the arguments name; None where these cannot be composed."""
    overrides, flags = read(arguments)
    folders = (config_folder(), *((Path(flags.config_dir).resolve(),) if "config_dir" in flags else ()))
    operations = [text.partition("=")[2].partition(",")[0] for text in overrides if text.startswith("operation=")]
    known = composer(folders, getattr(flags, "config_name", CONFIGS[command]), operations[-1] if operations else None)
    try:
        known.choices  # noqa: B018  it is composed here
    except (*KNOWN, OSError):
        return None
    return known


def _run(command: str, arguments: list[str], *, tracebacks: bool = False) -> int:
    arguments = [plotted.braced(text) for text in arguments]
    job = Job(command, Outlet.here(), tracebacks, tuple(arguments))
    with ended_jobs() as ended, tempfile.TemporaryDirectory() as scratch:
        try:
            with process(ordered(command, arguments, scratch), HYDRA_FULL_ERROR="1"):
                hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIGS[command])(job)()
        except NoFigure as error:
            print(f"the sweep ended early: {error.ended.job} has no figure, and the sweeper needs one", file=sys.stderr)
            return worst(each.code for each in ended.values()) or FAILED
        finally:
            for each in ended.values():
                if each.sentence:
                    print(f"{each.job}: {each.sentence}" if len(ended) > 1 else each.sentence, file=sys.stderr)
    if not ended:
        _show_formats(command, arguments)
    if plans := [each.plan for each in ended.values() if each.plan is not None]:
        print(sum(plans[1:], plans[0]).sentence())
        print("Nothing was measured or written.")
    if drawings := [each.drawing for each in ended.values() if each.drawing is not None]:
        from numdev.cli import figures

        figures.draw(drawings)
    return worst(each.code for each in ended.values())


def _show_formats(command: str, arguments: list[str]) -> None:
    """Behind the settings that `--cfg job` shows, the format of every step: null, as they have it, is that of the preset."""
    _, flags = read(arguments)
    if getattr(flags, "cfg", None) in ("job", "all") and "package" not in flags and command != "report":
        from numdev.cli import resolved

        for line in resolved.formats(CONFIGS[command], arguments):
            print(line)


def ordered(command: str, arguments: list[str], scratch: str = ".") -> list[str]:
    """The arguments with overrides before flags, which Hydra's parser wants in one piece, and with the number of shards.

    A sweep over `shard` says by itself how many shards there are; `shards=` is added unless it is given. In a dry run the folder
    `scratch` takes what Hydra writes of a sweep.

    Raises:
        BadInput: for a flag that Hydra does not have, and for a setting that is given twice.
    """
    texts, flags = split(command, arguments)
    if command == "report":  # `study` alone is a group of files to Hydra, and results outlive the files
        texts = [re.sub("^study=", "studies=", text) for text in texts]
    try:
        overrides = _by_name(command, OverridesParser.create().parse_overrides(texts))
    except OverrideParseException:
        return [*texts, *flags]  # Hydra reports the error
    more = []
    if command != "report":
        shard = overrides.get("shard")
        if shard is not None and "shards" not in overrides and shard.is_sweep_override():
            more.append(f"shards={len(list(shard.sweep_iterator()))}")
        if "dry_run" in overrides and overrides["dry_run"].value() is True:
            more.append(f"hydra.sweep.dir={scratch}")
    return [*texts, *more, *flags]


def _by_name(command: str, overrides: Sequence[Override]) -> Mapping[str, Override]:
    """The overrides by the setting that they name; BadInput where two name one."""
    by_name: dict[str, Override] = {}
    for override in overrides:
        key = override.get_key_element().lstrip("+~")
        if key in by_name and not key.startswith("hydra"):
            one, other = (str(each.input_line).partition("=")[2] for each in (by_name[key], override))
            both = "" if command == "report" else f", or -m {key}={one},{other} for both"
            raise BadInput(key, other, f"{key}={one} is given too; give one value{both}")
        by_name[key] = override
    return by_name
