"""Data-parallel training: processes that share each batch, started here or by torchrun."""

from __future__ import annotations

import itertools
import os
import pickle
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from numdev.errors import BadInput
from numdev.results.record import Within
from numdev.training.loop import Training
from numdev.training.run import Run, deterministic
from numdev.training.run_files import Trained

_POLL = 0.2  # seconds between two looks at the processes
_REQUEST, _FAILED = "request", "failed"  # keys of a store


@dataclass(frozen=True)
class _Request:
    """A run, as every process hears of it."""

    run: Run
    kind: str
    trained: Trained
    threads: int


@lru_cache(maxsize=1)
def _stores() -> Iterator[Any]:
    """The store of each run that the processes of torchrun share, one after the other: its keys outlive the run."""
    store, _, _ = next(dist.rendezvous("env://"))  # type: ignore[attr-defined]
    return (dist.PrefixStore(f"numdev/{number}", store) for number in itertools.count())  # type: ignore[attr-defined]


def lead_or_follow(command: Callable[[], int]) -> int:
    """The exit code of a command that torchrun started several times: rank 0 runs it, and the others only train what it requests.

    So one process alone plans, locks runs, writes and prints. The others import what it does.
    """
    stores = _stores()
    if os.environ["RANK"] == "0":
        try:
            return command()
        finally:
            next(stores).set(_REQUEST, pickle.dumps(([], pickle.dumps(None))))
    try:
        while (request := _received(store := next(stores))) is not None:
            with suppress(Exception):  # rank 0 has the same one, or hears of this one, and reports it
                _joined_by_torchrun(request, store, None)
    except KeyboardInterrupt:
        return 130
    return 0


def _received(store: Any) -> _Request | None:
    """The next request of rank 0, however long it takes; None where rank 0 has ended."""
    try:
        while not store.check([_REQUEST]):
            time.sleep(_POLL)
    except RuntimeError:  # rank 0 held the store
        return None
    path, data = pickle.loads(store.get(_REQUEST))
    sys.path += [folder for folder in path if folder not in sys.path]
    request: _Request | None = pickle.loads(data)
    return request


def train(run: Run, folder: Path, device: torch.device, report: Within | None) -> Trained:
    """`numdev.training.loop.train` with `run.rung.ranks` processes, of which this is rank 0.

    Torchrun started the others where `RANK` is set; else they are started here. Each has its share of this process's threads.

    Raises:
        BadInput: where torchrun started another number, or a host has fewer CUDA devices than ranks.
    """
    size = run.rung.ranks
    trained = Trained(folder.resolve(), run.key(device), run.task.steps)
    request = _Request(run, device.type, trained, max(1, torch.get_num_threads() // size))
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != size:
            hint = f"torchrun started {os.environ['WORLD_SIZE']} processes; start as many as there are ranks"
            raise BadInput("rung.ranks", size, hint)
        store = next(_stores())
        store.set(_REQUEST, pickle.dumps((sys.path, pickle.dumps(request))))
        return replace(_joined_by_torchrun(request, store, report), folder=folder)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        hint = f"this host has {torch.cuda.device_count()} CUDA devices; give at most that, or use torchrun over several hosts"
        raise BadInput("rung.ranks", size, hint)
    with _followers(request) as store:
        return replace(_joined(request, store, 0, 0, report), folder=folder)


@contextmanager
def _followers(request: _Request) -> Iterator[Any]:
    """The store by which this process meets the others, which it starts and ends."""
    if processes.get_start_method(allow_none=True) not in (None, *processes.get_all_start_methods()):
        # A process tells those it starts how it was started itself; a worker of joblib's says what Python does not know.
        processes.set_start_method("spawn", force=True)
    context, size = processes.get_context("spawn"), request.run.rung.ranks
    with tempfile.TemporaryDirectory(prefix="numdev-ranks-") as meeting:
        path = f"{meeting}/store"
        started = [context.Process(target=_follow, args=(rank, path, request), daemon=True) for rank in range(1, size)]
        for process in started:
            process.start()
        try:
            store = dist.FileStore(path, size)  # type: ignore[attr-defined]
            while not store.check([f"here/{rank}" for rank in range(1, size)]):
                if failed := [process.exitcode for process in started if process.exitcode]:
                    raise RuntimeError(f"a rank ended with exit code {failed[0]}")
                time.sleep(_POLL)
            yield store
        finally:
            for process in started:
                process.terminate()
                process.join()


def _follow(rank: int, path: str, request: _Request) -> None:
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    store = dist.FileStore(path, request.run.rung.ranks)  # type: ignore[attr-defined]
    store.set(f"here/{rank}", "")
    with suppress(Exception, KeyboardInterrupt):  # as in `lead_or_follow`
        _joined(request, store, rank, rank, None)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)


def _joined_by_torchrun(request: _Request, store: Any, report: Within | None) -> Trained:
    rank, local, size, hosted = (
        int(os.environ.get(name, "0")) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")
    )
    return _joined(request, store, rank, local, report, is_one_host=hosted == size)


def _joined(request: _Request, store: Any, rank: int, local: int, report: Within | None, *, is_one_host: bool = True) -> Trained:
    """The part of this process, in a process group that lasts as long.

    Raises:
        RuntimeError: what ended another process, where that is why this one cannot go on.
    """
    kind, threads, size = request.kind, torch.get_num_threads(), request.run.rung.ranks
    device = torch.device(kind, local) if kind == "cuda" else torch.device(kind)
    if is_one_host and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whose name need not resolve
    torch.set_num_threads(request.threads)
    try:
        with deterministic():
            if kind == "cuda":
                torch.cuda.set_device(device)
            backend, bound = ("nccl", device) if kind == "cuda" else ("gloo", None)
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)
            return Training(request.run, device, report, request.trained).finish()
    except Exception as error:
        if isinstance(error, RuntimeError) and store.check([_FAILED]):  # another failed before, and closed what connects them
            raise RuntimeError(store.get(_FAILED).decode()) from error
        store.set(_FAILED, f"rank {rank}: {type(error).__name__}: {error}")
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        torch.set_num_threads(threads)
