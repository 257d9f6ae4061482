"""Runs that several points share: each is trained once, by one process, judged and kept; and how long they would take."""

from __future__ import annotations

import fcntl
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.errors import BadInput, Unsupported
from numdev.measurement.runner import Context
from numdev.results.files import write_atomically
from numdev.results.record import Within
from numdev.training.loop import Progress, train
from numdev.training.run import Run, deterministic
from numdev.training.run_files import FINISHED, Trained
from numdev.training.rung import Rung
from numdev.training.state import model_of
from numdev.training.task import Task

SAMPLES = "samples.png"
_LOCK, _JUDGED = ".lock", "judged.json"
_MOST, _ACROSS, _ENLARGED = 32, 8, 3  # pictures, pictures in a row, pixels for one
_GAP = 2  # white pixels between two, before they are enlarged
_STEPS = 3  # of which the time of a run is estimated


@dataclass(frozen=True)
class Judged:
    """Losses and samples of the weights of a run, computed in FP32 with plain attention: what differs lies in the weights.

    Attributes:
        checksum: of the weights that were judged.
        untrained_loss: of the initial weights on the held-out batch.
        held_out_loss: of the last weights.
        score: see `numdev.training.task.Samples`.
        captions: of the samples.
        text: what a language model wrote for each.
        pictures: whether `samples.png` stands beside it.
    """

    checksum: str
    untrained_loss: float
    held_out_loss: float
    score: float
    captions: tuple[str, ...]
    text: tuple[str, ...]
    pictures: bool


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

    def finished(self, run: Run, title: str) -> Finished:
        """The run, trained to its end unless it is there; another process that trains the same is waited for.

        `title` names it where its progress is shown.

        Raises:
            BadInput: for a run that cannot be trained, and where there is no room for it.
            Unsupported: for a model or an attention that cannot be trained as asked.
            StoreError: where a file cannot be written.
        """

        def tell(step: int, text: str) -> None:
            if self.within is not None:
                self.within(step, run.task.steps, f"{title}: {text}")

        def report(at: Progress) -> None:
            tell(at.step, f"loss {at.loss:.3f}, {at.rate:.3g} steps/s")

        own = self.folder / run.key(self.device)
        try:
            own.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput("results", str(self.folder), f"no run can be kept there ({error.strerror})") from None
        with locked(own / _LOCK, lambda: tell(0, "waits for another process, which trains it")):
            trained = train(run, own, self.device, report)
            return Finished(trained, judged(run, trained, self.device))


@contextmanager
def runs(context: Context) -> Iterator[Runs]:
    """The runs that points share; where nothing is stored, those of a folder that is removed afterwards."""
    if context.shared is not None:
        yield Runs(context.shared, context.device, context.within)
        return
    with tempfile.TemporaryDirectory() as folder:
        yield Runs(Path(folder), context.device, context.within)


@contextmanager
def locked(path: Path, waiting: Callable[[], None]) -> Iterator[None]:
    """Within it no other process holds the lock of this file; the operating system releases it when a process ends or is killed.

    `waiting` is called once where another process holds it. The file stays: who removed it would let a third process lock another
    file of the same name.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            waiting()
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def judged(run: Run, trained: Trained, device: torch.device) -> Judged:
    """Judges the weights of a run; the judgement is kept beside them.

    Raises:
        StoreError: if it cannot be written.
    """
    kept = _kept(trained)
    if kept is not None:
        return kept
    with deterministic(), torch.no_grad():
        untrained, last = (model_of(run, device, trained.tensors(step)) for step in (0, max(trained.snapshots)))
        batch = {name: x.to(device) for name, x in run.task.held_out().items()}
        before, after = (float(run.task.loss(model, batch)) for model in (untrained, last))
        samples = run.task.samples(last, run.replicate)
    if samples.pictures is not None:
        write_atomically(trained.folder / SAMPLES, contact_sheet(samples.pictures))
    drawn = samples.pictures is not None
    judgement = Judged(trained.checksum, before, after, samples.score, samples.captions, samples.text, drawn)
    write_atomically(trained.folder / _JUDGED, json.dumps(asdict(judgement), indent=1).encode())
    return judgement


def _kept(trained: Trained) -> Judged | None:
    """An earlier judgement of the same weights."""
    try:
        facts: Mapping[str, Any] = json.loads((trained.folder / _JUDGED).read_bytes())
        judgement = Judged(**{**facts, "captions": tuple(facts["captions"]), "text": tuple(facts["text"])})
    except (OSError, ValueError, TypeError, KeyError):
        return None
    lacks = judgement.pictures and not (trained.folder / SAMPLES).is_file()
    return None if lacks or judgement.checksum != trained.checksum else judgement


def contact_sheet(pictures: Float[Tensor, "count 3 height width"]) -> bytes:
    """The first pictures, whose values lie in [-1, 1], side by side in rows, as PNG."""
    from PIL import Image  # late: only what draws samples needs it

    shown = ((pictures[:_MOST].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
    count, _, height, width = shown.shape
    across = min(count, _ACROSS)
    rows = math.ceil(count / across)
    sheet = torch.full((3, rows * (height + _GAP) - _GAP, across * (width + _GAP) - _GAP), 255, dtype=torch.uint8)
    for place in range(count):
        y, x = place // across * (height + _GAP), place % across * (width + _GAP)
        sheet[:, y : y + height, x : x + width] = shown[place]
    sheet = sheet.repeat_interleave(_ENLARGED, 1).repeat_interleave(_ENLARGED, 2)
    written = BytesIO()
    Image.fromarray(sheet.permute(1, 2, 0).contiguous().numpy()).save(written, "PNG")
    return written.getvalue()


@dataclass
class Trainings:
    """Estimates the steps of the runs of some points; the scoring of finished models is not counted.

    Attributes:
        device: where they would be trained.
        folder: of the runs that are there already, which take no time.
        calibrated: kinds of rung of which steps were timed.
        assumed: kinds of rung that have the time of others: none.
    """

    device: torch.device
    folder: Path
    calibrated: int = 0
    assumed: int = 0
    _counted: set[str] = field(default_factory=set)
    _seconds: dict[tuple[Any, Any], float] = field(default_factory=dict)

    def seconds(self, points: Iterable[tuple[Any, Any, Any, int]]) -> list[float]:
        """The time of each point: the steps of the runs that no point before it, and no earlier command, has trained."""
        return [
            math.fsum(self._of_run(problem, rung, seed) for seed in range(seeds) for rung in (variant, baseline))
            for problem, variant, baseline, seeds in points
        ]

    def _of_run(self, task: Task, rung: Rung, seed: int) -> float:
        key = Run(task, rung, seed).key(self.device)
        if key in self._counted or (self.folder / key / FINISHED).is_file():
            return 0.0
        self._counted.add(key)
        return task.steps * self._of_step(task, rung)

    def _of_step(self, task: Task, rung: Rung) -> float:
        """Seconds of one step; rungs that differ in seeds, in one last place or in restarts alone take the same time."""
        alike = Rung(rung.attention, rung.numerics)
        few: Any = replace(task, steps=min(task.steps, _STEPS), warmup=1)  # type: ignore[call-arg]  # a field of every task
        if (few, alike) not in self._seconds:
            self.calibrated += 1
            with tempfile.TemporaryDirectory() as folder:
                try:
                    seconds = train(Run(few, alike), Path(folder), self.device).seconds_per_step
                except (BadInput, Unsupported):
                    seconds = 0.0
            self._seconds[few, alike] = seconds
        return self._seconds[few, alike]
