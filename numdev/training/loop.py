"""Trains a run, or goes on with it where it was left: the loop over steps, with its snapshots, checkpoints, restart and end.

A run with several ranks is shared by processes of this host, each with its part of every batch and of this process's threads.
"""

from __future__ import annotations

import math
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from numdev.errors import BadInput, Unsupported
from numdev.results.record import Within
from numdev.training.attend import attend
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
_POLL = 0.2  # seconds between two looks at the processes


def train(run: Run, folder: Path, device: torch.device, report: Within | None = None) -> Trained:
    """Train a run in a folder of its own, or go on with it there, or return what is finished.

    A run that was killed at any moment goes on from its last checkpoint to the same final weights, bit for bit. `report` is
    called each time that the losses are read, with the steps that are done, of how many, loss and speed. Ranks on CUDA take the
    devices from 0 on.

    Raises:
        BadInput: for a folder that holds another run, and for ranks that there is no device for.
        Unsupported: for a model or an attention that cannot be trained as arguments.
        StoreError: if a file cannot be written; what was written stays.
    """
    key, size = run.key(device), run.rung.ranks
    folder.mkdir(parents=True, exist_ok=True)
    finished = Trained.find(folder, key)
    if finished is not None:
        return finished
    trained = Trained(folder, key, run.task.steps)
    if size == 1:
        return _part(run, device, report, trained)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise BadInput("rung.ranks", size, f"this host has {torch.cuda.device_count()} CUDA devices; give at most that")
    with _followers(run, device.type, trained) as store:
        return _shared_part(run, device.type, report, trained, 0, store)


def _part(run: Run, device: torch.device, report: Within | None, trained: Trained) -> Trained:
    """The part of this process in a run, by deterministic algorithms where there are."""
    with deterministic():
        try:
            return Training(run, device, report, replace(trained)).finish()
        except (RuntimeError, Unsupported) as error:
            if not any(words in str(error) for words in _REFUSALS):
                raise
            why = f"no deterministic algorithm, so the same run again may have other bits: {str(error).splitlines()[0]}"
        torch.use_deterministic_algorithms(True, warn_only=True)
        return Training(run, device, report, replace(trained, notes=(why,))).finish()


@contextmanager
def _followers(run: Run, kind: str, trained: Trained) -> Iterator[Any]:
    """The store by which this process, rank 0, meets the others, which it starts and ends."""
    if processes.get_start_method(allow_none=True) not in (None, *processes.get_all_start_methods()):
        # A process tells those it starts how it was started itself; a worker of joblib's says what Python does not know.
        processes.set_start_method("spawn", force=True)
    context, size, threads = processes.get_context("spawn"), run.rung.ranks, torch.get_num_threads()
    own = max(1, threads // size)
    with tempfile.TemporaryDirectory(prefix="numdev-ranks-") as meeting:
        path = f"{meeting}/store"
        arguments = [(rank, own, path, run, kind, trained) for rank in range(1, size)]
        started = [context.Process(target=_follow, args=each, daemon=True) for each in arguments]
        for process in started:
            process.start()
        torch.set_num_threads(own)
        try:
            store = dist.FileStore(path, size)  # type: ignore[attr-defined]
            while not store.check([f"here/{rank}" for rank in range(1, size)]):
                if failed := [process.exitcode for process in started if process.exitcode]:
                    raise RuntimeError(f"a rank ended with exit code {failed[0]}")
                time.sleep(_POLL)
            yield store
        finally:
            torch.set_num_threads(threads)
            for process in started:
                process.terminate()
                process.join()


def _follow(rank: int, threads: int, path: str, run: Run, kind: str, trained: Trained) -> None:
    """The life of another rank, which ends with the process that started it."""
    parent = os.getppid()

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    store = dist.FileStore(path, run.rung.ranks)  # type: ignore[attr-defined]
    store.set(f"here/{rank}", "")
    with suppress(Exception, KeyboardInterrupt):  # rank 0 has the same one, or hears of this one, and reports it
        _shared_part(run, kind, None, trained, rank, store)


def _shared_part(run: Run, kind: str, report: Within | None, trained: Trained, rank: int, store: Any) -> Trained:
    """The part of a rank, in a process group that lasts as long.

    Raises:
        RuntimeError: what ended another process, where that is why this one cannot go on.
    """
    gpu, size = kind == "cuda", run.rung.ranks
    device = torch.device(kind, rank) if gpu else torch.device(kind)
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
    try:
        if gpu:
            torch.cuda.set_device(device)
        backend, bound = ("nccl", device) if gpu else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)
        return _part(run, device, report, trained)
    except Exception as error:
        if isinstance(error, RuntimeError) and store.check(["failed"]):  # another failed before, and closed what connects them
            raise RuntimeError(store.get("failed").decode()) from error
        store.set("failed", f"rank {rank}: {type(error).__name__}: {error}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


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
        saved = self._trained.resume()
        if saved is not None:
            self._state.restore(_RESTARTED[restart](saved) if restart in _RESTARTED else saved)
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
        if not state.seen.calls:
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
            trained.captured, trained.calls, trained.missed = state.graph is not None, state.seen.calls, state.seen.missed
            trained.write()
            trained.remove_checkpoints()
        if self._shared:
            dist.barrier()  # it is there for the others to read
        finished = Trained.find(trained.folder, trained.key)
        assert finished is not None
        return finished
