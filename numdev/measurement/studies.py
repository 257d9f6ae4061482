"""Several studies: what measuring them would take, and their measurement, in this process or in several.

Processes measure a study on a CPU, each with one thread of torch. One thread measures as fast beside busy neighbours as alone,
and its sums have one order: the bits of a study do not depend on how many processes measure it.
"""

from __future__ import annotations

import multiprocessing
import os
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import groupby
from typing import Any, Unpack

import torch

from numdev.errors import BadInput, NumdevError
from numdev.measurement.deviation import KIND as DEVIATION
from numdev.measurement.runner import CACHE_BYTES, Runner
from numdev.results.environment import available_bytes, usable_cores
from numdev.results.record import DONE, Status, Where
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint

Ended = tuple[Status, str]  # how a point ended, and why where it is not `ok`
Points = list[tuple[str, StudyPoint]]  # with their keys
Progress = Callable[[int, int, StudyPoint], None]  # points done, points in all, the point that comes next
Work = Sequence[tuple[Study, Runner]]
THREADS = "OMP_NUM_THREADS"
_REPLICATES = 100  # from which on processes are worth their start


@dataclass(frozen=True)
class Shard:
    """The part `index` of `count` of a study's distinct points."""

    index: int = 0
    count: int = 1

    def __post_init__(self) -> None:
        if self.count < 1 or not 0 <= self.index < self.count:
            raise BadInput("shard", self.index, f"give a number from 0 to shards - 1, which is {self.count - 1}")


@dataclass
class Outcome:
    """Counts of what a run of a study did, and how each of its points ended."""

    measured: int = 0
    skipped: int = 0  # since their records were there
    seconds: float = 0.0  # that measuring took
    statuses: list[Status] = field(default_factory=list)
    failures: list[tuple[str, Status, str]] = field(default_factory=list)  # the point's text, how it ended, why


def keys_of(study: Study, bench: Runner) -> list[str]:
    """The key of each point of a study, in their order."""
    return [bench.key(*point.parts) for point in study.points]


def points_of(study: Study, keys: Sequence[str], shard: Shard) -> Points:
    """The distinct points of a shard, those of one problem together."""
    points = dict(zip(keys, study.points, strict=True))
    first: dict[Any, int] = {}
    for point in points.values():
        first.setdefault(point.problem, len(first))
    return sorted(points.items(), key=lambda item: first[item[1].problem])[shard.index :: shard.count]


def stored(store: Store, key: str) -> Ended | None:
    """How a point of the store ended; None for one that is to be measured."""
    record = store.get(key)
    return None if record is None or record.status not in DONE else (record.status, record.reason)


def measured(point: StudyPoint, bench: Runner, store: Store, key: str, where: Where) -> Ended:
    """Measure a point and store its record; a request that cannot be measured is a failed point, and the others go on."""
    if point.refused:
        record = bench.unmeasured(point.parts, Status.UNSUPPORTED, point.refused)
    else:
        try:
            folders: Where = {"folder": store.work(key), "shared": store.shared}
            record = bench.measure(*point.parts, **(where | folders))
        except BadInput as error:
            record = bench.unmeasured(point.parts, Status.ERROR, str(error))
    store.put(record)
    shutil.rmtree(store.work(key), ignore_errors=True)
    return record.status, record.reason


def run(
    study: Study,
    bench: Runner,
    store: Store,
    *,
    fresh: bool = False,
    shard: Shard | None = None,
    progress: Progress | None = None,
    keys: Sequence[str] | None = None,
    pool: Callable[[Points, int, Progress | None], dict[str, Ended]] | None = None,
    **where: Unpack[Where],
) -> Outcome:
    """Measure the points of a study that the store does not have yet; of `where` the caller may give `on_replicate` and `within`.

    Points of one problem are measured together, so that golden and inputs are computed once for them. A point that fails is
    listed in the outcome and stops no other; one that ended in `error` or `out_of_memory` is tried again by the next run.
    `keys` are those of the points, where they are at hand; a `pool` measures what is left in other processes.
    """
    outcome, ended = Outcome(), dict[str, Ended]()
    keys = keys_of(study, bench) if keys is None else keys
    store.put_study(study.name, study.manifest(keys, bench.kind.name, bench.kind.operation.settings()))
    work, start = points_of(study, keys, shard or Shard()), time.perf_counter()
    if pool is not None:
        left = [(key, point) for key, point in work if fresh or stored(store, key) is None]
        ended, progress = pool(left, len(work), progress), None  # it has reported each
        outcome.seconds = time.perf_counter() - start
    for done, (key, point) in enumerate(work):
        if progress is not None:
            progress(done, len(work), point)
        start = time.perf_counter()
        kept = None if fresh or key in ended else stored(store, key)
        status, reason = kept or ended.get(key) or measured(point, bench, store, key, where)
        if kept is None:
            outcome.measured += 1
            outcome.seconds += time.perf_counter() - start
        else:
            outcome.skipped += 1
        outcome.statuses.append(status)
        if status is not Status.OK:
            outcome.failures.append((point.text(), status, reason))
    return outcome


