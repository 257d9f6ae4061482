"""Runs a command as the task of Hydra, once or for every job of a sweep, here or elsewhere, and collects what its jobs said."""

from __future__ import annotations

import contextlib
import io
import os
import platform
import sys
from collections.abc import Iterator
from contextvars import ContextVar
from dataclasses import dataclass, field, replace
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli import app, placed
from numdev.cli.console import output
from numdev.cli.modules import make_importable
from numdev.cli.outcome import FAILED, KNOWN, Ended, code_of, sentence_of, unforeseen
from numdev.cli.progress import aside, begin
from numdev.cli.sweeptable import SweepTable

_FUNCTIONS = {"map": "error_map"}
"""Of the commands whose names Python has taken."""
_ENDED: ContextVar[dict[int, Ended] | None] = ContextVar("ended", default=None)


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


@dataclass(frozen=True)
class Outlet:
    """Where a process prints: host, and device and inode of its standard output."""

    host: str
    device: int
    inode: int

    @classmethod
    def here(cls) -> Outlet | None:
        """That of this process; None where it has no standard output."""
        try:
            found = os.fstat(1)
        except OSError:
            return None
        return cls(platform.node(), found.st_dev, found.st_ino)


@dataclass(frozen=True)
class Job:
    """Hydra's task.

    Attributes:
        command: its name, that of a function of `numdev.cli.app` unless `_FUNCTIONS` names another.
        outlet: where the user reads. A job that runs elsewhere returns what it prints.
        tracebacks: whether an error passes with its traceback.
        arguments: those of the command, of all its jobs.
        table: of the sweep that the job belongs to.
    """

    command: str
    outlet: Outlet | None
    tracebacks: bool = False
    arguments: tuple[str, ...] = ()
    table: SweepTable = field(default_factory=SweepTable)

    def __call__(self, cfg: DictConfig) -> Ended | Figure:
        """Run one job; the figure where one is asked for, else how it ended.

        Raises:
            NoFigure: from a job of a sweep that has not got the figure.
        """
        begin(_number(), " ".join(text for text in app.overrides() if text.partition("=")[0] in self.table.axes))
        with self._said() as said:
            ended = self._ended(cfg)
            self._print_line(ended)
        ended = replace(ended, job=" ".join(app.overrides()), number=_number(), said=said.getvalue())
        keep(ended)
        if HydraConfig.get().mode is RunMode.RUN or OmegaConf.select(cfg, "objective") is None:
            return ended
        if ended.figure is None:
            raise NoFigure(ended)
        return Figure(ended.figure, ended)

    def _ended(self, cfg: DictConfig) -> Ended:
        """Run the job; a known error ends it with a sentence, and the other jobs of a sweep continue."""
        try:
            runtime = HydraConfig.get().runtime
            app.refuse_unknown(cfg, groups=runtime.choices)
            make_importable(runtime.config_sources)
            with placed.asked(self.arguments):
                ended: Ended = getattr(app, _FUNCTIONS.get(self.command, self.command))(cfg)
        except BrokenPipeError:
            raise
        except Exception as error:
            if self.tracebacks:
                raise
            return Ended(code_of(error), sentence_of(error)) if isinstance(error, KNOWN) else Ended(FAILED, unforeseen(error))
        return ended

    def _print_line(self, ended: Ended) -> None:
        """The job's line in the table of its sweep."""
        if ended.line is None or self.table.headings is None:
            return
        with aside():
            output().print(self.table.line(app.overrides(), *ended.line), soft_wrap=True)

    @contextlib.contextmanager
    def _said(self) -> Iterator[io.StringIO]:
        """Capture what the job prints, if it runs where the user does not read."""
        said = io.StringIO()
        elsewhere = Outlet.here() != self.outlet
        with contextlib.redirect_stdout(said) if elsewhere else contextlib.nullcontext():
            yield said


def _number() -> int:
    """The job's place in its sweep; 0 for a run."""
    job = HydraConfig.get().job
    return 0 if OmegaConf.is_missing(job, "num") else job.num


@contextlib.contextmanager
def kept() -> Iterator[dict[int, Ended]]:
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
    if job.status is JobStatus.COMPLETED:
        value = job.return_value
    else:
        with contextlib.redirect_stderr(io.StringIO()):  # `return_value` prints before it raises; a sweeper will read it too
            try:
                value = job.return_value
            except NoFigure as error:
                value = error
            except Exception:
                return None
    ended: Ended = value if isinstance(value, Ended) else value.ended
    return ended


def keep_returned(job: JobReturn) -> None:
    """Note how a job ended that a launcher ran anywhere, and show what it printed where nobody reads."""
    ended = ended_of(job)
    if ended is not None:
        keep(ended)
        sys.stdout.write(ended.said)
