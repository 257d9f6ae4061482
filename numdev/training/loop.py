"""Trains a run, or goes on with it where it was left: the loop over steps, with its snapshots, checkpoints, restart and end."""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from numdev.attention.base import Differentiable
from numdev.errors import BadInput, Unsupported
from numdev.training.attend import attend
from numdev.training.interception import CallCounts
from numdev.training.run import Run, deterministic
from numdev.training.run_files import (
    Checkpoint,
    Position,
    Snapshots,
    Trained,
    read_snapshot,
    rounded,
    steps_of,
    without_moments,
)
from numdev.training.rung import Restart
from numdev.training.state import State, checksum
from numdev.training.step import History, Step, World, step_of
from numdev.training.task import Batch
from numdev.training.watch import Watch, Watched

_READ_EVERY = {"cpu": 1, "cuda": 25}  # steps from one read of the losses to the next: each waits for the device
_REFUSALS = "deterministic", "No available kernel"  # what torch says where deterministic algorithms leave none


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        step: how many are done.
        steps: of the task.
        loss: of the last one.
        rate: steps per second.
    """

    step: int
    steps: int
    loss: float
    rate: float


Report = Callable[[Progress], None]


@dataclass(frozen=True)
class Execution:
    """How a run is executed, which changes no bit of it.

    Attributes:
        graphs: whether a step is captured as a CUDA graph where it can be.
        checkpoint_seconds: between two checkpoints, at least.
    """

    graphs: bool = True
    checkpoint_seconds: float = 20.0


def train(
    run: Run, folder: Path, device: torch.device, report: Report | None = None, execution: Execution | None = None
) -> Trained:
    """Train a run in a folder of its own, or go on with it there, or return what is finished.

    A run that was killed at any moment goes on from its last checkpoint to the same final weights, bit for bit. Interrupted by
    Ctrl-C it writes a checkpoint first, unless the weights are just being changed.

    Args:
        run: what is trained.
        folder: holds its checkpoints and snapshots and nothing else; all ranks see it.
        device: where. Several ranks on CUDA take the devices from 0 on.
        report: is called with the progress, each time that the losses are read.
        execution: how; as `Execution()` unless given.

    Raises:
        BadInput: for a folder that holds another run, for a disk without room, and for ranks that there is no device for.
        Unsupported: for a model or an attention that cannot be trained as arguments.
        StoreError: if a file cannot be written; what was written stays.
    """
    execution, key = execution or Execution(), run.key(device)
    folder.mkdir(parents=True, exist_ok=True)
    finished = Trained.find(folder, key)
    if finished is not None:
        return finished
    if run.rung.ranks > 1:
        from numdev.training import ranks  # late: importing torch.distributed takes a second

        return ranks.train(run, folder, device, report, execution)
    with deterministic():
        return Training(run, folder, device, report, execution, World(), key).finish()


class Training:
    """One process's part in a run. `finish` does it; everything else is its parts.

    Losses are read after every step on a CPU; on a GPU after every 25, and before every snapshot and restart. A loss that is not
    finite, or gradients that are not although the loss is not scaled, end the run at the first such step, whenever it is read.
    """

    def __init__(
        self, run: Run, folder: Path, device: torch.device, report: Report | None, execution: Execution, world: World, key: str
    ) -> None:
        self._run, self._folder, self._device, self._report = run, folder, device, report
        self._execution, self._world, self._key = execution, world, key
        self._snapshots = Snapshots(folder, steps_of(run.task.steps))
        self._notes: list[str] = []
        self._step: Step | None = None
        self._stopped = ""

    def finish(self) -> Trained:
        """Do all steps that are left; see `train`."""
        try:
            return self._attempt()
        except (RuntimeError, Unsupported) as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            reason = str(error).splitlines()[0]
        self._notes.append(f"no deterministic algorithm, so the same run again may have other bits: {reason}")
        torch.use_deterministic_algorithms(True, warn_only=True)  # `deterministic`, around this, restores it
        self._step = None
        return self._attempt()

    def _attempt(self) -> Trained:
        self._begin()
        batches = self._run.batches(self._position.done)
        try:
            with attend(self._attention()) as seen:
                while self._position.done < self._run.task.steps and not self._stopped:
                    self._restart_at_half()
                    self._advance(self._run.share(next(batches), self._world.rank), seen)
        except KeyboardInterrupt:
            if self._world.leads and self._state.whole:
                self._keep()
            raise
        return self._end()

    def _keep(self) -> None:
        """Write what Ctrl-C would lose: a checkpoint of the step that was done last, with the snapshot that it was to leave."""
        done = self._position.done
        if done > self._read_at:
            self._read()
        if self._stopped:
            return  # the run that goes on from an earlier checkpoint comes to this step again
        if done in self._snapshots.steps and not self._snapshots.complete(done):
            self._snapshots.write(done, self._state)
        self._write_checkpoint()

    def _attention(self) -> Differentiable | Watched:
        attention, watch = self._run.rung.attention, self._history.watch
        return attention if watch is None else Watched(attention, watch)

    def _begin(self) -> None:
        """The state of the last checkpoint, or the initial one."""
        self._state = State(self._run, self._device)
        watch = Watch(self._device) if self._run.rung.watch else None
        self._history = History(self._run.task.steps, self._device, watch)
        self._position = Position()
        checkpoint, notes = Checkpoint.latest(self._folder, self._key)
        self._notes += notes
        if checkpoint is not None and not self._snapshots.complete(checkpoint.position.done):
            self._notes.append("snapshots before the last checkpoint are missing; the run starts from the first step")
        elif checkpoint is not None:
            self._state.restore(checkpoint.state)
            self._history.restore(checkpoint.history)
            self._position = checkpoint.position
        if self._world.leads:
            for torn in self._folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                torn.unlink(missing_ok=True)
            self._snapshots.check_room(self._state, self._position.done)
            if self._position.done == 0:
                self._snapshots.write(0, self._state)
        self._stretches: list[float] = []
        self._start_clock()
        self._saved_at = time.perf_counter()

    def _restart_at_half(self) -> None:
        """Restart after half of the steps as the rung asks for: the state through a checkpoint on disk, into a new model."""
        if self._position.done != self._run.half or self._position.restarted:
            return
        if self._world.leads:
            self._write_checkpoint()
        self._world.wait()
        checkpoint, _ = Checkpoint.latest(self._folder, self._key)
        assert checkpoint is not None
        self._world.wait()  # all have read it before it is replaced
        losing = {Restart.LOSSY: rounded, Restart.WEIGHTS_ONLY: without_moments}.get(self._run.rung.restart)
        self._step, self._state = None, State(self._run, self._device)
        self._state.restore(checkpoint.state if losing is None else losing(checkpoint.state))
        self._position = replace(self._position, restarted=True)
        if self._world.leads:
            self._write_checkpoint()
        self._start_clock()

    def _advance(self, batch: Batch, seen: CallCounts) -> None:
        """One step, and what is due after it."""
        if self._step is None:
            where = self._state, self._device, self._world, seen
            self._step, why = step_of(self._run, *where, batch, self._history.watch, self._execution.graphs)
            self._notes += [why] if why else []
        self._step(self._position.done, batch, self._history)
        if not seen.calls:
            hint = "it never calls torch.nn.functional.scaled_dot_product_attention; give a model with attention to exchange"
            raise BadInput("task.model", type(self._state.model).__name__, hint)
        done = self._position.done + 1
        self._position = replace(self._position, done=done)
        self._state.whole = True
        last, snapshot = done == self._run.task.steps, done in self._snapshots.steps
        if not (done % _READ_EVERY[self._device.type] == 0 or last or snapshot or done == self._run.half):
            return
        loss = self._read()
        if self._report is not None and self._world.leads:
            rate = 1 / max(self._position.seconds_per_step, 1e-9)
            self._report(Progress(self._position.done, self._run.task.steps, loss, rate))
        if self._stopped:
            return
        if self._world.leads and snapshot:
            self._snapshots.write(done, self._state)
        if self._world.leads and not last and time.perf_counter() - self._saved_at >= self._execution.checkpoint_seconds:
            self._write_checkpoint()
        self._start_clock()

    def _start_clock(self) -> None:
        self._clock, self._read_at = time.perf_counter(), self._position.done

    def _read(self) -> float:
        """Wait for the device, take the time, and look at the losses since the last read; returns the last one."""
        done, first = self._position.done, self._read_at
        losses, norms = (x[first:done].cpu() for x in (self._history.losses, self._history.norms))
        seconds = time.perf_counter() - self._clock
        self._stretches.append(seconds / (done - first))
        per_step = statistics.median(self._stretches[1:] or self._stretches)  # the first compiles and captures
        self._position = replace(self._position, seconds=self._position.seconds + seconds, seconds_per_step=per_step)
        self._look_for_nonfinite(losses, norms, first)
        self._start_clock()
        return float(losses[-1])

    def _look_for_nonfinite(self, losses: Tensor, norms: Tensor, first: int) -> None:
        good = losses.isfinite() if self._state.scale is not None else losses.isfinite() & norms.isfinite()
        if bool(good.all()):
            return
        place = int(good.logical_not().nonzero()[0])
        what = "gradients are" if math.isfinite(float(losses[place])) else "loss is"
        self._position = replace(self._position, done=first + place)
        self._stopped = f"the {what} not finite at step {first + place}"

    def _write_checkpoint(self) -> None:
        history = self._history.tensors(self._position.done)
        Checkpoint(self._key, self._position, self._state.tensors(), history).write(self._folder)
        self._saved_at = time.perf_counter()

    def _end(self) -> Trained:
        """The finished run, written by the process that leads and read by the others."""
        if not self._stopped:
            self._world.agree(self._state.checksum())
        if self._world.leads:
            self._trained().write()
            Checkpoint.remove(self._folder)
        self._world.wait()
        trained = Trained.find(self._folder, self._key)
        assert trained is not None
        return trained

    def _trained(self) -> Trained:
        done, history = self._position.done, self._history.tensors(self._position.done + bool(self._stopped))
        paths = self._snapshots.paths(done)
        return Trained(
            folder=self._folder,
            key=self._key,
            steps=self._run.task.steps,
            done=done,
            losses=tuple(history["losses"].tolist()),
            gradient_norms=tuple(history["norms"].tolist()),
            watched=tuple(map(tuple, history["watched"].tolist())),
            checksum=checksum(read_snapshot(paths[max(paths)])[0]) if self._stopped else self._state.checksum(),
            seconds=self._position.seconds,
            seconds_per_step=self._position.seconds_per_step,
            parameters=sum(x.numel() for x in self._state.parameters.values()),
            stopped=self._stopped,
            captured=self._step is not None and self._step.captured,
            calls=0 if self._step is None else self._step.calls,
            missed=0 if self._step is None else self._step.missed,
            notes=tuple(dict.fromkeys(self._notes)),
        )
