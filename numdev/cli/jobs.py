"""Jobs of a command: the task that Hydra runs, here or elsewhere; what jobs return; the table of a sweep, a line for each job."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.plugins import Plugins
from hydra.core.utils import JobReturn, JobStatus
from hydra.experimental.callback import Callback
from hydra.plugins.launcher import Launcher
from hydra.types import HydraContext, RunMode, TaskFunction
from omegaconf import DictConfig, OmegaConf, open_dict
from rich.text import Text

from numdev.cli import commands
from numdev.cli.compose import make_importable, overrides_of
from numdev.cli.exit_codes import FAILED, KNOWN, Ended, code_of, sentence_of, unforeseen
from numdev.cli.progress import output
from numdev.errors import BadInput

if TYPE_CHECKING:
    from numdev.results.record import Status

_FUNCTIONS = {"map": "error_map"}
"""Of the commands whose names Python has taken."""
_KEEPING = "hydra_plugins.numdev_sweep.KeepingLauncher"
_WITHOUT_FIGURES = "basic"  # the sweeper that needs none
_GAP = "  "
_NOT_IN_HEADER = ("dry_run", "plot", "out")  # of the settings that all jobs share
_STYLES = {"ok": "green", "unsupported": "yellow"}  # by the status in words: results are imported late
_ENDED: ContextVar[dict[int, Ended] | None] = ContextVar("ended", default=None)
_JOB: ContextVar[Job | None] = ContextVar("job", default=None)


class Figure(float):
    """The figure that a sweep minimises, and how its job ended."""

    ended: Ended

    def __new__(cls, value: float, ended: Ended) -> Figure:
        made = super().__new__(cls, value)
        made.ended = ended
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return Figure, (float(self), self.ended)


class NoFigure(Exception):
    """Raised by a job without a figure for the sweeper, which counts the job as failed and decides whether to continue."""

    def __init__(self, ended: Ended) -> None:
        super().__init__(ended)
        self.ended = ended

    def __str__(self) -> str:
        return self.ended.sentence or f"{self.ended.job}: the figure is NaN, or there is none"

    __repr__ = __str__  # sweepers print lists of what they caught


HEADINGS: dict[str, tuple[str, Mapping[str, int]]] = {
    "measure": (
        "max_difference from golden, and variant / baseline with its 95 % interval",
        {"variant": 9, "baseline": 9, "variant / baseline": 19},
    ),
    "speed": (
        "time of one call, and its root mean square error",
        {"ms": 8, "TFLOP/s": 8, "of matmul": 9, "MiB": 8, "RMSE": 8},
    ),
    "train": (
        "difference of the weights from those of the reference after the last step",
        {"step": 6, "max_difference": 14, "relative_frobenius": 18, "same bits": 9},
    ),
    "dry_run": ("estimates; nothing is measured", {"replicates": 10, "time": 9, "memory": 9}),
}
"""The title of a command's table, and the names and widths of the figures; behind them stands how the job ended."""


def status_text(status: Status) -> tuple[str, str]:
    """The word and its style."""
    return status.value, _STYLES.get(status.value, "red")


@dataclass
class SweepTable:
    """Lays out the jobs of a sweep: settings that differ between jobs on the left, figures on the right.

    The launcher lays it out before the first job; jobs print their own lines, also in other processes.

    Attributes:
        command: one of `HEADINGS`; empty where jobs print no line, such as those of studies.
        axes: the settings that have columns of their own, with their widths; none before `header`.
        jobs: how many there are.
    """

    command: str = ""
    axes: dict[str, int] = field(default_factory=dict)
    jobs: int = 0

    def header(self, jobs: Sequence[Sequence[str]], constant: Iterable[str]) -> Text:
        """Title, the settings that all jobs share, and the names of the columns; `constant` are set once for all jobs."""
        fixed, self.jobs = set(constant), len(jobs)
        for name, value in (_parted(text) for job in jobs for text in job):
            if name not in fixed:
                self.axes[name] = max(self.axes.get(name, len(name)), len(value))
        title, columns = HEADINGS[self.command]
        shared = [text for text in jobs[0] if _parted(text)[0] not in (*self.axes, *_NOT_IN_HEADER)]
        title += f"; {' '.join(shared)}" if shared and self.axes else ""
        names = [name.ljust(width) for name, width in self.axes.items()] or [" ".join(jobs[0]) or "defaults"]
        names += [name.rjust(width) for name, width in columns.items()]
        return Text.assemble(title, "\n", (_GAP.join([*names, "status"]), "bold"))

    def line(self, job: Sequence[str], cells: Sequence[str], status: Status | None, remark: str) -> Text:
        """One job: `cells` are its figures, empty where it has none; then how it ended, None in a dry run, and a remark."""
        own, widths = dict(map(_parted, job)), HEADINGS[self.command][1].values()
        left = [own.get(name, "").ljust(width) for name, width in self.axes.items()] or [" ".join(job) or "defaults"]
        right = [cell.rjust(width) for cell, width in zip(cells or [""] * len(widths), widths, strict=True)]
        ended = [] if status is None else [status_text(status), ", " if remark else ""]
        return Text.assemble(_GAP.join([*left, *right, ""]), *ended, remark)