@dataclass(frozen=True)
class Plan:
    """What measuring some points would take."""

    points: int = 0
    there: int = 0  # of these, those whose figures are stored
    replicates: int = 0  # of the others
    bytes: int = 0  # that the largest of the others needs; 0 where it is not known

    @classmethod
    def of(cls, points: Points, bench: Runner, store: Store, *, fresh: bool) -> Plan:
        """The plan of points with their keys."""
        able = [(key, point) for key, point in points if not point.refused]
        left = [point for key, point in able if fresh or stored(store, key) is None]
        needed = max((bench.kind.needed_bytes(point.problem, point.variant) for point in left), default=0)
        return cls(len(points), len(able) - len(left), sum(point.seeds for point in left), needed)

    def __add__(self, other: Plan) -> Plan:
        replicates, needed = self.replicates + other.replicates, max(self.bytes, other.bytes)
        return Plan(self.points + other.points, self.there + other.there, replicates, needed)


class Batch:
    """Studies that are measured one after the other, each by its own runner, into one store.

    Attributes:
        parts: of each study, its points of the shard by key; a point may stand in several scenarios.
    """

    def __init__(self, work: Work, store: Store, shard: Shard, *, fresh: bool) -> None:
        self.work, self.store, self.shard, self.fresh = work, store, shard, fresh
        with one_thread(work[0][1]):
            self.keys = [keys_of(study, bench) for study, bench in work]
        self.parts = [dict(points_of(study, keys, shard)) for (study, _), keys in zip(work, self.keys, strict=True)]

    def plans(self) -> dict[str, Plan]:
        """What each study would take; a point that several share is counted once."""
        plans, seen = dict[str, Plan](), set[str]()
        for (study, bench), part in zip(self.work, self.parts, strict=True):
            new = [item for item in part.items() if item[0] not in seen]
            plans[study.name] = Plan.of(new, bench, self.store, fresh=self.fresh)
            seen |= set(part)
        return plans

    def run(self, bar: Any, workers: int | None, *, is_alone: bool) -> dict[str, Outcome]:
        """Measure all of them; `bar` shows it, as `numdev.cli.progress.Progress` does; the others as in `processes`.

        Raises:
            KeyboardInterrupt: on Ctrl-C, with the number of points that are in the store.
        """
        outcomes = dict[str, Outcome]()
        with one_thread(self.work[0][1]):
            left = {key: one for part in self.parts for key, one in part.items() if self.fresh or not self.store.holds(key)}
            count = processes(workers, self.work[0][1], [*left.values()], is_alone=is_alone)
            pool = Workers(count, self) if count > 1 else None  # forked before the bar starts a thread
            with pool or nullcontext(), bar:
                try:
                    for place, (study, bench) in enumerate(self.work):
                        how: dict[str, Any] = {"fresh": self.fresh, "shard": self.shard, "keys": self.keys[place]}
                        how |= {"progress": bar.of(study, len(self.parts[place])), "pool": pool and partial(pool.run, place)}
                        how |= {"on_replicate": bar.replicates, "within": bar.within}
                        outcomes[study.name] = run(study, bench, self.store, **how)
                        bar.point(sum(one.measured + one.skipped for one in outcomes.values()))
                except KeyboardInterrupt:
                    # In the store, as workers report several points at a time
                    kept = {key for part in self.parts for key in part if self.store.holds(key)}
                    raise KeyboardInterrupt(f"{len(kept)} points kept") from None
        return outcomes


def _is_pooled(bench: Runner) -> bool:
    """Whether processes beside one another measure the same as one: deviations on a CPU, but not times and not what trains."""
    return bench.kind.name == DEVIATION and bench.device.type == "cpu"


