"""Batches made by another thread while the device computes."""

from __future__ import annotations

import queue
import threading
from types import TracebackType

from torch import Tensor

from numdev.training.run import Run
from numdev.training.task import Batch

_AHEAD = 4


class Prefetch:
    """The batches of steps `start` to the end, in order; a context manager that ends its thread.

    What `batch_of` raises is raised by `next` in its turn. Each rank makes the whole batch and takes its own slice.
    """

    def __init__(self, run: Run, start: int, rank: int = 0, *, pinned: bool = False) -> None:
        self._run, self._start, self._rank, self._pinned = run, start, rank, pinned
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(_AHEAD)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._fill, name="batches", daemon=True)

    def __enter__(self) -> Prefetch:
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        self._ended.set()
        while self._thread.is_alive():
            try:
                self._queue.get_nowait()  # makes room for a thread that waits for it
            except queue.Empty:
                self._thread.join(0.01)

    def __next__(self) -> Batch:
        found = self._queue.get()
        if isinstance(found, BaseException):
            raise found
        return found

    def _fill(self) -> None:
        try:
            for batch in self._run.batches(self._start):
                self._queue.put(self._slice(batch))
                if self._ended.is_set():
                    return
        except BaseException as error:  # whatever it is, it is the caller's to see
            self._queue.put(error)

    def _slice(self, batch: Batch) -> Batch:
        rows = self._run.task.batch // self._run.rung.ranks
        return {name: self._held(x[self._rank * rows : (self._rank + 1) * rows]) for name, x in batch.items()}

    def _held(self, x: Tensor) -> Tensor:
        return x.contiguous().pin_memory() if self._pinned else x
