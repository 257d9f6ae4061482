"""Studies measured on a CPU by several processes, each with one thread of torch, and which points each of them takes.

One thread measures as fast beside busy neighbours as alone, and its sums have one order: the bits of a study do not depend on how
many processes measure it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from itertools import groupby

import torch

from numdev.errors import BadInput, NumdevError
from numdev.machine import available_bytes, usable_cores
from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.measurement.estimate import needed_bytes
from numdev.measurement.runner import CACHE_BYTES, Runner
from numdev.results.store import Store
from numdev.results.study import Outcome, PointEnded, Progress, Shard, Study, StudyPoint, begin, measured, stored

THREADS = "OMP_NUM_THREADS"
_TOKENS, _REPLICATES = 512, 100.0  # a pool is worth its start from so many replicates of a problem with so many tokens
_BYTES = 1 << 30  # of memory for each worker, at least

Points = list[tuple[str, StudyPoint]]  # with their keys


def is_pooled(bench: Runner) -> bool:
    """Whether processes beside one another measure the same as one: deviations on a CPU, but not times and not what trains."""
    return bench.kind_name == DEVIATION and bench.device.type == "cpu"


@contextmanager
def one_thread(bench: Runner) -> Iterator[None]:
    """In it torch has one thread if `bench` can be pooled, unless the user has set how many there are (`OMP_NUM_THREADS`)."""
    threads = torch.get_num_threads()
    if is_pooled(bench) and not os.environ.get(THREADS):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def number(workers: int | None, bench: Runner, points: Sequence[StudyPoint], *, alone: bool) -> int:
    """How many processes measure these points: `workers` if it is given, else one for each usable core if that is worth it.

    Args:
        workers: as the user states it.
        bench: measures the points, under `one_thread`.
        points: those that are not stored.
        alone: whether no other process measures a part of the same study.

    Raises:
        BadInput: for a number of workers that cannot be had.
    """
    if workers is not None and workers < 1:
        raise BadInput("workers", workers, "give a number of processes, at least 1, or null")
    able = is_pooled(bench) and sys.platform == "linux" and torch.get_num_threads() == 1
    if workers is not None:
        if workers > 1 and not able:
            hint = f"they measure deviations, on a CPU under Linux, with one thread each; leave out workers, or {THREADS}"
            raise BadInput("workers", workers, hint)
        return min(workers, max(len(points), 1))
    if not (alone and able) or sum(_replicates(bench, point) for point in points) < _REPLICATES:
        return 1
    return max(1, min(usable_cores(), len(points), available_bytes(bench.device) // _BYTES))


def _replicates(bench: Runner, point: StudyPoint) -> float:
    """A point's work in replicates of a problem with `_TOKENS` tokens; what takes less counts as one, since it has a cost too."""
    workload = bench.kind.operation.workload
    small = workload.smaller(point.problem, _TOKENS)
    share = 1.0 if small is None else workload.size(point.problem)[-1] / workload.size(small)[-1]
    return point.seeds * max(share, 1.0)


def tasks(points: Points, bench: Runner, count: int) -> list[Points]:
    """Points of one problem together, for golden to be computed once; shared where that keeps workers idle. Longest first."""

    def size(points: Points) -> float:
        return sum(point.seeds * bench.kind.operation.workload.size(point.problem)[-1] for _, point in points)

    most, parts = size(points) / (2 * count), list[Points]()
    for _, group in groupby(points, key=lambda item: item[1].problem):
        parts.append([])
        for item in group:
            if parts[-1] and size([*parts[-1], item]) > most:
                parts.append([])
            parts[-1].append(item)
    return sorted(parts, key=size, reverse=True)


_WORK: list[tuple[Study, Runner, Store]] = []
"""In a worker, the studies, what measures them and where: forked, so that they need not be sent."""


def _begin_worker(threads: int, work: list[tuple[Study, Runner, Store]]) -> None:
    """Ctrl-C reaches the command alone, which ends its workers; they end by themselves when the command is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))  # removes files that are half written
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _WORK[:] = work


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _measure(study: int, points: Sequence[tuple[str, int]]) -> list[tuple[str, PointEnded]]:
    """Measure points of a study, named by key and place."""
    own, bench, store = _WORK[study]
    return [(key, measured(own.points[place], bench, store, key, {})) for key, place in points]


class Workers(ProcessPoolExecutor):
    """Processes that measure the points of studies; forked before a progress bar starts its thread."""

    def __init__(self, count: int, work: Sequence[tuple[Study, Runner]], store: Store) -> None:
        self.count, self.work, self.store = count, work, store
        # Golden results of a worker go with it.
        own = [(study, Runner(bench.kind, str(bench.device), CACHE_BYTES // count), store) for study, bench in work]
        fork, threads = multiprocessing.get_context("fork"), torch.get_num_threads()
        super().__init__(count, fork, initializer=_begin_worker, initargs=(threads, own))
        self.submit(os.getpid).result()

    def run(self, place: int, *, fresh: bool, shard: Shard, keys: Sequence[str], progress: Progress) -> Outcome:
        """As `numdev.results.study.run` for the study at a place, with the same records and the same outcome.

        Raises:
            NumdevError: if a worker is killed. An error that a worker raises is raised here.
        """
        study, bench = self.work[place]
        start, largest = time.perf_counter(), available_bytes(bench.device) // (2 * self.count)  # what a worker's point may need
        work = begin(study, bench, self.store, shard, keys)
        ended = {} if fresh else {key: how for key, _ in work if (how := stored(self.store, key))}
        left = [item for item in work if item[0] not in ended]
        alone = [item for item in left if (needed_bytes(bench.kind, item[1].problem, item[1].variant) or 0) > largest]
        if left:
            progress(len(ended), len(work), left[0][1])
        try:
            at = {key: i for i, key in enumerate(keys)}
            shared = tasks([item for item in left if item not in alone], bench, self.count)
            futures = {self.submit(_measure, place, [(key, at[key]) for key, _ in part]): part for part in shared}
            for future in as_completed(futures):
                ended.update(future.result())
                progress(len(ended), len(work), futures[future][-1][1])
        except BaseException as error:
            self.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
                process.join()
            if isinstance(error, BrokenProcessPool):
                hint = "the system ends processes where memory ends; use workers=1, or less memory. What is measured is kept"
                raise NumdevError(f"workers: one of them was killed; {hint}") from None
            raise
        for key, point in alone:  # with all of the memory
            progress(len(ended), len(work), point)
            ended[key] = measured(point, bench, self.store, key, {})
        outcome = Outcome()
        for key, point in work:
            outcome.add(point, ended[key])
        outcome.seconds = time.perf_counter() - start  # what passed, of which each point's own time is a part
        return outcome
