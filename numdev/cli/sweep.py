"""Splits a sweep into jobs and passes them to a launcher. `hydra_plugins.numdev_sweep` makes both known to Hydra."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from hydra.plugins.config_source import ConfigSource
from hydra.plugins.launcher import Launcher
from hydra.plugins.sweeper import Sweeper
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from numdev.cli.console import ERRORS, is_basic, output
from numdev.cli.jobs import Job, keep_returned
from numdev.cli.modules import make_importable
from numdev.cli.objective import refuse_none, refuse_unusable
from numdev.cli.plotted import asked
from numdev.cli.progress import sweep
from numdev.cli.sweeptable import HEADINGS, PLANNED, SweepTable
from numdev.cli.templates import Templates
from numdev.errors import BadInput

_MOST_HELD = 2000  # composed jobs, of about 100 kB each
_KEEPING = "hydra_plugins.numdev_sweep.KeepingLauncher"
_WANT_NO_FIGURE = ("numdev", "basic")
MEASURING = ("measure", "speed")  # the commands whose jobs have figures

Batch = Sequence[Sequence[str]]  # the overrides of each job


class ComposedOnce(ConfigLoader):
    """Hydra's loader, which composes each job once: to check it, and for a launcher that runs it in this process.

    A copy in another process composes its own.
    """

    def __init__(self, loader: ConfigLoader) -> None:
        self.loader, self.templates = loader, Templates(loader)
        self.composed: dict[tuple[str, ...], DictConfig] = {}

    def check(self, config: DictConfig, batch: Batch) -> None:
        """Compose the jobs of a batch, so that a mistake in one of them is found before the first job runs."""
        for overrides in batch:
            composed = self.templates.job(config, overrides)
            if len(self.composed) < _MOST_HELD:
                self.composed[tuple(overrides)] = composed

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        held = self.composed.pop(tuple(sweep_overrides), None)
        return self.templates.job(master_config, sweep_overrides) if held is None else held

    def __reduce__(self) -> tuple[Any, ...]:
        return ComposedOnce, (self.loader,)

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        return self.loader.load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)

    def get_search_path(self) -> ConfigSearchPath:
        return self.loader.get_search_path()

    def get_sources(self) -> list[ConfigSource]:
        return self.loader.get_sources()

    def list_groups(self, parent_name: str) -> list[str]:
        return self.loader.list_groups(parent_name)

    def get_group_options(
        self,
        group_name: str,
        results_filter: ObjectType | None = ObjectType.CONFIG,
        config_name: str | None = None,
        overrides: list[str] | None = None,
    ) -> list[str]:
        return self.loader.get_group_options(group_name, results_filter, config_name, overrides)

    def compute_defaults_list(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> Any:
        return self.loader.compute_defaults_list(config_name, overrides, run_mode)


class Combinations(Sweeper):
    """Every combination of the values that overrides list, in the order of Hydra's basic sweeper; each job is composed once."""

    config: DictConfig
    launcher: Launcher
    loader: ComposedOnce

    def __init__(self, max_batch_size: int | None = None, params: Mapping[str, Any] | None = None) -> None:
        self.max_batch_size = max_batch_size
        self.params = params or {}

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        self.config, self.loader = config, ComposedOnce(hydra_context.config_loader)
        self.hydra_context = HydraContext(self.loader, hydra_context.callbacks)
        self.launcher = Plugins.instance().instantiate_launcher(self.hydra_context, task_function, config)

    def sweep(self, arguments: list[str]) -> list[Sequence[JobReturn]]:
        """Run every combination; returns what the jobs did, by batch.

        Raises:
            BadInput: for values that cannot be listed, such as an interval.
        """
        texts = [f"{name}={value}" for name, value in self.params.items()] + arguments
        jobs = combinations(OverridesParser.create(config_loader=self.loader).parse_overrides(texts))
        if not self.config.get("dry_run"):
            folder = Path(self.config.hydra.sweep.dir)
            from numdev.results.files import refuse_unwritable  # late: neither help nor completion needs it

            refuse_unwritable("results" if "results" in self.config else "out", folder)
            folder.mkdir(parents=True, exist_ok=True)
            OmegaConf.save(self.config, folder / "multirun.yaml")
        returned: list[Sequence[JobReturn]] = []
        for start, batch in self._batches(jobs):
            self.loader.check(self.config, batch)
            returned.append(self.launcher.launch(batch, initial_job_idx=start))
            for job in returned[-1]:
                _ = job.return_value  # raises what the job raised
        return returned

    def _batches(self, jobs: Batch) -> Iterator[tuple[int, Batch]]:
        size = self.max_batch_size or len(jobs)
        for start in range(0, len(jobs), size):
            yield start, jobs[start : start + size]


