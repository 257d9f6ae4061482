"""Measures studies, in this process or in several, or says only what they would take.

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
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import torch
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig
from rich.filesize import decimal

from numdev.cli import show
from numdev.cli.exit_codes import Ended, code_of_study, worst
from numdev.cli.progress import ERRORS, Progress, is_live, output
from numdev.errors import BadInput, NumdevError
from numdev.measurement.deviation import KIND as DEVIATION
from numdev.measurement.runner import CACHE_BYTES, Runner
from numdev.results.environment import available_bytes, usable_cores
from numdev.results.store import Store
from numdev.results.study import Outcome, PointEnded, Shard, Study, StudyPoint, begin, keys_of, measured, stored
from numdev.results.study import run as run_study

Work = Sequence[tuple[Study, Runner]]
THREADS = "OMP_NUM_THREADS"
_REPLICATES = 100  # from which on processes are worth their start


class Plan(NamedTuple):
    """What measuring some points would take."""

    points: int
    there: int  # of these, those whose figures are stored
    replicates: int  # of the others
    bytes: int  # that the largest of the others needs; 0 where it is not known

    @classmethod
    def of(cls, points: Sequence[tuple[str, StudyPoint]], bench: Runner, store: Store, *, fresh: bool) -> Plan:
        """The plan of points with their keys."""
        left = [point for key, point in points if not point.refused and (fresh or stored(store, key) is None)]
        needed = max((bench.kind.needed_bytes(point.problem, point.variant) for point in left), default=0)
        there = len(points) - len(left) - sum(bool(point.refused) for _, point in points)
        return cls(len(points), there, sum(point.seeds for point in left), needed)

    @classmethod
    def total(cls, plans: Iterable[Plan]) -> Plan:
        points, there, replicates, bytes = zip(*plans, strict=True)
        return cls(sum(points), sum(there), sum(replicates), max(bytes))

    def row(self) -> dict[str, str]:
        """As text by column, for the table of a sweep or of several studies."""
        memory = (decimal(self.bytes) if self.bytes else "unknown") if self.replicates else ""
        status = "to measure" if self.replicates else "measured already"
        return {"points": str(self.points), "replicates": str(self.replicates), "memory": memory, "status": status}

    def __str__(self) -> str:
        left = f"{self.replicates} replicates to measure, memory of the largest point {self.row()['memory']}"
        text = f"{self.points} point{'s' * (self.points != 1)}, {self.there} measured already"
        return f"{text}; {left if self.replicates else 'nothing is left to measure'}.\nNothing was measured or written."


def dry_run(work: Work, cfg: DictConfig) -> Ended:
    """What measuring studies would take: points that several share are counted once."""
    store, plans, seen = Store(Path(cfg.results)), dict[str, Plan](), set[str]()
    with _one_thread(work[0][1]):
        for (study, bench), part in zip(work, _parts(work, store, cfg)[1], strict=True):
            plans[study.name] = Plan.of([item for item in part.items() if item[0] not in seen], bench, store, fresh=cfg.fresh)
            seen |= set(part)
    if work[1:]:
        show.sweep("dry_run", [([f"study={name}"], plan.row()) for name, plan in plans.items()])
    total = Plan.total(plans.values())
    return Ended(plan=total, row=total.row() if HydraConfig.get().mode is RunMode.MULTIRUN else {})


def run(work: Work, cfg: DictConfig) -> Ended:
    """Measure studies one after the other, each by its own runner, under one bar; every failure is listed at the end.

    Raises:
        KeyboardInterrupt: on Ctrl-C, with the number of points that are in the store.
    """
    store, shard, outcomes = Store(Path(cfg.results)), Shard(cfg.shard, cfg.shards), dict[str, Outcome]()
    with _one_thread(work[0][1]):
        keys, parts, count = _parts(work, store, cfg)
        pool = Workers(count, work, store) if count > 1 else None  # forked before the bar starts a thread
        with pool or nullcontext(), Progress(sum(map(len, parts)), ERRORS, live=is_live()) as bar:
            try:
                for place, (study, bench) in enumerate(work):
                    how: dict[str, Any] = {"fresh": cfg.fresh, "shard": shard, "keys": keys[place]}
                    how["progress"] = bar.of(study.name, len(parts[place]))
                    if pool is None:
                        how |= {"on_replicate": bar.replicates, "within": bar.within}
                    outcomes[study.name] = run_study(study, bench, store, **how) if pool is None else pool.run(place, **how)
                    bar.point(sum(o.measured + o.skipped for o in outcomes.values()))
            except KeyboardInterrupt:
                # In the store, as workers report several points at a time
                kept = {key for part in parts for key in part if store.holds(key)}
                raise KeyboardInterrupt(f"{len(kept)} points kept") from None
    console = output()
    for name, done in outcomes.items():
        console.print(show.outcome(name, done))
    failed = [(f"{name}: {point}", status, reason) for name, done in outcomes.items() for point, status, reason in done.failures]
    if failed:
        console.print(show.failures(failed))
    if store.torn:
        console.print(f"{len(store.torn)} damaged files in {store.path} were measured again, such as {store.torn[0].name}")
    return Ended(worst(code_of_study(done.statuses) for done in outcomes.values()))


def _parts(work: Work, store: Store, cfg: DictConfig) -> tuple[list[list[str]], list[dict[str, StudyPoint]], int]:
    """The keys of each study, its points in a shard by key, and how many processes measure those without a record.

    Names the scenarios that the command line would make into others, and that are not measured.
    """
    shard, keys, parts = Shard(cfg.shard, cfg.shards), [keys_of(study, bench) for study, bench in work], []
    for (study, _), own in zip(work, keys, strict=True):  # a point may stand in several scenarios
        parts.append(dict(list(dict(zip(own, study.points, strict=True)).items())[shard.index :: shard.count]))
        if study.left_out:
            count = "a scenario is" if len(study.left_out) == 1 else f"{len(study.left_out)} scenarios are"
            text = f"{count} left out, since the command line states other settings: {'; '.join(study.left_out)}"
            ERRORS.print(f"note: {study.name}: {text}", markup=False)
    is_alone = shard.count == 1 and HydraConfig.get().runtime.choices.get("hydra/launcher") == "basic"
    left = {key: point for part in parts for key, point in part.items() if cfg.fresh or not store.holds(key)}
    return keys, parts, processes(cfg.workers, work[0][1], list(left.values()), is_alone=is_alone)


def _is_pooled(bench: Runner) -> bool:
    """Whether processes beside one another measure the same as one: deviations on a CPU, but not times and not what trains."""
    return bench.kind_name == DEVIATION and bench.device.type == "cpu"


@contextmanager
def _one_thread(bench: Runner) -> Iterator[None]:
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
