"""Jobs of a command: the task that Hydra runs, here or elsewhere, and the launcher that keeps what jobs return."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict

from numdev.cli import commands
from numdev.cli.compose import make_importable, overrides_of
from numdev.cli.exit_codes import FAILED, KNOWN, Ended, code_of, sentence_of, unforeseen
from numdev.errors import BadInput

_FUNCTIONS = {"map": "error_map"}
"""Of the commands whose names Python has taken."""
_KEEPING = "hydra_plugins.numdev_sweep.KeepingLauncher"
_WITHOUT_FIGURES = "basic"  # the sweeper that needs none


class NoFigure(Exception):
    """A job's lack of a figure for the sweeper, which counts the job as failed and decides whether to continue."""


@dataclass(frozen=True)
class Job:
    """Hydra's task.

    Attributes:
        command: its name, that of a function of `numdev.cli.commands` unless `_FUNCTIONS` names another.
        arguments: those of the command, of all its jobs.
        tracebacks: whether an error passes with its traceback.
        process: that of the command. A job that runs in another one returns what it prints.
        ended: how the jobs ended, by number, in the process of the command: `hydra.main` drops what they return.
    """

    command: str
    arguments: tuple[str, ...] = ()
    tracebacks: bool = False
    process: int = field(default_factory=os.getpid)
    ended: dict[int, Ended] = field(default_factory=dict)

    def __call__(self, cfg: DictConfig) -> Ended:
        """Run one job; a known error ends it with a sentence, and the other jobs of a sweep continue."""
        hydra, printed = HydraConfig.get(), io.StringIO()
        elsewhere = os.getpid() != self.process
        try:
            with contextlib.redirect_stdout(printed) if elsewhere else contextlib.nullcontext():
                commands.refuse_unknown(cfg, hydra.runtime.choices)
                make_importable(hydra.runtime.config_sources)
                ended: Ended = getattr(commands, _FUNCTIONS.get(self.command, self.command))(cfg, self)
        except BrokenPipeError:
            raise
        except Exception as error:
            if self.tracebacks:
                raise
            ended = Ended(code_of(error), sentence_of(error)) if isinstance(error, KNOWN) else Ended(FAILED, unforeseen(error))
        number = hydra.job.num if hydra.mode is RunMode.MULTIRUN else 0
        ended = replace(ended, overrides=tuple(overrides_of(hydra)), number=number, printed=printed.getvalue())
        self.ended[number] = ended
        return ended


class Keeping(Launcher):
    """Wraps the launcher that the user chose: checks the sweep, keeps how jobs ended, and hands figures to the sweeper."""

    def __init__(self, launcher: DictConfig) -> None:
        self.chosen = launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Set up the user's launcher.

        Raises:
            BadInput: for a sweep that cannot be run, or whose figure cannot be had.
        """
        assert isinstance(task_function, Job)
        make_importable(config.hydra.runtime.config_sources)
        _refuse(task_function.command, config, OverridesParser.create().parse_overrides(overrides_of(config.hydra)))
        with open_dict(config.hydra):
            config.hydra.launcher = self.chosen
        self.job, self.needs_figure = task_function, config.get("objective") is not None
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        returned = self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
        for each in returned:
            ended: Ended = each.return_value  # a traceback passes
            self.job.ended[ended.number] = ended
            print(ended.printed, end="")
            if self.needs_figure:
                no_figure = f"{ended.job}: {ended.sentence or 'the figure is NaN, or there is none'}"
                each.status = JobStatus.FAILED if ended.figure is None else JobStatus.COMPLETED
                each.return_value = NoFigure(no_figure) if ended.figure is None else ended.figure
        return returned


def _refuse(command: str, config: DictConfig, overrides: Sequence[Override]) -> None:
    """Raise BadInput before the first job of a sweep, if the sweeper cannot run it, or its figure cannot be had."""
    sweeper, objective = str(config.hydra.runtime.choices["hydra/sweeper"]), OmegaConf.select(config, "objective")
    for override in overrides if sweeper == _WITHOUT_FIGURES else ():
        if override.is_sweep_override() and not override.is_discrete_sweep():
            hint = "it lists no values; give a,b or range(a,b), or take hydra/sweeper=optuna, which draws some"
            raise BadInput(override.get_key_element(), str(override.input_line).partition("=")[2], hint)
    if objective is not None or sweeper != _WITHOUT_FIGURES:
        from numdev.cli import build  # late: a sweep without a figure does not wait for torch here

        if command not in ("measure", "speed"):
            raise BadInput("hydra/sweeper", sweeper, f"numdev {command} has no figure for it")
        if config.dry_run:
            raise BadInput("dry_run", True, "a dry run has no figures; leave it out, or objective= and the sweeper")
        measured = build.kind(command, config)
        build.refuse_objective(objective, measured)
        if objective is None:
            example = next(name for name in build.figures(measured) if name.rpartition(".")[2] in ("max_difference", "latency"))
            raise BadInput("hydra/sweeper", sweeper, f"it minimises a figure; name one, as in objective={example}")
    if not config.get("dry_run"):
        from numdev.results.files import refuse_unwritable

        refuse_unwritable("results" if "results" in config else "out", Path(config.hydra.sweep.dir))


class KeepReturned(Callback):
    """Puts `Keeping` before the launcher of every sweep, whatever sweeper there is."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with open_dict(config.hydra):
            config.hydra.launcher = {"_target_": _KEEPING, "_recursive_": False, "launcher": config.hydra.launcher}
