"""Trains a run, or goes on with it where it was left: the loop over steps, with its snapshots, checkpoints, restart and end."""

from __future__ import annotations

import math
import statistics
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from numdev.errors import BadInput, Unsupported
from numdev.results.record import Within
from numdev.training.attend import attend
from numdev.training.run import Run, deterministic
from numdev.training.run_files import Trained, rounded, without_moments
from numdev.training.rung import Restart
from numdev.training.state import State, checksum
from numdev.training.task import Batch
from numdev.training.watch import Watch, Watched

_READ_EVERY = {"cpu": 1, "cuda": 25}  # steps from one read of the losses to the next: each waits for the device
_CHECKPOINT_SECONDS = 20.0  # from one checkpoint to the next, at least
_REFUSALS = "deterministic", "No available kernel"  # what torch says where deterministic algorithms leave none
_LOSSES = {Restart.LOSSY: rounded, Restart.WEIGHTS_ONLY: without_moments}  # of a state that restarts


def train(run: Run, folder: Path, device: torch.device, report: Within | None = None) -> Trained:
    """Train a run in a folder of its own, or go on with it there, or return what is finished.

    A run that was killed at any moment goes on from its last checkpoint to the same final weights, bit for bit.

    Args:
        run: what is trained.
        folder: holds its checkpoints and snapshots and nothing else.
        device: where. Several ranks on CUDA take the devices from 0 on.
        report: is called each time that the losses are read, with the steps that are done, of how many, loss and speed.

    Raises:
        BadInput: for a folder that holds another run, and for ranks that there is no device for.
        Unsupported: for a model or an attention that cannot be trained as arguments.
        StoreError: if a file cannot be written; what was written stays.
    """
    key = run.key(device)
    folder.mkdir(parents=True, exist_ok=True)
    finished = Trained.find(folder, key)
    if finished is not None:
        return finished
    trained = Trained(folder, key, run.task.steps)
    if run.rung.ranks == 1:
        return take_part(run, device, report, trained)
    from numdev.training import ranks  # late: it imports this module

    return ranks.train(run, device, report, trained)


def take_part(run: Run, device: torch.device, report: Within | None, trained: Trained) -> Trained:
    """The part of this process in a run, by deterministic algorithms where there are; see `train`."""
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
    """One process's part in a run. `finish` does it; everything else is its parts.

    Losses are read after every step on a CPU; on a GPU after every 25, and before every snapshot and restart. A loss that is not
    finite, or gradients that are not although the loss is not scaled, end the run at the first such step, whenever it is read.
    """

    def __init__(self, run: Run, device: torch.device, report: Within | None, trained: Trained) -> None:
        self._run, self._device, self._report, self._trained = run, device, report, trained
        self._shared = run.rung.ranks > 1
        self._rank = dist.get_rank() if self._shared else 0
        self._leads = self._rank == 0  # writes files and reports progress
        self._watch = Watch(device) if run.rung.watch else None
        self._stretches: list[float] = []  # seconds of a step, from one read to the next
        self._saved_at = time.perf_counter()

    def finish(self) -> Trained:
        """Do all steps that are left; see `train`."""
        attention, watch = self._run.rung.attention, self._watch
        with attend(attention if watch is None else Watched(attention, watch)) as self._seen:
            self._begin(Restart.NONE)
            for batch in self._run.batches(self._trained.done):
                if self._trained.done == self._run.half:
                    self._restart()
                self._advance(self._run.share(batch, self._rank))
                if self._trained.stopped:
                    break
        return self._end()

    def _begin(self, restart: Restart) -> None:
        """A new model, in the state of the last checkpoint less what a restart loses, or in the initial one."""
        self._state, self._is_new = State(self._run, self._device, self._seen, self._watch), True
        saved = self._trained.go_back()
        if saved is not None:
            self._state.restore(_LOSSES[restart](saved) if restart in _LOSSES else saved)
        if self._leads:
            for torn in self._trained.folder.glob(".*.tmp"):  # of a process that was killed while it wrote
                torn.unlink(missing_ok=True)
            if self._trained.done == 0:
                self._trained.write_snapshot(self._state)
        self._start_clock()

    def _restart(self) -> None:
        """Restart after half of the steps as the rung asks for, through a checkpoint on disk.

        Every checkpoint of this step is from before the restart: a run that is resumed from it restarts too.
        """
        if self._leads:
            self._trained.write_checkpoint(self._state)
        if self._shared:
            dist.barrier()  # it is written
        self._begin(self._run.rung.restart)

    def _advance(self, batch: Batch) -> None:
        """One step, and what is due after it."""
        trained, state = self._trained, self._state
        if self._is_new and self._device.type == "cuda" and (why := state.capture(batch)):
            trained.note(why)
        self._is_new = False
        state.step(trained.done, batch)
        if not state.calls:
            hint = "it never calls torch.nn.functional.scaled_dot_product_attention; give a model with attention to exchange"
            raise BadInput("task.model", type(state.model).__name__, hint)
        trained.done = done = trained.done + 1
        if done % _READ_EVERY[self._device.type] and done not in (trained.steps, self._run.half, *trained.snapshot_steps):
            return
        self._read()
        if self._leads and self._report is not None:
            rate = 1 / max(trained.seconds_per_step, 1e-9)
            self._report(trained.done, trained.steps, f"loss {float(state.losses[done - 1]):.3f}, {rate:.3g} steps/s")
        if self._leads and not trained.stopped:
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
        trained.seconds += seconds
        trained.seconds_per_step = statistics.median(self._stretches[1:] or self._stretches)  # the first compiles and captures
        good = losses.isfinite() if self._state.scale is not None else losses.isfinite() & norms.isfinite()
        if not bool(good.all()):
            place = int(good.logical_not().nonzero()[0])
            what = "gradients are" if math.isfinite(float(losses[place])) else "loss is"
            trained.done, trained.stopped = first + place, f"the {what} not finite at step {first + place}"

    def _end(self) -> Trained:
        """The finished run, written by the process that leads and read by the others."""
        trained, state, last = self._trained, self._state, checksum(self._state.weights())
        if self._shared and not trained.stopped:
            checksums: list[str | None] = [None] * self._run.rung.ranks
            dist.all_gather_object(checksums, last)
            if len(set(checksums)) != 1:
                raise RuntimeError(f"the {len(checksums)} ranks ended with different weights")
        if self._leads:
            count = trained.done + bool(trained.stopped)
            trained.losses, trained.gradient_norms = (tuple(x[:count].tolist()) for x in (state.losses, state.norms))
            trained.watched = tuple(map(tuple, state.watched[:count].tolist()))
            trained.checksum = checksum(trained.weights(max(trained.snapshots))) if trained.stopped else last
            trained.parameters = sum(x.numel() for x in state.parameters.values())
            trained.captured, trained.calls, trained.missed = state.captured, state.calls, state.missed
            trained.write()
            trained.remove_checkpoints()
        if self._shared:
            dist.barrier()  # it is there for the others to read
        finished = Trained.find(trained.folder, trained.key)
        assert finished is not None
        return finished