def combinations(overrides: Sequence[Override]) -> list[tuple[str, ...]]:
    """The overrides of every job; of two for one setting the later holds.

    Raises:
        BadInput: for an override that lists no values.
    """
    listed: dict[str, list[str]] = {}
    for override in overrides:
        key = override.get_key_element()
        if not override.is_sweep_override():
            listed[key] = [f"{key}={override.get_value_element_as_str()}"]
        elif override.is_discrete_sweep():
            listed[key] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        else:
            text = str(override.input_line).partition("=")[2]
            raise BadInput(
                key, text, "it lists no values; give a,b or range(a,b), or take hydra/sweeper=optuna, which draws some"
            )
    return list(itertools.product(*listed.values()))


class Keeping(Launcher):
    """Wraps the launcher that the user chose: prints the header of the sweep's table, and keeps what jobs return."""

    def __init__(self, launcher: DictConfig) -> None:
        self.chosen = launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Set up the user's launcher.

        Raises:
            BadInput: if the sweeper wants a figure and none is named, or there is no such figure.
        """
        assert isinstance(task_function, Job)
        sweeper = str(config.hydra.runtime.choices["hydra/sweeper"])
        objective = OmegaConf.select(config, "objective")
        if objective is not None or sweeper not in _WANT_NO_FIGURE:
            self._check(objective, sweeper, task_function.command, config)
        if config.get("dry_run") and sweeper != "numdev":
            raise BadInput("hydra/sweeper", sweeper, "it needs figures, and a dry run measures nothing; leave it out")
        given = OverridesParser.create().parse_overrides(list(config.hydra.overrides.task))
        if asked(config):
            self._check_figure(task_function.command, config, given)
        with open_dict(config.hydra):
            config.hydra.launcher = self.chosen
        self.table = _table(task_function, config)
        self.constant = [override.get_key_element() for override in given if not override.is_sweep_override()]
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    @staticmethod
    def _check(objective: str | None, sweeper: str, command: str, config: DictConfig) -> None:
        from numdev.cli.runners import kind  # late: a sweep without a figure does not wait for torch here

        make_importable(config.hydra.runtime.config_sources)
        measured = kind(command, config) if command in MEASURING else None
        if objective is None or measured is None:
            refuse_none(sweeper, measured, command)
        else:
            refuse_unusable(objective, measured)

    @staticmethod
    def _check_figure(command: str, config: DictConfig, given: Sequence[Override]) -> None:
        """Refuse a figure of the sweep that cannot be drawn."""
        from numdev.cli import drawing, placed  # late, as above

        make_importable(config.hydra.runtime.config_sources)
        names = [one.key_or_group for one in given if one.is_sweep_override()]
        wanted = next((one for one in given if one.key_or_group == "study"), None)
        studies = (
            () if wanted is None else wanted.sweep_string_iterator() if wanted.is_sweep_override() else [str(wanted.value())]
        )
        drawing.refuse_of_sweep(config, command, [*names, *placed.params_of(config.hydra)], list(studies))

    def launch(self, job_overrides: Batch, initial_job_idx: int) -> Sequence[JobReturn]:
        if any(text.startswith("study=") for text in job_overrides[0]):
            self.table.headings = None
        if self.table.headings is None:
            bar: AbstractContextManager[None] = nullcontext()
        else:
            if not self.table.axes:
                self.table.lay_out(job_overrides, self.constant)
                output().print(self.table.header(job_overrides[0]), soft_wrap=True)
            bar = sweep(len(job_overrides), ERRORS) if is_basic(self.chosen) else nullcontext()
        with bar:
            returned = self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
        for job in returned:
            keep_returned(job)
        return returned


def _table(job: Job, config: DictConfig) -> SweepTable:
    """The table of a sweep over points; that of a sweep over studies, or of one that prints every metric, has no lines."""
    if config.get("study") is None and job.command in HEADINGS and config.metrics == "chief":
        job.table.headings = PLANNED if config.dry_run else HEADINGS[job.command]
    return job.table


class KeepReturned(Callback):
    """Puts `Keeping` before the launcher of every sweep, whatever sweeper there is."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with open_dict(config.hydra):
            config.hydra.launcher = {"_target_": _KEEPING, "_recursive_": False, "launcher": config.hydra.launcher}