@contextmanager
def one_thread(bench: Runner) -> Iterator[None]:
    """In it torch has one thread if `bench` can be pooled, unless the user has set how many there are (`OMP_NUM_THREADS`)."""
    threads = torch.get_num_threads()
    if _is_pooled(bench) and not os.environ.get(THREADS):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def processes(workers: int | None, bench: Runner, points: Sequence[StudyPoint], *, is_alone: bool) -> int:
    """How many processes measure these points: `workers` if it is set, else one for each usable core if that is worth it.

    There are no more than have memory for the largest point at the same time. `is_alone` says whether no other process measures
    a part of the same study.

    Raises:
        BadInput: for a number of workers that cannot be had.
    """
    if workers is not None and workers < 1:
        raise BadInput("workers", workers, "give a number of processes, at least 1, or null")
    is_able = _is_pooled(bench) and sys.platform == "linux" and torch.get_num_threads() == 1
    if workers is not None and workers > 1 and not is_able:
        hint = f"they measure deviations, on a CPU under Linux, with one thread each; leave out workers, or {THREADS}"
        raise BadInput("workers", workers, hint)
    is_worth_it = is_able and is_alone and sum(point.seeds for point in points) >= _REPLICATES
    count = workers or (usable_cores() if is_worth_it else 1)
    if count == 1:
        return 1
    sizes = [bench.kind.needed_bytes(point.problem, point.variant) or 1 for point in points if not point.refused]
    return max(1, min(count, len(points), available_bytes(bench.device) // max(sizes, default=1)))


Part = tuple[dict[str, StudyPoint], Runner, Store]
_WORK: list[Part] = []
"""In a worker, the points of each study, what measures them and where: forked, so that they need not be sent."""


class _Terminated(SystemExit):
    """Ends a worker, where `sys.exit` in a function of the user ends its point."""


def _begin_worker(threads: int, work: list[Part]) -> None:
    """Ctrl-C reaches the command alone, which ends its workers; they end by themselves when the command is killed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _terminate)
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _WORK[:] = work


def _terminate(number: int, _: object) -> None:
    raise _Terminated(128 + number)  # removes files that are half written


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _measure(study: int, keys: Sequence[str]) -> dict[str, Ended]:
    """Measure points of a study. The pool would take the end of the worker for a result and let it wait for more."""
    points, bench, store = _WORK[study]
    try:
        return {key: measured(points[key], bench, store, key, {}) for key in keys}
    except _Terminated:
        os._exit(1)


class Workers(ProcessPoolExecutor):
    """Processes that measure the points of studies."""

    def __init__(self, count: int, batch: Batch) -> None:
        self.count, self.work = count, batch.work
        # Golden results of a worker go with it.
        benches = [Runner(bench.kind, str(bench.device), CACHE_BYTES // count) for _, bench in batch.work]
        parts = [(points, bench, batch.store) for points, bench in zip(batch.parts, benches, strict=True)]
        fork, threads = multiprocessing.get_context("fork"), torch.get_num_threads()
        super().__init__(count, fork, initializer=_begin_worker, initargs=(threads, parts))
        self.submit(os.getpid).result()

    def run(self, place: int, left: Points, total: int, progress: Progress | None) -> dict[str, Ended]:
        """Measure what is left of the `total` points of the study at a place.

        Points of one problem go to one worker, for golden to be computed once, unless they are more than its share of the work.
        The longest go first, so that no worker is left with them at the end.

        Raises:
            NumdevError: if a worker is killed. An error that a worker raises is raised here.
        """
        kind, there, ended = self.work[place][1].kind, total - len(left), dict[str, Ended]()
        size = {key: point.seeds * max(1, kind.needed_bytes(point.problem, point.variant)) for key, point in left}
        share, parts = sum(size.values()) / (2 * self.count), list[Points]()
        for _, points in groupby(left, lambda item: item[1].problem):
            group = list(points)
            most = max(1, int(share / size[group[0][0]]))
            parts += [group[i : i + most] for i in range(0, len(group), most)]
        parts.sort(key=lambda part: sum(size[key] for key, _ in part), reverse=True)
        report = progress or (lambda *_: None)
        if left:
            report(there, total, left[0][1])
        try:
            futures = {self.submit(_measure, place, [key for key, _ in part]): part for part in parts}
            for future in as_completed(futures):
                ended |= future.result()
                report(there + len(ended), total, futures[future][-1][1])
        except BaseException as error:
            self.shutdown(wait=False, cancel_futures=True)
            for process in multiprocessing.active_children():
                process.terminate()
                process.join(10)  # seconds in which it removes what it was writing
                process.kill()  # where a destructor or a lock has swallowed the signal
            if isinstance(error, BrokenProcessPool):
                hint = "the system ends processes where memory ends; use workers=1, or less memory. What is measured is kept"
                raise NumdevError(f"workers: one of them was killed; {hint}") from None
            raise
        return ended
