"""Trains a run, or goes on with it where it was left: the loop over steps, with its snapshots, checkpoints, restart and end."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch

from numdev.errors import BadInput, Unsupported
from numdev.results.record import Within
from numdev.training.attend import Trainable, attend
from numdev.training.noise import Noise
from numdev.training.run import Run, deterministic
from numdev.training.run_files import Trained, rounded, without_moments
from numdev.training.rung import Restart
from numdev.training.state import State, checksum
from numdev.training.tasks import Batch
from numdev.training.watch import Watch, Watched

_READ_EVERY = {"cpu": 1, "cuda": 25}  # steps from one read of the losses to the next: each waits for the device
_CHECKPOINT_SECONDS = 20.0  # from one checkpoint to the next, at least
_REFUSALS = "deterministic", "No available kernel"  # what torch says where deterministic algorithms leave none
_RESTARTED = {Restart.LOSSY: rounded, Restart.WEIGHTS_ONLY: without_moments}  # what is left of a state


def train(run: Run, folder: Path, device: torch.device, report: Within | None = None) -> Trained:
    """Train a run in a folder of its own, or go on with it there, or return what is finished.

    A run that was killed at any moment goes on from its last checkpoint to the same final weights, bit for bit. `report` is
    called each time that the losses are read, with the steps that are done, of how many, loss and speed. Algorithms are
    deterministic where there are such; a note says where there are none.

    Raises:
        BadInput: for a folder that holds another run.
        Unsupported: for a model or an attention that cannot be trained as arguments.
        StoreError: if a file cannot be written; what was written stays.
    """
    key = run.key(device)
    folder.mkdir(parents=True, exist_ok=True)
    if (finished := Trained.find(folder, key)) is not None:
        return finished
    trained = Trained(folder, key, run.task.steps)
    with deterministic():
        try:
            return Training(run, device, report, replace(trained)).finish()
        except (RuntimeError, Unsupported) as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            why = f"no deterministic algorithm, so the same run again may have other bits: {str(error).splitlines()[0]}"
        torch.use_deterministic_algorithms(True, warn_only=True)
        return Training(run, device, report, replace(trained, notes=(why,))).finish()


class Training:
    """A run as this process trains it. `finish` does it; everything else is its parts.

    Losses are read after every step on a CPU; on a GPU after every 25, and before every snapshot and restart. A loss that is not
    finite, or gradients that are not although the loss is not scaled, end the run at the first such step, whenever it is read.
    """

    def __init__(self, run: Run, device: torch.device, report: Within | None, trained: Trained) -> None:
        self._run, self._device, self._report, self._trained = run, device, report, trained
        self._watch = Watch(device) if run.rung.watch else None
        self._stretches: list[float] = []  # seconds of a step, from one read to the next
        self._saved_at = time.perf_counter()

    def finish(self) -> Trained:
        """Do all steps that are left; see `train`."""
        rung, watch = self._run.rung, self._watch
        attention: Trainable = rung.attention if watch is None else Watched(rung.attention, watch)
        if rung.noise is not None:
            attention = Noise(rung.attention, rung.noise)
        with attend(attention) as self._seen:
            self._begin(Restart.NONE)
            for batch in self._run.batches(self._trained.done):
                if self._trained.done == self._run.half:
                    # Every checkpoint of this step is from before the restart: a run that is resumed from it restarts too.
                    self._trained.write_checkpoint(self._state)
                    self._begin(self._run.rung.restart)
                self._advance(batch)
                if self._trained.stopped:
                    break
        return self._end()

    def _begin(self, restart: Restart) -> None:
        """A new model, in the state of the last checkpoint less what a restart loses, or in the initial one."""
        self._state, self._is_new = State(self._run, self._device, self._seen, self._watch), True
        saved = self._trained.resume()
        if saved is not None:
            self._state.restore(_RESTARTED[restart](saved) if restart in _RESTARTED else saved)
        for torn in self._trained.folder.glob(".*.tmp"):  # of a process that was killed while it wrote
            torn.unlink(missing_ok=True)
        if self._trained.done == 0:
            self._trained.write_snapshot(self._state)
        self._start_clock()

    def _advance(self, batch: Batch) -> None:
        """One step, and what is due after it."""
        trained, state = self._trained, self._state
        if self._is_new and self._device.type == "cuda" and (why := state.capture(batch)):
            trained.note(why)
        self._is_new = False
        state.step(trained.done, batch)
        if not state.seen.calls:
            hint = "it never calls torch.nn.functional.scaled_dot_product_attention; give a model with attention to exchange"
            raise BadInput("task.model", type(state.model).__name__, hint)
        trained.done = done = trained.done + 1
        if done % _READ_EVERY[self._device.type] and done not in (trained.steps, self._run.half, *trained.snapshot_steps):
            return
        self._read()
        if self._report is not None:
            rate = 1 / max(trained.seconds_per_step, 1e-9)
            self._report(trained.done, trained.steps, f"loss {float(state.losses[done - 1]):.3f}, {rate:.3g} steps/s")
        if not trained.stopped:
            trained.write_snapshot(state)
            if done < trained.steps and time.perf_counter() - self._saved_at >= _CHECKPOINT_SECONDS:
                trained.write_checkpoint(state)
                self._saved_at = time.perf_counter()
        self._start_clock()

    def _start_clock(self) -> None:
        self._clock, self._read_at = time.perf_counter(), self._trained.done

    def _read(self) -> None:
        """Wait for the device, take the time, and look at the losses since the last read."""
        trained, first, done = self._trained, self._read_at, self._trained.done
        losses, norms = self._state.losses[first:done].cpu(), self._state.norms[first:done].cpu()
        seconds = time.perf_counter() - self._clock
        self._stretches.append(seconds / (done - first))
        trained.seconds_per_step = statistics.median(self._stretches[1:] or self._stretches)  # the first compiles and captures
        good = losses.isfinite() if self._state.scale is not None else losses.isfinite() & norms.isfinite()
        if not bool(good.all()):
            place = int(good.logical_not().nonzero()[0])
            what = "gradients are" if math.isfinite(float(losses[place])) else "loss is"
            trained.done, trained.stopped = first + place, f"the {what} not finite at step {first + place}"

    def _end(self) -> Trained:
        """The finished run, which is written."""
        trained, state = self._trained, self._state
        count = trained.done + bool(trained.stopped)
        trained.losses, trained.gradient_norms = (tuple(x[:count].tolist()) for x in (state.losses, state.norms))
        trained.watched = tuple(map(tuple, state.watched[:count].tolist()))
        trained.checksum = checksum(trained.weights(max(trained.snapshots)) if trained.stopped else state.weights())
        trained.parameters = sum(x.numel() for x in state.parameters.values())
        trained.captured, trained.calls, trained.missed = state.graph is not None, state.seen.calls, state.seen.missed
        trained.write()
        trained.remove_checkpoints()
        return trained
