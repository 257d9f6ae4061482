"""Hands a command to Hydra, shows the table of a sweep, and derives the exit code from how its jobs ended."""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import hydra
from hydra.core.config_search_path import SearchPathElement
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import OverrideParseException

from numdev.cli.compose import Composer, composer, config_folder, make_importable, register
from numdev.cli.exit_codes import FAILED, KNOWN, code_of, sentence_of, unforeseen, worst
from numdev.cli.jobs import Job, NoFigure
from numdev.errors import BadInput

CONFIGS = {"map": "map", "measure": "config", "paper": "paper", "report": "report", "speed": "speed", "train": "train"}
FLAGS = ("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m")
FLAGS_WITH_VALUE = (
    *(
        "--cfg -c",
        "--package -p",
        "--config-path -cp",
        "--config-name -cn",
        "--config-dir -cd",
        "--experimental-rerun",
        "--info -i",
    ),
)


def parsed(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The overrides and the flags of a command line as Hydra has them, and flags that Hydra does not have."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in FLAGS:
        parser.add_argument(*names.split(), action="store_true")
    for names in FLAGS_WITH_VALUE:
        parser.add_argument(*names.split(), nargs="?")
    return parser.parse_known_intermixed_args(arguments)


@contextlib.contextmanager
def process(arguments: Sequence[str], **environment: str) -> Iterator[None]:
    """Set the arguments of the process and some variables of its environment, which Hydra reads; both are put back at the end."""
    argv, before = sys.argv, os.environ.copy()
    sys.argv = [argv[0], *arguments]
    os.environ.update(environment)
    try:
        yield
    finally:
        sys.argv = argv
        for name in environment:
            os.environ.pop(name)
            os.environ.update({name: before[name]} if name in before else {})


def launch(command: str, arguments: list[str]) -> int:
    """Run a command with Hydra's arguments; returns the exit code.

    Hydra prints an error with its own frames and exits with 1, unless HYDRA_FULL_ERROR is set. So this function sets it and
    prints one sentence for an error. If the user has set it, errors keep their tracebacks.
    """
    register()
    if os.environ.get("HYDRA_FULL_ERROR") == "1":
        return _run(command, arguments, tracebacks=True)
    try:
        return _run(command, arguments)
    except KNOWN as error:
        print(sentence_of(error, _composer(command, arguments)), file=sys.stderr)
        return code_of(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        print(unforeseen(error), file=sys.stderr)
        return FAILED


def _folders(flags: Namespace) -> tuple[Path, ...]:
    """The config folders of a command: that of numdev, and the user's own."""
    return config_folder(), *((Path(flags.config_dir).resolve(),) if flags.config_dir else ())


def _composer(command: str, arguments: list[str]) -> Composer | None:
    """The settings of the operation and the folders that the arguments name; None where these cannot be composed."""
    known = parsed(arguments)[0]
    operations = [text.partition("=")[2].partition(",")[0] for text in known.overrides if text.startswith("operation=")]
    own = composer(_folders(known), known.config_name or CONFIGS[command], operations[-1] if operations else None)
    try:
        own.choices  # noqa: B018  it is composed here
    except (*KNOWN, OSError):
        return None
    return own


def _run(command: str, arguments: list[str], *, tracebacks: bool = False) -> int:
    arguments = [braced(text) for text in arguments]
    job, own = Job(command, tuple(arguments), tracebacks), parsed(arguments)[0].config_dir
    make_importable([SearchPathElement("command-line", own)] if own else [])  # callbacks, which Hydra makes first
    with tempfile.TemporaryDirectory() as scratch:
        try:
            with process(ordered(command, arguments, scratch), HYDRA_FULL_ERROR="1"):
                hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIGS[command])(job)()
        except NoFigure as error:
            print(f"the sweep ended early, since the sweeper needs a figure of each job; {error}", file=sys.stderr)
            return worst(each.code for each in job.ended.values()) or FAILED
        finally:
            ended, plans = list(job.ended.values()), [each.plan for each in job.ended.values() if each.plan is not None]
            if rows := [(each.overrides, each.row) for each in ended if each.row]:
                from numdev.cli import show

                show.sweep("dry_run" if plans else command, rows)
            for sentence in dict.fromkeys(each.sentence for each in ended if each.sentence):
                own = [each.job for each in ended if each.sentence == sentence]
                print(sentence if len(own) == len(ended) else f"{'; '.join(own)}: {sentence}", file=sys.stderr)
    if plans:
        print(sum(plans[1:], plans[0]).sentence())
        print("Nothing was measured or written.")
    return worst(each.code for each in ended)


def braced(argument: str) -> str:
    """An argument as Hydra takes it: of `plot=x: a, y: b` the mapping in braces, of `title=a, b` the text in quotes."""
    name, equals, value = argument.partition("=")
    if equals and name in ("title", "author") and value != "null" and value[:1] not in ("'", '"'):
        return "".join([name, "='", value.replace("'", "\\'"), "'"])
    return f"plot={{{value}}}" if name == "plot" and equals and not value.lstrip().startswith("{") else argument


def ordered(command: str, arguments: list[str], scratch: str = ".") -> list[str]:
    """The arguments with overrides before flags, which Hydra's parser wants in one piece, and with the number of shards.

    A sweep over `shard` says by itself how many shards there are; `shards=` is added unless it is given. In a dry run the folder
    `scratch` takes what Hydra writes of a sweep.

    Raises:
        BadInput: for a flag that Hydra does not have, and for a setting that is given twice.
    """
    known, unknown = parsed(arguments)
    if unknown:
        raise BadInput(f"numdev {command}", unknown[0], f"there is no such flag; numdev {command} --hydra-help lists them")
    flags = list(arguments)
    for text in known.overrides:
        flags.remove(text)
    # `study` alone is a group of files to Hydra, and results outlive the files
    texts = [re.sub("^study=", "studies=", text) if command == "report" else text for text in known.overrides]
    try:
        overrides = _by_name(command, OverridesParser.create().parse_overrides(texts))
    except OverrideParseException:
        return [*texts, *flags]  # Hydra reports the error
    if (shard := overrides.get("shard")) is not None and shard.is_sweep_override() and "shards" not in overrides:
        texts.append(f"shards={len(list(shard.sweep_iterator()))}")
    if "dry_run" in overrides and overrides["dry_run"].value() is True:
        texts.append(f"hydra.sweep.dir={scratch}")
    return [*texts, *flags]


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
