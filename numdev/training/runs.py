"""Runs that several points share: each is trained once, by one process, and kept."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from numdev.errors import BadInput
from numdev.measurement.protocol import Context
from numdev.results.record import Within
from numdev.training.execution import Progress
from numdev.training.judge import Judged, judged
from numdev.training.lock import locked
from numdev.training.run import Run
from numdev.training.train import train
from numdev.training.trained import Trained

_LOCK = ".lock"


@dataclass(frozen=True)
class Finished:
    """A run that was trained, and how good its weights are."""

    trained: Trained
    judged: Judged


@dataclass(frozen=True)
class Runs:
    """The runs of a folder, each in a folder of its own by its key.

    Attributes:
        folder: of the runs.
        device: where they are trained.
        within: is called with the progress of the current run.
    """

    folder: Path
    device: torch.device
    within: Within | None = None

    def finished(self, run: Run, what: str) -> Finished:
        """The run, trained to its end unless it is there; another process that trains the same is waited for.

        `what` names it where its progress is shown.

        Raises:
            BadInput: for a run that cannot be trained, and where there is no room for it.
            Unsupported: for a model or an attention that cannot be trained as asked.
            StoreError: where a file cannot be written.
        """
        own = self.folder / run.key(self.device)
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput("results", str(self.folder), f"no run can be kept there ({error.strerror})") from None
        with locked(own / _LOCK, lambda: self._tell(0, run, f"{what}: waits for another process, which trains it")):
            trained = train(run, own, self.device, self._told(run, what))
            return Finished(trained, judged(run, trained, self.device))

    def _told(self, run: Run, what: str) -> Callable[[Progress], None]:
        def told(at: Progress) -> None:
            self._tell(at.step, run, f"{what}: loss {at.loss:.3f}, {at.rate:.3g} steps/s")

        return told

    def _tell(self, step: int, run: Run, text: str) -> None:
        if self.within is not None:
            self.within(step, run.task.steps, text)


@contextmanager
def runs(context: Context) -> Iterator[Runs]:
    """The runs that points share; where nothing is stored, those of a folder that is removed afterwards."""
    if context.shared is not None:
        yield Runs(context.shared, context.device, context.within)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Runs(Path(folder), context.device, context.within)