def _parted(text: str) -> tuple[str, str]:
    name, _, value = text.lstrip("+").partition("=")
    return name, value


def outlet() -> tuple[str, int, int] | None:
    """Where this process prints: host, and device and inode of its standard output; None where it has none."""
    try:
        stdout = os.fstat(1)
    except OSError:
        return None
    return platform.node(), stdout.st_dev, stdout.st_ino


@dataclass(frozen=True)
class Job:
    """Hydra's task.

    Attributes:
        command: its name, that of a function of `numdev.cli.commands` unless `_FUNCTIONS` names another.
        outlet: where the user reads. A job that runs elsewhere returns what it prints.
        tracebacks: whether an error passes with its traceback.
        arguments: those of the command, of all its jobs.
        table: of the sweep that the job belongs to.
    """

    command: str
    outlet: tuple[str, int, int] | None
    tracebacks: bool = False
    arguments: tuple[str, ...] = ()
    table: SweepTable = field(default_factory=SweepTable)

    def __call__(self, cfg: DictConfig) -> Ended | Figure:
        """Run one job; the figure where one is asked for, else how it ended.

        Raises:
            NoFigure: from a job of a sweep that has not got the figure.
        """
        overrides, printed = commands.overrides(), io.StringIO()
        with contextlib.redirect_stdout(printed) if outlet() != self.outlet else contextlib.nullcontext():
            ended = self._ended(cfg)
            if ended.line is not None and self.table.command:
                output().print(self.table.line(overrides, *ended.line), soft_wrap=True)
        ended = replace(ended, job=" ".join(overrides), number=job_number(), said=printed.getvalue())
        keep(ended)
        if HydraConfig.get().mode is RunMode.RUN or OmegaConf.select(cfg, "objective") is None:
            return ended
        if ended.figure is None:
            raise NoFigure(ended)
        return Figure(ended.figure, ended)

    def _ended(self, cfg: DictConfig) -> Ended:
        """Run the job; a known error ends it with a sentence, and the other jobs of a sweep continue."""
        token = _JOB.set(self)
        try:
            runtime = HydraConfig.get().runtime
            commands.refuse_unknown(cfg, runtime.choices)
            make_importable(runtime.config_sources)
            ended: Ended = getattr(commands, _FUNCTIONS.get(self.command, self.command))(cfg)
        except BrokenPipeError:
            raise
        except Exception as error:
            if self.tracebacks:
                raise
            return Ended(code_of(error), sentence_of(error)) if isinstance(error, KNOWN) else Ended(FAILED, unforeseen(error))
        finally:
            _JOB.reset(token)
        return ended


def current() -> Job:
    """The job that runs here."""
    job = _JOB.get()
    assert job is not None
    return job


def job_number() -> int:
    """The job's place in its sweep; 0 for a run."""
    job = HydraConfig.get().job
    return 0 if OmegaConf.is_missing(job, "num") else int(job.num)


@contextlib.contextmanager
def ended_jobs() -> Iterator[dict[int, Ended]]:
    """How the jobs of a command ended, by number: `hydra.main` drops what they return."""
    ended: dict[int, Ended] = {}
    token = _ENDED.set(ended)
    try:
        yield ended
    finally:
        _ENDED.reset(token)


def keep(ended: Ended) -> None:
    """Record how a job ended, in the process of the command."""
    held = _ENDED.get()
    if held is not None:
        held[ended.number] = ended


