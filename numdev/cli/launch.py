"""From the arguments of a command to the jobs that Hydra runs, here or elsewhere, and to how all of them ended."""

from __future__ import annotations

import contextlib
import io
import logging
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_search_path import SearchPathElement
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, open_dict

from numdev.cli.compose import (
    composer,
    make_importable,
    overrides_of,
    plain,
    register,
)
from numdev.cli.exit_codes import FAILED, Ended, code_of, sentence_of, worst
from numdev.errors import BadInput, NumdevError
from numdev.sources import config_folder

CONFIGS = {"map": "map", "measure": "config", "paper": "paper", "report": "report", "speed": "speed", "train": "train"}
FLAGS = ("--help -h", "--hydra-help", "--version", "--resolve", "--run -r", "--multirun -m")
FLAGS_WITH_VALUE = (
    *("--cfg -c", "--package -p", "--config-path -cp", "--config-name -cn", "--config-dir -cd"),
    *("--experimental-rerun", "--info -i"),
)
_FUNCTIONS = {"map": "error_map", "speed": "measure"}  # Python has taken the name of one, and two differ in their runners alone
_KEEPING = "hydra_plugins.numdev_sweep.KeepingLauncher"


@dataclass(frozen=True)
class Job:
    """Hydra's task: a command with its arguments, which all its jobs share."""

    command: str  # a function of `numdev.cli.commands`, unless `_FUNCTIONS` names another
    arguments: tuple[str, ...] = ()
    tracebacks: bool = False  # whether an error passes with its traceback
    process: int = field(default_factory=os.getpid)  # that of the command; a job in another one returns what it prints
    ended: dict[int | None, Ended] = field(default_factory=dict)  # by the job's number: `hydra.main` drops what jobs return

    def __call__(self, cfg: DictConfig) -> Ended:
        """Run one job; an error ends it with a sentence, and the other jobs of a sweep continue."""
        hydra, printed = HydraConfig.get(), io.StringIO()
        try:
            with contextlib.redirect_stdout(printed) if os.getpid() != self.process else contextlib.nullcontext():
                make_importable(hydra.runtime.config_sources)
                commands = import_module("numdev.cli.commands")  # late: help needs no torch
                ended: Ended = getattr(commands, _FUNCTIONS.get(self.command, self.command))(cfg, self)
        except Exception as error:
            if self.tracebacks or isinstance(error, BrokenPipeError):
                raise
            ended = Ended(code_of(error), sentence_of(error))
        number = hydra.job.num if hydra.mode is RunMode.MULTIRUN else None
        ended = replace(ended, overrides=tuple(plain(hydra.overrides)["task"]), number=number, printed=printed.getvalue())
        self.ended[number] = ended
        return ended


class Lost(NumdevError):
    """A launcher could not start its jobs, or one ended without an answer, as a job of Slurm that is cancelled does."""

    def __init__(self, error: Exception) -> None:
        lines = str(error).strip().splitlines()[:2]  # of submitit: which job and where its logs are, then its state
        reason = " ".join([f"{type(error).__name__}:", *map(str.strip, lines)])
        super().__init__(f"hydra/launcher: {reason}; points that are finished are kept, and the same command continues")


