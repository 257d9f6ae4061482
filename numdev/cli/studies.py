"""Measures studies: shows progress, a summary, or only what they would take."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from numdev.cli import pooled, show
from numdev.cli.exit_codes import Ended, Interrupted, code_of_study, worst
from numdev.cli.plan import Plan, estimates, notes, table
from numdev.cli.progress import ERRORS, Progress, output
from numdev.measurement.runner import Runner
from numdev.results.store import Store
from numdev.results.study import Outcome, Shard, Study, StudyPoint, keys_of, replaced
from numdev.results.study import run as run_study

Work = Sequence[tuple[Study, Runner]]


def run(work: Work, cfg: DictConfig, *, live: bool | None, shard: Shard | None = None) -> Ended:
    """Measure studies one after the other, each by its own runner, under one bar; every failure is listed at the end.

    On a CPU several processes measure the points of a study, if there are enough (`numdev.cli.pooled`).

    Raises:
        Interrupted: on Ctrl-C, with the number of points that are in the store.
    """
    store, shard, outcomes = Store(Path(cfg.results)), shard or Shard(), dict[str, Outcome]()
    _note_left_out(work)
    with pooled.one_thread(work[0][1]):
        keys, parts, count = _parts(work, store, cfg, shard)
        for (study, bench), own in zip(work, keys, strict=True):
            if lost := replaced(study, bench, Store(store.path), own):  # a torn file is not measured again here
                ERRORS.print(show.replaced(study.name, lost, store))
        workers = pooled.Workers(count, work, store) if count > 1 else None  # forked before the bar starts a thread
        total = sum(map(len, parts))
        with workers or nullcontext(), Progress(total, ERRORS, live=live) as progress:
            try:
                for place, (study, bench) in enumerate(work):
                    how: dict[str, Any] = {"fresh": cfg.fresh, "shard": shard, "keys": keys[place]}
                    how["progress"] = progress.of(study.name, len(parts[place]))
                    if workers is None:
                        how |= {"on_replicate": progress.replicates, "within": progress.within}
                        outcomes[study.name] = run_study(study, bench, store, **how)
                    else:
                        outcomes[study.name] = workers.run(place, **how)
                    progress.point(sum(o.measured + o.skipped for o in outcomes.values()))
            except KeyboardInterrupt:
                raise Interrupted(progress.done) from None
    console = output()
    for name, done in outcomes.items():
        console.print(show.outcome(name, done))
    failed = [(f"{name}: {point}", status, reason) for name, done in outcomes.items() for point, status, reason in done.failures]
    if failed:
        console.print(show.failures(failed))
    if store.torn:
        console.print(f"{len(store.torn)} damaged files in {store.path} were measured again, such as {store.torn[0].name}")
    return Ended(worst(code_of_study(done.statuses) for done in outcomes.values()))


def _note_left_out(work: Work) -> None:
    """Name the scenarios that the command line would make into others, and that are not measured."""
    for study, _ in work:
        if study.left_out:
            count = "a scenario is" if len(study.left_out) == 1 else f"{len(study.left_out)} scenarios are"
            text = f"{count} left out, since the command line states other settings: {'; '.join(study.left_out)}"
            ERRORS.print(f"note: {study.name}: {text}", markup=False)


def _parts(work: Work, store: Store, cfg: DictConfig, shard: Shard) -> tuple[list[list[str]], list[dict[str, StudyPoint]], int]:
    """The keys of each study, its points in a shard by key, and how many processes measure those without a record."""
    keys = [keys_of(study, bench) for study, bench in work]
    parts = []
    for (study, _), own in zip(work, keys, strict=True):  # a point may stand in several scenarios
        parts.append(dict(list(dict(zip(own, study.points, strict=True)).items())[shard.index :: shard.count]))
    alone = shard.count == 1 and HydraConfig.get().runtime.choices.get("hydra/launcher") == "basic"
    left = {key: point for part in parts for key, point in part.items() if cfg.fresh or not store.holds(key)}
    return keys, parts, pooled.number(cfg.workers, work[0][1], list(left.values()), alone=alone)


def plan(work: Work, cfg: DictConfig, program: str, shard: Shard | None = None) -> Ended:
    """Show what measuring studies would take, a row for each; measures and writes nothing."""
    store, plans, seen = Store(Path(cfg.results)), dict[str, Plan](), set[str]()
    _note_left_out(work)
    with pooled.one_thread(work[0][1]):
        _, parts, count = _parts(work, store, cfg, shard or Shard())
        for (study, bench), part in zip(work, parts, strict=True):
            known = estimates(program, cfg, bench)
            one = Plan.of([item for item in part.items() if item[0] not in seen], bench, store, known, fresh=cfg.fresh)
            plans[study.name] = replace(one, seconds=one.seconds / count)
            seen |= set(part)
    console, (first, *others) = output(), plans.values()
    console.print(table(plans))
    console.print(sum(others, first).sentence(), markup=False)
    notes(console, known, count)
    return Ended()
