"""Studies measured on a CPU: by how many processes, each with one thread of torch, and which points each of them takes.

One thread measures as fast beside busy neighbours as alone, and its sums have one order: the bits of a study do not depend on how
many processes measure it.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import groupby
from types import TracebackType
from typing import Any

import torch

from numdev.cores import usable_cores
from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.measurement.estimate import needed_bytes
from numdev.measurement.runner import CACHE_BYTES, Runner
from numdev.memory import available_bytes
from numdev.results.store import Store
from numdev.results.study import Outcome, Progress, Shard, Study, StudyPoint, begin, measured, stored
from numdev.workers import Pool, Tell

THREADS = "OMP_NUM_THREADS"
_TOKENS, _REPLICATES = 512, 100.0  # a pool is worth its start from so many replicates of a problem with so many tokens
_BYTES = 1 << 30  # of memory for each worker, at least

Points = list[tuple[str, StudyPoint]]


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


def refuse_unusable(workers: int | None, bench: Runner) -> None:
    """Raise BadInput for a number of workers that cannot be had."""
    if workers is None or workers == 1:
        return
    if workers < 1:
        raise BadInput("workers", workers, "give a number of processes, at least 1, or null")
    if not is_pooled(bench):
        raise BadInput("workers", workers, "they measure deviations, on a CPU; leave it out, or use device=cpu")
    if sys.platform != "linux":
        raise BadInput("workers", workers, "they need Linux; leave it out")
    if torch.get_num_threads() > 1:
        raise BadInput("workers", workers, f"each has one thread, and {THREADS} states more; leave one of them out")


def number(workers: int | None, bench: Runner, points: Sequence[StudyPoint], *, alone: bool) -> int:
    """How many processes measure these points: `workers` if it is given, else one for each usable core if that is worth it.

    Args:
        workers: as the user states it.
        bench: measures the points, under `one_thread`.
        points: those that are not stored.
        alone: whether no other process measures a part of the same study.
    """
    if workers is not None:
        return min(workers, max(len(points), 1))
    if not (alone and is_pooled(bench) and sys.platform == "linux" and torch.get_num_threads() == 1):
        return 1
    if sum(_replicates(bench, point) for point in points) < _REPLICATES:
        return 1
    return max(1, min(usable_cores(), len(points), available_bytes(bench.device) // _BYTES))


def _replicates(bench: Runner, point: StudyPoint) -> float:
    """A point's work in replicates of a problem with `_TOKENS` tokens; what takes less counts as one, since it has a cost too."""
    workload = bench.kind.operation.workload
    small = workload.smaller(point.problem, _TOKENS)
    share = 1.0 if small is None else workload.size(point.problem)[-1] / workload.size(small)[-1]
    return point.seeds * max(share, 1.0)


@dataclass(frozen=True)
class Task:
    """Points of one problem, for one worker: `study` is the place of their study in what the pool measures."""

    study: int
    points: tuple[tuple[str, int], ...]  # key, and place among the points of the study
    size: float


class Workers:
    """Processes that measure the points of some studies."""

    def __init__(self, count: int, work: Sequence[tuple[Study, Runner]], store: Store) -> None:
        self.count, self._work, self._store = count, work, store
        self._largest = available_bytes(work[0][1].device) // (2 * count)  # what a worker's point may need
        threads = torch.get_num_threads()

        def measure(task: Task, tell: Tell) -> None:
            torch.set_num_threads(threads)
            study, bench = work[task.study]
            own = Runner(bench.kind, str(bench.device), CACHE_BYTES // count)  # whose golden results go with it
            for key, place in task.points:
                point = study.points[place]
                told = {"told": lambda done, total: tell(done / total)}
                tell((key, measured(point, own, store, key, told)))  # type: ignore[arg-type]

        self._pool = Pool(count, measure)

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._pool.__exit__(kind, error, trace)

    def run(self, place: int, *, fresh: bool, shard: Shard, keys: Sequence[str], progress: Progress, part: Any) -> Outcome:
        """As `numdev.results.study.run` for the study at a place, with the same records and the same outcome.

        `part` is called with the share of the points at hand that is done.
        """
        start = time.perf_counter()
        study, bench = self._work[place]
        work = begin(study, bench, self._store, shard, keys)
        ended = {} if fresh else {key: found for key, _ in work if (found := stored(self._store, key))}
        points, left = dict(work), [(key, point) for key, point in work if key not in ended]
        large = [item for item in left if (needed_bytes(bench.kind, item[1].problem, item[1].variant) or 0) > self._largest]
        small = [item for item in left if item not in large]
        if left:
            progress(len(ended), len(work), left[0][1])
        shares: dict[int, float] = {}
        for said in self._pool.run(self._tasks(place, small, keys)):
            shares.pop(said.worker, None)
            if isinstance(said.value, float):
                shares[said.worker] = said.value
            elif not said.is_result:
                key, how = said.value
                ended[key] = how
                progress(len(ended), len(work), points[key])
            part(sum(shares.values()))
        for key, point in large:  # alone, with all of the memory
            progress(len(ended), len(work), point)
            ended[key] = measured(point, bench, self._store, key, {})
        outcome = Outcome()
        for key, point in work:
            outcome.add(point, ended[key])
        outcome.seconds = time.perf_counter() - start  # what passed, of which each point's own time is a part
        return outcome

    def _tasks(self, place: int, points: Points, keys: Sequence[str]) -> list[Task]:
        """Those of one problem together, for golden to be computed once; shared where that keeps workers idle. Longest first."""
        at = {key: i for i, key in enumerate(keys)}
        kind = self._work[place][1].kind
        sized = [(key, point, point.seeds * kind.operation.workload.size(point.problem)[-1]) for key, point in points]
        most = sum(size for *_, size in sized) / (2 * self.count)
        tasks: list[Task] = []
        for _, group in groupby(sized, key=lambda item: item[1].problem):
            parts: list[list[tuple[str, float]]] = [[]]
            for key, _, size in group:
                if parts[-1] and sum(one for _, one in parts[-1]) + size > most:
                    parts.append([])
                parts[-1].append((key, size))
            tasks += (Task(place, tuple((key, at[key]) for key, _ in part), sum(size for _, size in part)) for part in parts)
        return sorted(tasks, key=lambda task: -task.size)


def missing(store: Store, study: Study, keys: Sequence[str], shard: Shard, fresh: bool) -> dict[str, StudyPoint]:
    """The points of a shard without a file of a record, or all where they are measured afresh."""
    own = list(dict(zip(keys, study.points, strict=True)).items())[shard.index :: shard.count]
    return {key: point for key, point in own if fresh or not store.holds(key)}
