"""One point from its configuration: measured and shown, as a line of a sweep, or only planned."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli import build, drawing, objective, placed, plan, progress, studies
from numdev.cli.asked import Asked, asked
from numdev.cli.codes import code_of_point
from numdev.cli.composed import of_points
from numdev.cli.console import ERRORS, has_own_terminal, output
from numdev.cli.expand import Expander
from numdev.cli.outcome import Ended
from numdev.cli.requests import Request, flat, request
from numdev.cli.runners import runner
from numdev.cli.show import Metrics
from numdev.errors import BadInput
from numdev.measurement.runner import Runner
from numdev.nearest import choice
from numdev.results.record import Record, Where
from numdev.results.store import Store
from numdev.results.study import DONE, StudyPoint

LOG = logging.getLogger("numdev")


def run(cfg: DictConfig, show: Any, program: str) -> Ended:
    """Measure one point and show its figures; in a sweep return them for its line. `show` has `record` and `cells`."""
    for name, whole in (("shard", 0), ("shards", 1), ("workers", None)):
        if cfg[name] != whole:
            raise BadInput(name, cfg[name], f"it is {'of' if name == 'workers' else 'a part of'} a study; give study= too")
    metrics = choice("metrics", Metrics, cfg.metrics)
    bench = runner(program, cfg)
    objective.refuse_unusable(cfg.objective, bench.kind)
    expander = studies.expander(HydraConfig.get(), cfg)
    if not _is_in_sweep():
        drawing.refuse_of_point(cfg, bench.kind, {**expander.manner, **expander.task})
    wanted = _request(cfg, expander)
    point, words = build.point(wanted), asked(wanted)
    store = Store(Path(cfg.results))
    key = bench.key(point.problem, point.variant, point.baseline, point.seeds)
    if cfg.dry_run:
        return _planned(cfg, program, bench, store, (key, point), words)
    found = None if cfg.fresh else store.get(key)
    already = found is not None and found.status in DONE
    LOG.debug("%s: key %s, %s %s", words.line, key, "measured already in" if already else "not measured yet in", store.path)
    if found is None or not already:
        plan.announce(point, bench, ERRORS)
        found = _measured(point, bench, store, key)
        store.put(found)
    sweep = placed.keep(store, program, cfg, expander, wanted, (bench, found))
    LOG.debug("%s after %.3f s, %s", found.status.value, found.seconds, found.kernel or "tensor operations")
    ended = Ended(
        code_of_point(found.status), figure=objective.value(cfg.objective, found), key=found.key, drawing=drawing.of(cfg, sweep)
    )
    if _is_in_sweep() and metrics is Metrics.CHIEF:
        return ended.with_line(show.cells(found), found.status, _said(found, already))
    with progress.aside():
        show.record(output(), found, store.path, words, already=already, metrics=metrics)
    return ended


def _request(cfg: DictConfig, expander: Expander) -> Request:
    """What a configuration asks for."""
    plain = OmegaConf.to_container(cfg, resolve=False)
    assert isinstance(plain, dict)
    raw = dict(flat({str(name): value for name, value in plain.items()}))
    return request(raw, expander.said(raw, expander.task), of_points(HydraConfig.get().runtime.choices))


def _measured(point: StudyPoint, bench: Runner, store: Store, key: str) -> Record:
    with progress.of_point(point.seeds, ERRORS, live=has_own_terminal()) as bar:
        where: Where = {"folder": store.work(key), "shared": store.shared}
        where |= {"told": bar.replicates, "within": bar.within}
        return bench.measure(point.problem, point.variant, point.baseline, point.seeds, **where)


def _planned(cfg: DictConfig, program: str, bench: Runner, store: Store, point: tuple[str, StudyPoint], words: Asked) -> Ended:
    if cfg.objective is not None:
        raise BadInput("objective", cfg.objective, "a dry run has no figures; leave it out")
    known = plan.estimates(program, cfg, bench)
    found = plan.Plan.of([point], bench, store, known, fresh=cfg.fresh)
    if found.larger:
        plan.announce(point[1], bench, ERRORS)  # raises
    if _is_in_sweep():
        return Ended(plan=found).with_line(found.cells(), None, "measured already" if found.there else "to measure")
    console = output()
    console.print(words.line, style="bold", markup=False)
    console.print(found.sentence(), markup=False)
    plan.notes(console, known)
    return Ended()


def _said(found: Record, already: bool) -> str:
    """What follows the status in the line of a sweep."""
    return found.reason or ("measured already" if already else f"{found.seconds:.2f} s")


def _is_in_sweep() -> bool:
    return HydraConfig.get().mode is RunMode.MULTIRUN
