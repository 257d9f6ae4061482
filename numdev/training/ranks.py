"""Data-parallel training: processes that share each batch, started here or by torchrun."""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor

from numdev.errors import BadInput
from numdev.training.deterministic import deterministic
from numdev.training.execution import Execution, Progress, Told
from numdev.training.loop import Training
from numdev.training.run import Run
from numdev.training.trained import Trained
from numdev.training.world import World

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
        found: list[str | None] = [None] * self.size
        dist.all_gather_object(found, checksum)
        if len(set(found)) != 1:
            raise RuntimeError(f"the {self.size} ranks ended with different weights")


@dataclass(frozen=True)
class _Request:
    """What a process is told when it is started."""

    run: Run
    folder: Path
    kind: str
    execution: Execution
    key: str
    threads: int
    meeting: str


def train(run: Run, folder: Path, device: torch.device, told: Told | None, execution: Execution) -> Trained:
    """`numdev.training.train.train` with `run.rung.ranks` processes.

    Under torchrun (`RANK` is set) this process is one of them, and all return the same. Else they are started here, each with its
    share of this process's threads, and end with it.

    Raises:
        BadInput: where torchrun started another number, or a host has fewer CUDA devices than ranks.
    """
    size = run.rung.ranks
    if "RANK" in os.environ:
        if int(os.environ["WORLD_SIZE"]) != size:
            mend = f"torchrun started {os.environ['WORLD_SIZE']} processes; start as many as there are ranks"
            raise BadInput("rung.ranks", size, mend)
        return _joined(run, folder, device.type, told, execution)
    if device.type == "cuda" and torch.cuda.device_count() < size:
        mend = f"this host has {torch.cuda.device_count()} CUDA devices; give at most that, or use torchrun over several hosts"
        raise BadInput("rung.ranks", size, mend)
    with tempfile.TemporaryDirectory(prefix="numdev-ranks-") as meeting:
        threads = max(1, torch.get_num_threads() // size)
        request = _Request(run, folder, device.type, execution, run.key(device), threads, f"file://{meeting}/store")
        _start(request, size, told)
    found = Trained.find(folder, run.key(device), execution.kept)
    if found is None:
        raise RuntimeError("the processes ended and left no result")
    return found


def _start(request: _Request, size: int, told: Told | None) -> None:
    """Start the processes, pass on their progress, and raise what one of them raised."""
    context = processes.get_context("spawn")
    said: Any = context.SimpleQueue()
    started = [context.Process(target=_child, args=(rank, size, request, said), daemon=True) for rank in range(size)]
    if processes.get_start_method(allow_none=True) not in (None, *processes.get_all_start_methods()):
        # A process tells those it starts how it was started itself; a worker of joblib's says what Python does not know.
        processes.set_start_method("spawn", force=True)
    for process in started:
        process.start()
    try:
        while any(process.is_alive() for process in started):
            _hear(said, told)
            if any(process.exitcode for process in started):
                break
            time.sleep(_POLL)
        _hear(said, told)
        failed = [process.exitcode for process in started if process.exitcode]
        if failed:
            raise RuntimeError(f"a rank ended with exit code {failed[0]}")
    finally:
        for process in started:
            process.terminate()
            process.join()


def _hear(said: Any, told: Told | None) -> None:
    while not said.empty():
        word = pickle.loads(said.get())
        if isinstance(word, BaseException):
            raise word
        if told is not None:
            told(word)


def _child(rank: int, size: int, request: _Request, said: Any) -> None:
    threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    torch.set_num_threads(request.threads)
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(size)}
    if sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # all ranks are on this host, whose name need not resolve

    def tell(progress: Progress) -> None:
        said.put(pickle.dumps(progress))

    try:
        _joined(request.run, request.folder, request.kind, tell, request.execution, request)
    except KeyboardInterrupt:
        os._exit(1)
    except Exception as error:
        try:
            said.put(pickle.dumps(error))
        except (pickle.PicklingError, TypeError, AttributeError):
            said.put(pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}")))
        os._exit(1)


def _end_with_parent(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_POLL)
    os._exit(1)


def _joined(
    run: Run, folder: Path, kind: str, told: Told | None, execution: Execution, request: _Request | None = None
) -> Trained:
    """The part of this process, in a process group that lasts as long."""
    device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    with deterministic():
        if kind == "cuda":
            torch.cuda.set_device(device)
        where = request.meeting if request else "env://"
        own = not dist.is_initialized()
        if own:
            rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
            backend, bound = ("nccl", device) if kind == "cuda" else ("gloo", None)
            dist.init_process_group(backend, where, rank=rank, world_size=size, device_id=bound)
        try:
            key = request.key if request else run.key(device)
            return Training(run, folder, device, told, execution, Ranks(), key).finish()
        finally:
            if own:
                dist.destroy_process_group()
