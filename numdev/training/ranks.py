"""Data-parallel training: processes that share each batch, started here or by torchrun."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from numdev.errors import BadInput
from numdev.training.loop import Execution, Progress, Report, Training
from numdev.training.run import Run, deterministic
from numdev.training.run_files import Trained
from numdev.training.step import World

_POLL = 0.2  # seconds between two looks at the processes


class Ranks(World):
    """One of several processes of an initialised process group."""

    def __init__(self) -> None:
        self.rank = dist.get_rank()
        self.size = dist.get_world_size()

    def average(self, gradients: list[Tensor], loss: Tensor) -> Tensor:
        """By one all-reduce of everything, in FP32: all processes get the same bits."""
        parts = [*gradients, loss]
        flat = torch.cat([x.reshape(-1).float() for x in parts])
        dist.all_reduce(flat)
        flat /= self.size
        for x, mean in zip(gradients, flat.split([x.numel() for x in parts]), strict=False):
            x.copy_(mean.view_as(x))
        return flat[-1]

    def wait(self) -> None:
        dist.barrier()

    def agree(self, checksum: str) -> None:
        checksums: list[str | None] = [None] * self.size
        dist.all_gather_object(checksums, checksum)
        if len(set(checksums)) != 1:
            raise RuntimeError(f"the {self.size} ranks ended with different weights")


@dataclass(frozen=True)
class _Request:
    """A run, as every process hears of it."""

    run: Run
    folder: Path
    kind: str
    execution: Execution
    key: str
    threads: int


@dataclass(frozen=True)
class _Place:
    """Which of the processes this is, and the store by which they find each other."""

    rank: int
    local: int
    size: int
    is_one_host: bool
    store: Any


class _Torchrun:
    """The processes that torchrun started.

    Attributes:
        runs: how many they have shared. Each has keys of its own in the store, which outlives them.
        leads: whether the others wait for what this one requests; else all train the same by themselves.
    """

    def __init__(self) -> None:
        self._store, self._rank, self._size = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
        self.runs, self.leads = 0, False

    def place(self) -> _Place:
        """That of this process in the next run."""
        self.runs += 1
        local, hosted = int(os.environ.get("LOCAL_RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "0"))
        store = dist.PrefixStore(f"numdev/{self.runs}", self._store)  # type: ignore[attr-defined]
        return _Place(self._rank, local, self._size, hosted == self._size, store)

    def send(self, request: _Request | None) -> None:
        """Have the others train their parts of the next run, or end; they import what this process does."""
        self._store.set(f"numdev/request/{self.runs}", pickle.dumps((sys.path, pickle.dumps(request))))

    def receive(self) -> _Request | None:
        """The next request of rank 0; waits as long as it takes. None where rank 0 has ended."""
        try:
            while not self._store.check([f"numdev/request/{self.runs}"]):
                time.sleep(_POLL)
        except RuntimeError:  # rank 0 held the store
            return None
        path, data = pickle.loads(self._store.get(f"numdev/request/{self.runs}"))
        sys.path += [folder for folder in path if folder not in sys.path]
        request: _Request | None = pickle.loads(data)
        return request


@lru_cache(maxsize=1)
def _torchrun() -> _Torchrun:
    return _Torchrun()


def lead_or_follow(command: Callable[[], int]) -> int:
    """The exit code of a command that torchrun started several times: rank 0 runs it, and the others only train what it requests.

    So one process alone plans, locks runs, writes and prints.
    """
    torchrun = _torchrun()
    if os.environ["RANK"] == "0":
        torchrun.leads = True
        try:
            return command()
        finally:
            torchrun.send(None)
    try:
        while (request := torchrun.receive()) is not None:
            with suppress(Exception):  # rank 0 has the same one, or hears of this one, and reports it
                _joined(request, torchrun.place(), None)
    except KeyboardInterrupt:
        return 130
    return 0


def train(run: Run, folder: Path, device: torch.device, report: Report | None, execution: Execution) -> Trained:
    """`numdev.training.loop.train` with `run.rung.ranks` processes.

    Under torchrun (`RANK` is set) this process is one of them, and all return the same. Else they are started here, each with its
    share of this process's threads, and end with it.

    Raises:
        BadInput: where torchrun started another number, or a host has fewer CUDA devices than ranks.
    """
    size = run.rung.ranks
    threads = max(1, torch.get_num_threads() // size)
    request = _Request(run, folder.resolve(), device.type, execution, run.key(device), threads)
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != size:
            hint = f"torchrun started {os.environ['WORLD_SIZE']} processes; start as many as there are ranks"
            raise BadInput("rung.ranks", size, hint)
        torchrun = _torchrun()
        if torchrun.leads:
            torchrun.send(request)
        return replace(_joined(request, torchrun.place(), report), folder=folder)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        hint = f"this host has {torch.cuda.device_count()} CUDA devices; give at most that, or use torchrun over several hosts"
        raise BadInput("rung.ranks", size, hint)
    _start(request, size, report)
    trained = Trained.find(folder, request.key)
    if trained is None:
        raise RuntimeError("the processes ended and left no result")
    return trained


def _start(request: _Request, size: int, report: Report | None) -> None:
    """Start the processes, pass on their progress, and raise what one of them raised."""
    context = processes.get_context("spawn")
    messages: Any = context.SimpleQueue()
    if processes.get_start_method(allow_none=True) not in (None, *processes.get_all_start_methods()):
        # A process tells those it starts how it was started itself; a worker of joblib's says what Python does not know.
        processes.set_start_method("spawn", force=True)
    with tempfile.TemporaryDirectory(prefix="numdev-ranks-") as meeting:
        shared = size, f"{meeting}/store", request, messages
        started = [context.Process(target=_child, args=(rank, *shared), daemon=True) for rank in range(size)]
        for process in started:
            process.start()
        try:
            while any(process.is_alive() for process in started) and not any(process.exitcode for process in started):
                _hear(messages, report)
                time.sleep(_POLL)
            _hear(messages, report)
            failed = [process.exitcode for process in started if process.exitcode]
            if failed:
                raise RuntimeError(f"a rank ended with exit code {failed[0]}")
        finally:
            for process in started:
                process.terminate()
                process.join()


def _hear(messages: Any, report: Report | None) -> None:
    while not messages.empty():
        message = pickle.loads(messages.get())
        if isinstance(message, BaseException):
            raise message
        if report is not None:
            report(message)


def _child(rank: int, size: int, store: str, request: _Request, messages: Any) -> None:
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()

    def report(progress: Progress) -> None:
        messages.put(pickle.dumps(progress))

    try:
        _joined(request, _Place(rank, rank, size, True, dist.FileStore(store, size)), report)  # type: ignore[attr-defined]
    except KeyboardInterrupt:
        os._exit(1)
    except Exception as error:
        try:
            messages.put(pickle.dumps(error))
        except (pickle.PicklingError, TypeError, AttributeError):
            messages.put(pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))
        os._exit(1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)


def _joined(request: _Request, place: _Place, report: Report | None) -> Trained:
    """The part of this process, in a process group that lasts as long.

    Raises:
        RuntimeError: what ended another process, where that is why this one cannot go on.
    """
    kind, threads = request.kind, torch.get_num_threads()
    device = torch.device(kind, place.local) if kind == "cuda" else torch.device(kind)
    if place.is_one_host and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whose name need not resolve
    own = not dist.is_initialized()
    torch.set_num_threads(request.threads)
    try:
        with deterministic():
            if kind == "cuda":
                torch.cuda.set_device(device)
            if own:
                backend, bound = ("nccl", device) if kind == "cuda" else ("gloo", None)
                dist.init_process_group(backend, store=place.store, rank=place.rank, world_size=place.size, device_id=bound)
            return Training(request.run, request.folder, device, report, request.execution, Ranks(), request.key).finish()
    except Exception as error:
        for name in [f"failed/{rank}" for rank in range(place.size)] if isinstance(error, RuntimeError) else ():
            if place.store.check([name]):  # another process failed before, and closed what connects them
                raise RuntimeError(place.store.get(name).decode()) from error
        place.store.set(f"failed/{place.rank}", f"rank {place.rank}: {type(error).__name__}: {error}")
        raise
    finally:
        if own and dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
