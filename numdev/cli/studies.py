"""Runs studies from a composed configuration: reads what the command line states, shows progress and a summary."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from numdev.cli import pooled, show
from numdev.cli.compose import OPERATION, Library, flat, groups_of_points, overrides_of, plain
from numdev.cli.exit_codes import Ended, Interrupted, code_of_study, worst
from numdev.cli.expand import Expander
from numdev.cli.plan import Plan, estimates, notes, table
from numdev.cli.progress import ERRORS, Progress, output
from numdev.measurement.runner import Runner
from numdev.results.store import Store
from numdev.results.study import Outcome, Shard, Study, StudyPoint, keys_of, replaced
from numdev.results.study import run as run_study

_MANNER = (OPERATION, "timing", "counters")  # of what, and how, a point is measured
_BY_WHOM = ("shard", "shards", "workers")
_OF_RUN = ("study", "studies", "device", "results", "fresh", *_BY_WHOM, "out", "objective", "metrics", "dry_run", "plot")
_OF_MAP = ("output", "head", "seed", "subject", "reference", "format")  # of the picture of one head


def expander(hydra: Any, cfg: DictConfig, program: str = "measure") -> Expander:
    """An expander over the config folders of this run, with what its command line states of a point.

    `hydra` is Hydra's own part of the configuration; `program` see `Expander`.
    """
    folders = tuple(Path(source.path) for source in hydra.runtime.config_sources if source.schema == "file")
    choices, name = hydra.runtime.choices, hydra.job.config_name
    of_point = [str(key) for key in cfg if key not in (*_MANNER, *_OF_RUN, *_OF_MAP)]
    groups, overrides = (OPERATION, *groups_of_points(choices)), overrides_of(hydra)
    task, manner = (explicit(overrides, choices, cfg, names, groups) for names in (of_point, _MANNER))
    return Expander(Library(folders), task, program, _own_folder(hydra.runtime), manner, name, choices.get(OPERATION))


def _own_folder(runtime: Any) -> str | None:
    """The folder that `--config-dir` names, without the way to the working directory where it lies in there."""
    for source in runtime.config_sources:
        if source.provider == "command-line":
            path, here = Path(source.path), Path(runtime.cwd)
            return str(path.relative_to(here) if path.is_relative_to(here) else path)
    return None


def explicit(overrides: list[str], choices: Any, cfg: DictConfig, names: Sequence[str], groups: Iterable[str]) -> dict[str, Any]:
    """The options and values of some settings that overrides give explicitly, as Hydra composed them."""
    settings = plain(cfg)
    statements: dict[str, Any] = {}
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if key in names and key in groups and override.package is None and isinstance(choices.get(key), str):
            statements[key] = choices[key]
        elif key.partition(".")[0] in names:
            value: Any = settings
            for part in key.split("."):
                value = value[part]
            statements |= dict(flat({key: value}))
    return statements


def run(work: Sequence[tuple[Study, Runner]], cfg: DictConfig, *, live: bool | None, shard: Shard | None = None) -> Ended:
    """Measure studies one after the other, each by its own runner, under one bar; every failure is listed at the end.

    On a CPU several processes measure the points of a study, if there are enough (`numdev.cli.pooled`).

    Raises:
        Interrupted: on Ctrl-C, with the number of points that are in the store.
    """
    store, shard = Store(Path(cfg.results)), shard or Shard()
    _note_left_out(work)
    with pooled.one_thread(work[0][1]):
        pooled.refuse_unusable(cfg.workers, work[0][1])
        keys = [keys_of(study, bench) for study, bench in work]
        for (study, bench), own in zip(work, keys, strict=True):
            if lost := replaced(study, bench, Store(store.path), own):  # a torn file is not measured again here
                ERRORS.print(show.replaced(study.name, lost, store))
        count = _workers(work, keys, store, cfg, shard)
        with pooled.Workers(count, work, store) if count > 1 else nullcontext() as workers:
            outcomes = _measured(work, keys, store, cfg, shard, workers, live)
    return _summarise(outcomes, store)


def _note_left_out(work: Sequence[tuple[Study, Runner]]) -> None:
    """Name the scenarios that the command line would make into others, and that are not measured."""
    for study, _ in work:
        if study.left_out:
            one, titles = len(study.left_out) == 1, "; ".join(study.left_out)
            count = "a scenario is" if one else f"{len(study.left_out)} scenarios are"
            why = f"left out, since the command line states other settings than {'it does' if one else 'they do'}"
            ERRORS.print(f"note: {study.name}: {count} {why}: {titles}", markup=False)


def _part(study: Study, keys: Sequence[str], shard: Shard) -> dict[str, StudyPoint]:
    """The points of a shard by key; a point may stand in several scenarios."""
    return dict(list(dict(zip(keys, study.points, strict=True)).items())[shard.index :: shard.count])


def _workers(work: Sequence[tuple[Study, Runner]], keys: Sequence[list[str]], store: Store, cfg: DictConfig, shard: Shard) -> int:
    """How many processes measure the points without a file of a record, or all where they are measured afresh."""
    alone = shard.count == 1 and HydraConfig.get().runtime.choices.get("hydra/launcher") == "basic"
    parts = [_part(study, own, shard) for (study, _), own in zip(work, keys, strict=True)]
    left = {key: point for part in parts for key, point in part.items() if cfg.fresh or not store.holds(key)}
    return pooled.number(cfg.workers, work[0][1], list(left.values()), alone=alone)


def _measured(
    work: Sequence[tuple[Study, Runner]],
    keys: Sequence[list[str]],
    store: Store,
    cfg: DictConfig,
    shard: Shard,
    workers: pooled.Workers | None,
    live: bool | None,
) -> dict[str, Outcome]:
    """The outcome of each study, measured by workers, or by this process where there are none."""
    expected = [len(_part(study, own, shard)) for (study, _), own in zip(work, keys, strict=True)]
    outcomes: dict[str, Outcome] = {}
    with Progress(sum(expected), ERRORS, live=live) as progress:
        try:
            for place, ((study, bench), own, count) in enumerate(zip(work, keys, expected, strict=True)):
                how: dict[str, Any] = {
                    "fresh": cfg.fresh,
                    "shard": shard,
                    "keys": own,
                    "progress": progress.of(study.name, count),
                }
                if workers is None:
                    listeners: dict[str, Any] = {"told": progress.replicates, "within": progress.within}
                    outcomes[study.name] = run_study(study, bench, store, **how, **listeners)
                else:
                    outcomes[study.name] = workers.run(place, **how)
                progress.point(sum(o.measured + o.skipped for o in outcomes.values()))
        except KeyboardInterrupt:
            raise Interrupted(progress.done) from None
    return outcomes


def plan(work: Sequence[tuple[Study, Runner]], cfg: DictConfig, program: str, shard: Shard | None = None) -> Ended:
    """Show what measuring studies would take, a row for each; measures and writes nothing."""
    store, shard = Store(Path(cfg.results)), shard or Shard()
    _note_left_out(work)
    plans, known, seen = dict[str, Plan](), None, set[str]()
    with pooled.one_thread(work[0][1]):
        pooled.refuse_unusable(cfg.workers, work[0][1])
        keys = [keys_of(study, bench) for study, bench in work]
        count = _workers(work, keys, store, cfg, shard)
        for (study, bench), each in zip(work, keys, strict=True):
            known, own = estimates(program, cfg, bench), _part(study, each, shard)
            one = Plan.of([item for item in own.items() if item[0] not in seen], bench, store, known, fresh=cfg.fresh)
            plans[study.name] = replace(one, seconds=one.seconds / count)
            seen |= set(own)
    console = output()
    total = sum(list(plans.values())[1:], next(iter(plans.values())))
    console.print(table(plans))
    console.print(total.sentence(), markup=False)
    assert known is not None
    notes(console, known, count)
    return Ended()


def _summarise(outcomes: dict[str, Outcome], store: Store) -> Ended:
    console = output()
    for name, done in outcomes.items():
        console.print(show.outcome(name, done))
    failed = [(f"{name}: {point}", status, reason) for name, done in outcomes.items() for point, status, reason in done.failures]
    if failed:
        console.print(show.failures(failed))
    if store.torn:
        console.print(f"{len(store.torn)} damaged files in {store.path} were measured again, such as {store.torn[0].name}")
    return Ended(worst(code_of_study(done.statuses) for done in outcomes.values()))
