"""Data-parallel training: processes of this host that share each batch."""

from __future__ import annotations

import os
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from numdev.errors import BadInput
from numdev.results.record import Within
from numdev.training.loop import take_part
from numdev.training.run import Run
from numdev.training.run_files import Trained

_POLL = 0.2  # seconds between two looks at the processes
_FAILED = "failed"  # key of a store


@dataclass(frozen=True)
class _Request:
    """A run, as every process hears of it."""

    run: Run
    kind: str
    trained: Trained
    threads: int

    def join(self, store: Any, rank: int, report: Within | None = None) -> Trained:
        """The part of this process, in a process group that lasts as long.

        Raises:
            RuntimeError: what ended another process, where that is why this one cannot go on.
        """
        threads, gpu = torch.get_num_threads(), self.kind == "cuda"
        device = torch.device("cuda", rank) if gpu else torch.device(self.kind)
        if sys.platform == "linux":
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # the host's name need not resolve
        torch.set_num_threads(self.threads)
        try:
            if gpu:
                torch.cuda.set_device(device)
            backend, bound = ("nccl", device) if gpu else ("gloo", None)
            size = self.run.rung.ranks
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, device_id=bound)
            return take_part(self.run, device, report, self.trained)
        except Exception as error:
            if isinstance(error, RuntimeError) and store.check([_FAILED]):  # another failed before, and closed what connects them
                raise RuntimeError(store.get(_FAILED).decode()) from error
            store.set(_FAILED, f"rank {rank}: {type(error).__name__}: {error}")
            raise
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
            torch.set_num_threads(threads)


def train(run: Run, device: torch.device, report: Within | None, trained: Trained) -> Trained:
    """`numdev.training.loop.take_part` with `run.rung.ranks` processes, each with its share of this one's threads.

    Raises:
        BadInput: where this host has fewer CUDA devices than ranks.
    """
    size = run.rung.ranks
    if device.type == "cuda" and torch.cuda.device_count() < size:
        raise BadInput("rung.ranks", size, f"this host has {torch.cuda.device_count()} CUDA devices; give at most that")
    request = _Request(run, device.type, trained, max(1, torch.get_num_threads() // size))
    with _followers(request) as store:
        return request.join(store, 0, report)


@contextmanager
def _followers(request: _Request) -> Iterator[Any]:
    """The store by which this process, rank 0, meets the others, which it starts and ends."""
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
    """The life of another rank, which ends with the process that started it."""
    parent = os.getppid()

    def end_with_parent() -> None:
        while os.getppid() == parent:
            time.sleep(_POLL)
        os._exit(1)

    threading.Thread(target=end_with_parent, daemon=True).start()
    store = dist.FileStore(path, request.run.rung.ranks)  # type: ignore[attr-defined]
    store.set(f"here/{rank}", "")
    with suppress(Exception, KeyboardInterrupt):  # rank 0 has the same one, or hears of this one, and reports it
        request.join(store, rank)
