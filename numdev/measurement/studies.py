"""Several studies: what measuring them would take, and their measurement, in this process or in several.

Processes measure a study on a CPU, each with one thread of torch. One thread measures as fast beside busy neighbours as alone,
and its sums have one order: the bits of a study do not depend on how many processes measure it.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch

from numdev.errors import BadInput, NumdevError
from numdev.measurement.deviation import KIND as DEVIATION
from numdev.measurement.runner import CACHE_BYTES, Runner
from numdev.results.environment import available_bytes, usable_cores
from numdev.results.store import Store
from numdev.results.study import Outcome, PointEnded, Shard, Study, StudyPoint, begin, keys_of, measured, points_of, run, stored

Work = Sequence[tuple[Study, Runner]]
THREADS = "OMP_NUM_THREADS"
_REPLICATES = 100  # from which on processes are worth their start


@dataclass(frozen=True)
class Plan:
    """What measuring some points would take."""

    points: int = 0
    there: int = 0  # of these, those whose figures are stored
    replicates: int = 0  # of the others
    bytes: int = 0  # that the largest of the others needs; 0 where it is not known

    @classmethod
    def of(cls, points: Iterable[tuple[str, StudyPoint]], bench: Runner, store: Store, *, fresh: bool) -> Plan:
        """The plan of points with their keys."""
        plan = cls()
        for key, point in points:
            is_there = not point.refused and not fresh and stored(store, key) is not None
            is_left = not point.refused and not is_there
            needed = bench.kind.needed_bytes(point.problem, point.variant) if is_left else 0
            plan += cls(1, int(is_there), point.seeds if is_left else 0, needed)
        return plan

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
            pool = Workers(count, self.work, self.store) if count > 1 else None  # forked before the bar starts a thread
            with pool or nullcontext(), bar:
                try:
                    for place, (study, bench) in enumerate(self.work):
                        how: dict[str, Any] = {"fresh": self.fresh, "shard": self.shard, "keys": self.keys[place]}
                        how["progress"] = bar.of(study, len(self.parts[place]))
                        if pool is None:
                            how |= {"on_replicate": bar.replicates, "within": bar.within}
                        outcomes[study.name] = pool.run(place, **how) if pool else run(study, bench, self.store, **how)
                        bar.point(sum(one.measured + one.skipped for one in outcomes.values()))
                except KeyboardInterrupt:
                    # In the store, as workers report several points at a time
                    kept = {key for part in self.parts for key in part if self.store.holds(key)}
                    raise KeyboardInterrupt(f"{len(kept)} points kept") from None
        return outcomes


def _is_pooled(bench: Runner) -> bool:
    """Whether processes beside one another measure the same as one: deviations on a CPU, but not times and not what trains."""
    return bench.kind_name == DEVIATION and bench.device.type == "cpu"


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


_WORK: list[tuple[Study, Runner, Store]] = []
"""In a worker, the studies, what measures them and where: forked, so that they need not be sent."""


class _Terminated(SystemExit):
    """Ends a worker, where `sys.exit` in a function of the user ends its point."""


def _begin_worker(threads: int, work: list[tuple[Study, Runner, Store]]) -> None:
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


def _measure(study: int, points: Sequence[tuple[str, int]]) -> list[tuple[str, PointEnded]]:
    """Measure points of a study, named by key and place."""
    own, bench, store = _WORK[study]
    return [(key, measured(own.points[place], bench, store, key, {})) for key, place in points]


class Workers(ProcessPoolExecutor):
    """Processes that measure the points of studies."""

    def __init__(self, count: int, work: Work, store: Store) -> None:
        self.count, self.work, self.store = count, work, store
        # Golden results of a worker go with it.
        own = [(study, Runner(bench.kind, str(bench.device), CACHE_BYTES // count), store) for study, bench in work]
        fork, threads = multiprocessing.get_context("fork"), torch.get_num_threads()
        super().__init__(count, fork, initializer=_begin_worker, initargs=(threads, own))
        self.submit(os.getpid).result()

    def run(self, place: int, *, fresh: bool, shard: Shard, keys: Sequence[str], progress: Any) -> Outcome:
        """As `numdev.results.study.run` for the study at a place, with the same records and the same outcome.

        Points of one problem go to one worker, for golden to be computed once, unless they are more than its share of the work.
        The longest go first, so that no worker is left with them at the end.

        Raises:
            NumdevError: if a worker is killed. An error that a worker raises is raised here.
        """
        (study, bench), start = self.work[place], time.perf_counter()
        work, at = begin(study, bench, self.store, shard, keys), {key: i for i, key in enumerate(keys)}
        ended = {} if fresh else {key: how for key, _ in work if (how := stored(self.store, key))}
        left = [item for item in work if item[0] not in ended]
        size = {key: point.seeds * max(1, bench.kind.needed_bytes(point.problem, point.variant)) for key, point in left}
        share, parts = sum(size.values()) / (2 * self.count), []
        for _, points in groupby(left, lambda item: item[1].problem):
            group = list(points)
            most = max(1, int(share / size[group[0][0]]))
            parts += [group[i : i + most] for i in range(0, len(group), most)]
        parts.sort(key=lambda part: sum(size[key] for key, _ in part), reverse=True)
        if left:
            progress(len(ended), len(work), left[0][1])
        try:
            futures = {self.submit(_measure, place, [(key, at[key]) for key, _ in part]): part for part in parts}
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
        outcome = Outcome()
        for key, point in work:
            outcome.add(point, ended[key])
        outcome.seconds = time.perf_counter() - start  # what passed, of which each point's own time is a part
        return outcome
