"""Handing a command to Hydra, and making one end of what its jobs returned."""

from __future__ import annotations

import copy
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import get_args_parser
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.utils import JobReturn
from hydra.errors import OverrideParseException
from hydra.plugins.config_source import ConfigResult
from omegaconf import DictConfig

from numdev.cli import app, schema
from numdev.cli.library import config_folder
from numdev.cli.outcome import KNOWN, Ended, code_of, gravest, sentence_of
from numdev.errors import BadInput

CONFIGS = {"measure": "config", "paper": "paper", "report": "report", "speed": "speed"}
_MOST_KEPT = 2000  # composed jobs, of about 100 kB each


def launch(command: str, arguments: list[str]) -> int:
    """Run a command with Hydra's arguments; returns the exit code.

    Hydra prints an error and its own frames and exits with 1, unless HYDRA_FULL_ERROR is set. So it is set while Hydra works,
    and what it lets through is said here in a sentence. Where the user has set it, everything passes with its traceback.
    """
    schema.register()
    wants_traceback = os.environ.get("HYDRA_FULL_ERROR") == "1"
    task = getattr(app, command)
    if wants_traceback:
        return _run(task.__wrapped__, command, arguments)
    try:
        with mock.patch.dict(os.environ, HYDRA_FULL_ERROR="1"):
            return _run(task, command, arguments)
    except KNOWN as error:
        print(sentence_of(error), file=sys.stderr)
        return code_of(error)
    except BrokenPipeError:
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or [""])[0]
        print(f"numdev failed: {type(error).__name__}: {first}; HYDRA_FULL_ERROR=1 shows where", file=sys.stderr)
        return 1


def _run(task: app.Task, command: str, arguments: list[str]) -> int:
    with mock.patch.object(sys, "argv", [sys.argv[0], *ordered(command, arguments)]), _returned() as returned, _composed_once():
        hydra.main(version_base="1.3", config_path=str(config_folder()), config_name=CONFIGS[command])(task)()
    jobs = [job for job in returned if isinstance(job, Ended)]
    failed = [job for job in jobs if job.sentence]
    for job in failed:
        prefix = f"{job.job}: " if len(jobs) > 1 else ""
        print(f"{prefix}{job.sentence}", file=sys.stderr)
    return gravest(job.code for job in jobs)


@contextmanager
def _returned() -> Iterator[list[Any]]:
    """What the jobs of a run return, which `hydra.main` drops; also those that a launcher runs elsewhere."""
    found: list[Any] = []

    def keeping(original: Any) -> Any:
        def method(*args: Any, **keywords: Any) -> Any:
            result = original(*args, **keywords)
            _collect(result, found)
            return result

        return method

    with mock.patch.multiple(Hydra, run=keeping(Hydra.run), multirun=keeping(Hydra.multirun)):
        yield found


def _collect(result: Any, found: list[Any]) -> None:
    """A run returns a JobReturn, a sweep lists of them; another sweeper may return nothing."""
    if isinstance(result, JobReturn):
        found.append(result.return_value)
    elif isinstance(result, (list, tuple)):
        for item in result:
            _collect(item, found)


@contextmanager
def _composed_once() -> Iterator[None]:
    """Let a sweep read each file once, and compose each job once.

    Hydra composes every job to check the whole sweep, and a second time to run it, each time from the files; that is a
    quarter of a second for each point.
    """
    compose, read = ConfigLoaderImpl.load_sweep_config, ConfigRepository.load_config
    checked: dict[tuple[str, ...], DictConfig] = {}
    files: dict[str, ConfigResult | None] = {}

    def load_sweep_config(loader: ConfigLoaderImpl, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        key = tuple(sweep_overrides)
        if key in checked:
            return checked.pop(key)
        config = compose(loader, master_config, sweep_overrides)
        if len(checked) < _MOST_KEPT:
            checked[key] = config
        return config

    def load_config(repository: ConfigRepository, config_path: str) -> ConfigResult | None:
        if config_path not in files:
            files[config_path] = read(repository, config_path)
        return copy.deepcopy(files[config_path])

    with (
        mock.patch.object(ConfigLoaderImpl, "load_sweep_config", load_sweep_config),
        mock.patch.object(ConfigRepository, "load_config", load_config),
    ):
        yield


def ordered(command: str, arguments: list[str]) -> list[str]:
    """The arguments with overrides before flags, which Hydra's parser wants in one piece, and with the number of shards.

    A sweep over `shard` says by itself how many shards there are; `shards=` is added unless it is given.

    Raises:
        BadInput: for a flag that Hydra does not have.
    """
    parser = get_args_parser()
    parsed, unknown = parser.parse_known_intermixed_args(arguments)
    if unknown:
        raise BadInput(f"numdev {command}", unknown[0], f"there is no such flag; numdev {command} --hydra-help lists them")
    flags = list(arguments)
    for override in parsed.overrides:
        flags.remove(override)
    if command == "report":  # `study` alone is a group of files to Hydra, and results outlive the files
        return [*(re.sub("^study=", "studies=", text) for text in parsed.overrides), *flags]
    return [*parsed.overrides, *_shards(parsed.overrides), *flags]


def _shards(texts: list[str]) -> list[str]:
    try:
        overrides = OverridesParser.create().parse_overrides(texts)
    except OverrideParseException:
        return []  # Hydra will say so
    given = {override.key_or_group: override for override in overrides}
    if "shard" not in given or "shards" in given or not given["shard"].is_sweep_override():
        return []
    return [f"shards={len(list(given['shard'].sweep_iterator()))}"]