def ended_of(job: JobReturn) -> Ended | None:
    """How a job ended that a launcher ran; None where it raised what the sweeper is to raise."""
    value: Any
    try:
        with contextlib.nullcontext() if job.status is JobStatus.COMPLETED else contextlib.redirect_stderr(io.StringIO()):
            value = job.return_value  # prints before it raises; a sweeper will read it too
    except NoFigure as error:
        value = error
    except Exception:
        return None
    ended: Ended = value if isinstance(value, Ended) else value.ended
    return ended


class Keeping(Launcher):
    """Wraps the launcher that the user chose: checks the sweep, prints the header of its table, and keeps what jobs return."""

    def __init__(self, launcher: DictConfig) -> None:
        self.chosen = launcher

    def setup(self, *, hydra_context: HydraContext, task_function: TaskFunction, config: DictConfig) -> None:
        """Set up the user's launcher.

        Raises:
            BadInput: for a sweep that cannot be run, or whose figure cannot be had.
        """
        assert isinstance(task_function, Job)
        overrides = OverridesParser.create().parse_overrides(overrides_of(config.hydra))
        make_importable(config.hydra.runtime.config_sources)
        _refuse(task_function.command, config, overrides)
        with open_dict(config.hydra):
            config.hydra.launcher = self.chosen
        self.table = task_function.table
        if config.get("study") is None and task_function.command in HEADINGS and config.metrics == "chief":
            self.table.command = "dry_run" if config.dry_run else task_function.command
        self.constant = [override.get_key_element() for override in overrides if not override.is_sweep_override()]
        self.launcher = Plugins.instance().instantiate_launcher(hydra_context, task_function, config)

    def launch(self, job_overrides: Sequence[Sequence[str]], initial_job_idx: int) -> Sequence[JobReturn]:
        if any(text.startswith("study=") for text in job_overrides[0]):
            self.table.command = ""
        if self.table.command and not self.table.axes:
            output().print(self.table.header(job_overrides, self.constant), soft_wrap=True)
        returned = self.launcher.launch(job_overrides, initial_job_idx=initial_job_idx)
        for job in returned:
            if (ended := ended_of(job)) is not None:
                keep(ended)
                sys.stdout.write(ended.said)
        return returned


def _refuse(command: str, config: DictConfig, overrides: Sequence[Override]) -> None:
    """Raise BadInput before the first job of a sweep, if the sweeper cannot run it, or its figure cannot be had."""
    sweeper = str(config.hydra.runtime.choices["hydra/sweeper"])
    objective = OmegaConf.select(config, "objective")
    for override in overrides if sweeper == _WITHOUT_FIGURES else ():
        if override.is_sweep_override() and not override.is_discrete_sweep():
            hint = "it lists no values; give a,b or range(a,b), or take hydra/sweeper=optuna, which draws some"
            raise BadInput(override.get_key_element(), str(override.input_line).partition("=")[2], hint)
    if objective is not None or sweeper != _WITHOUT_FIGURES:
        from numdev.cli import runners  # late: a sweep without a figure does not wait for torch here

        if command not in ("measure", "speed"):
            raise BadInput("hydra/sweeper", sweeper, f"numdev {command} has no figure for it")
        measured = runners.kind(command, config)
        runners.refuse_objective(objective, measured)
        if objective is None:
            example = next(name for name in runners.figures(measured) if name.rpartition(".")[2] in ("max_difference", "latency"))
            raise BadInput("hydra/sweeper", sweeper, f"it minimises a figure; name one, as in objective={example}")
    if config.get("dry_run") and sweeper != _WITHOUT_FIGURES:
        raise BadInput("hydra/sweeper", sweeper, "it needs figures, and a dry run measures nothing; leave it out")
    if commands.plot_parts(config):
        from numdev.cli import figures

        figures.refuse_of_sweep(config, command, overrides)
    if not config.get("dry_run"):
        from numdev.results.files import refuse_unwritable

        refuse_unwritable("results" if "results" in config else "out", Path(config.hydra.sweep.dir))


class KeepReturned(Callback):
    """Puts `Keeping` before the launcher of every sweep, whatever sweeper there is."""

    def on_multirun_start(self, config: DictConfig, **_: Any) -> None:
        with open_dict(config.hydra):
            config.hydra.launcher = {"_target_": _KEEPING, "_recursive_": False, "launcher": config.hydra.launcher}