class KeepReturned(Callback):
    """Puts `Keeping` before the launcher of every sweep, whatever sweeper there is."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with open_dict(config.hydra):
            config.hydra.launcher = {"_target_": _KEEPING, "_recursive_": False, "launcher": config.hydra.launcher}


class Keeping(Launcher):
    """Wraps the launcher that the user chose: refuses a sweep that cannot be run, and keeps how the jobs ended."""

    def __init__(self, launcher: DictConfig) -> None:
        self.chosen = launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        assert isinstance(task_function, Job)
        _refuse(config)
        self.is_own = config.hydra.runtime.choices["hydra/launcher"] == "basic"  # Hydra's, which runs the jobs in this process
        with open_dict(config.hydra):
            config.hydra.launcher = self.chosen
        self.job, self.launcher = task_function, Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        try:
            returned = self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
        except Exception as error:
            if self.is_own or self.job.tracebacks or isinstance(error, BrokenPipeError) or code_of(error) != FAILED:
                raise
            raise Lost(error) from error
        for each in returned:
            ended: Ended = each.return_value  # a traceback passes
            self.job.ended[ended.number] = ended
            print(ended.printed, end="")
        return returned


def _refuse(config: DictConfig) -> None:
    """Raise BadInput before the first job of a sweep that the sweeper cannot run."""
    sweeper = str(config.hydra.runtime.choices["hydra/sweeper"])
    if sweeper != "basic":
        if config.get("objective") is None:
            hint = "it minimises a figure; name one, as in objective=out.max_difference, or objective=latency of numdev speed"
            raise BadInput("hydra/sweeper", sweeper, hint)
    else:
        for override in overrides_of(config.hydra):
            if override.is_sweep_override() and not override.is_discrete_sweep():
                hint = "it lists no values; give a,b or range(a,b), or take hydra/sweeper=optuna, which draws some"
                raise BadInput(override.get_key_element(), str(override.input_line).partition("=")[2], hint)
    if not config.get("dry_run"):
        from numdev.results.store import refuse_unwritable

        refuse_unwritable("results" if "results" in config else "out", Path(config.hydra.sweep.dir))


def launch(command: str, arguments: list[str]) -> int:
    """Run a command with Hydra's arguments; returns the exit code.

    Hydra prints an error with its own frames and exits with 1, unless HYDRA_FULL_ERROR is set. So this function sets it and
    prints one sentence for an error. If the user has set it, errors keep their tracebacks.
    """
    register()
    logging.raiseExceptions = False  # of a reader of the output that has ended
    argv, before = sys.argv, os.environ.get("HYDRA_FULL_ERROR", "")
    job = Job(command, tuple(braced(command, argument) for argument in arguments), tracebacks=before == "1")
    try:
        with tempfile.TemporaryDirectory() as scratch:
            sys.argv, os.environ["HYDRA_FULL_ERROR"] = [argv[0], *ordered(command, job.arguments, scratch)], "1"
            if (folder := parsed(job.arguments)[0].config_dir) is not None:
                make_importable([SearchPathElement("command-line", folder)])  # callbacks, which Hydra makes first
            try:
                hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIGS[command])(job)()
            finally:
                _show(job)
    except Exception as error:
        if job.tracebacks or isinstance(error, (NumdevError, BrokenPipeError)):
            raise
        _check_overrides(job)
        raise error from error.__cause__
    finally:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = argv, before
    return worst(each.code for each in job.ended.values())


def _show(job: Job) -> None:
    """Show what the jobs leave for the end of the command: the table of a sweep, what was wrong, and what a dry run counted."""
    if not (ended := list(job.ended.values())):
        return
    from numdev.cli import show  # late: help needs no torch

    plans = [each.plan for each in ended if each.plan is not None]
    rows = [(each.overrides, show.plan_row(each.plan) if each.plan else each.row) for each in ended if each.number is not None]
    if shown := [item for item in rows if item[1]]:
        show.sweep("dry_run" if plans else job.command, shown)
    for sentence in dict.fromkeys(each.sentence for each in ended if each.sentence):
        own = [" ".join(each.overrides) for each in ended if each.sentence == sentence]
        print(sentence if len(own) == len(ended) else f"{'; '.join(own)}: {sentence}", file=sys.stderr)
    if plans:
        print(show.plan(plans))


def _check_overrides(job: Job) -> None:
    """Raise BadInput for the first override that cannot be used by itself, which says more than Hydra does."""
    flags = parsed(job.arguments)[0]
    folders = (config_folder(), *([Path(flags.config_dir).resolve()] if flags.config_dir else []))
    overrides = OverridesParser.create().parse_overrides(flags.overrides)
    values = {override.key_or_group: str(override.value()) for override in overrides if not override.is_sweep_override()}
    own = composer(folders, flags.config_name or CONFIGS[job.command], values.get("operation"))
    options = {group: option for group, option in values.items() if group in own.choices}
    for override in overrides:
        if not override.key_or_group.startswith("hydra"):
            own.check(override, options, is_sweep=flags.multirun)
        if override.key_or_group.startswith("study.") and "study" not in values:
            raise BadInput(override.key_or_group, override.value(), "it is of a study; give study=NAME too")


def parsed(arguments: Sequence[str]) -> tuple[Namespace, list[str]]:
    """The overrides and the flags of a command line as Hydra has them, and flags that Hydra does not have."""
    parser = ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("overrides", nargs="*")
    for names in FLAGS:
        parser.add_argument(*names.split(), action="store_true")
    for names in FLAGS_WITH_VALUE:
        parser.add_argument(*names.split(), nargs="?")
    return parser.parse_known_intermixed_args(arguments)


def braced(command: str, argument: str) -> str:
    """An argument as Hydra takes it: of `plot=x: a, y: b` the mapping in braces, of `title=a, b` the text in quotes.

    Of a report, `study` is `studies`: alone it is a group of files to Hydra, and results outlive the files.
    """
    name, equals, value = argument.partition("=")
    if equals and name in ("title", "author") and value != "null" and value[:1] not in ("'", '"'):
        return "".join([name, "='", value.replace("'", "\\'"), "'"])
    if name == "plot" and equals and not value.lstrip().startswith("{"):
        return f"plot={{{value}}}"
    return f"studies={value}" if (command, name, equals) == ("report", "study", "=") else argument


def ordered(command: str, arguments: Sequence[str], scratch: str = ".") -> list[str]:
    """The arguments with overrides before flags, which Hydra's parser wants in one piece, and with the number of shards.

    A sweep over `shard` says by itself how many shards there are; `shards=` is added unless it is given. In a dry run the folder
    `scratch` takes what Hydra writes of a sweep. A flag that Hydra does not have, and a setting that is given twice, are refused.
    """
    known, unknown = parsed(arguments)
    if unknown:
        raise BadInput(f"numdev {command}", unknown[0], f"there is no such flag; numdev {command} --hydra-help lists them")
    flags, texts, by_name = [*arguments], list(known.overrides), dict[str, Override]()
    for text in texts:
        flags.remove(text)
    for override in OverridesParser.create().parse_overrides(texts):
        key = override.get_key_element().lstrip("+~")
        if key in by_name and not key.startswith("hydra"):
            one, other = (str(each.input_line).partition("=")[2] for each in (by_name[key], override))
            both = "" if command == "report" else f", or -m {key}={one},{other} for both"
            raise BadInput(key, other, f"{key}={one} is given too; give one value{both}")
        by_name[key] = override
    if (shard := by_name.get("shard")) is not None and shard.is_sweep_override() and "shards" not in by_name:
        texts.append(f"shards={len(list(shard.sweep_iterator()))}")
    if "dry_run" in by_name and by_name["dry_run"].value() is True:
        texts.append(f"hydra.sweep.dir={scratch}")
    return [*texts, *flags]
