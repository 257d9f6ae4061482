"""Runs that several points share: each is trained once, by one process, judged and kept; and how long they would take."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from numdev.errors import BadInput, Unsupported
from numdev.measurement.runner import Context
from numdev.results.files import write_atomically
from numdev.training.loop import train
from numdev.training.run import Run, deterministic
from numdev.training.run_files import FINISHED, Trained
from numdev.training.rung import Rung
from numdev.training.state import model_of
from numdev.training.task import Task

SAMPLES = "samples.png"
_MOST, _ACROSS, _ENLARGED = 32, 8, 3  # pictures, pictures in a row, pixels for one
_GAP = 2  # white pixels between two, before they are enlarged
_STEPS = 3  # of which the time of a run is estimated


def finished(run: Run, title: str, folder: Path, context: Context) -> Trained:
    """The run, trained to its end and judged unless it is there; another process that trains the same is waited for.

    `title` names it where its progress is shown.

    Raises:
        BadInput: for a run that cannot be trained.
        Unsupported: for a model or an attention that cannot be trained as configured.
        StoreError: where a file cannot be written.
    """

    def report(step: int, steps: int, text: str) -> None:
        if context.within is not None:
            context.within(step, steps, f"{title}: {text}")

    own = folder / run.key(context.device)
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput("results", str(folder), f"no run can be kept there ({error.strerror})") from None
    lock = FileLock(own / ".lock", mode=0o666)  # the operating system releases it when a process is killed
    try:
        lock.acquire(blocking=False)
    except Timeout:
        report(0, run.task.steps, "waits for another process, which trains it")
        lock.acquire()
    try:
        trained = train(run, own, context.device, report)
        if trained.held_out_loss is None:
            judge(run, trained, context.device)
        return trained
    finally:
        lock.release()


def judge(run: Run, trained: Trained, device: torch.device) -> None:
    """Take losses and samples of the weights, in FP32 with plain attention, and write them: what differs lies in the weights.

    Raises:
        StoreError: if they cannot be written.
    """
    with deterministic(), torch.no_grad():
        untrained, last = (model_of(run, device, trained.weights(at, buffers=True)) for at in (0, max(trained.snapshots)))
        batch = {name: x.to(device) for name, x in run.task.held_out().items()}
        trained.untrained_loss, trained.held_out_loss = (float(run.task.loss(model, batch)) for model in (untrained, last))
        samples = run.task.samples(last, run.replicate)
    trained.score, trained.captions, trained.text = samples.score, samples.captions, samples.text
    if samples.pictures is not None:
        write_atomically(trained.folder / SAMPLES, contact_sheet(samples.pictures))
        trained.pictures = True
    trained.write()


def contact_sheet(pictures: Float[Tensor, "count 3 height width"]) -> bytes:
    """The first pictures, whose values lie in [-1, 1], side by side in rows, as PNG."""
    from PIL import Image  # late: only what draws samples needs it

    shown = functional.pad(pictures[:_MOST].clamp(-1, 1), (0, _GAP, 0, _GAP), value=1.0)
    across = min(len(shown), _ACROSS)
    blank = shown.new_ones(-len(shown) % across, *shown.shape[1:])
    rows = torch.cat([shown, blank]).unflatten(0, (-1, across))  # [rows, across, 3, height, width]
    sheet = ((rows.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)[:-_GAP, :-_GAP] + 1) * 127.5).round()
    image, written = Image.fromarray(sheet.byte().numpy()), BytesIO()
    image.resize((_ENLARGED * image.width, _ENLARGED * image.height), Image.Resampling.NEAREST).save(written, "PNG")
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
        alike = Rung(rung.attention, rung.numerics)  # seeds, a last place and restarts take no time
        few: Any = replace(task, steps=min(task.steps, _STEPS), warmup=1)  # type: ignore[call-arg]  # a field of every task
        if (few, alike) not in self._seconds:
            self.calibrated += 1
            self._seconds[few, alike] = 0.0
            with tempfile.TemporaryDirectory() as folder, suppress(BadInput, Unsupported):
                self._seconds[few, alike] = train(Run(few, alike), Path(folder), self.device).seconds_per_step
        return task.steps * self._seconds[few, alike]
