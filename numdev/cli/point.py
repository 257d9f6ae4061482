"""One point from its configuration: measured and shown, as a line of a sweep, or only planned."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from numdev.cli import build, figures, plan, progress, runners, show, studies, sweep_manifest
from numdev.cli.compose import OPERATION, Request, flat, groups_of_points, plain
from numdev.cli.exit_codes import Ended, code_of_point
from numdev.cli.expand import Expander
from numdev.cli.progress import ERRORS, has_own_terminal, output
from numdev.cli.show import Metrics, PointNames
from numdev.errors import BadInput
from numdev.measurement.runner import Runner
from numdev.results.record import Record, Where
from numdev.results.store import Store
from numdev.results.study import DONE, StudyPoint
from numdev.settings import choice

LOG = logging.getLogger("numdev")


def run(cfg: DictConfig, program: str) -> Ended:
    """Measure one point and show its figures; in a sweep return them for its line."""
    for name, whole in (("shard", 0), ("shards", 1), ("workers", None)):
        if cfg[name] != whole:
            raise BadInput(name, cfg[name], f"it is {'of' if name == 'workers' else 'a part of'} a study; give study= too")
    metrics = choice("metrics", Metrics, cfg.metrics)
    bench = runners.runner(program, cfg)
    runners.refuse_objective(cfg.objective, bench.kind)
    expander = studies.expander(HydraConfig.get(), cfg)
    if not _is_in_sweep():
        figures.refuse_of_point(cfg, bench.kind, {**expander.manner, **expander.task})
    request = request_of(cfg, expander)
    point, names = build.point(request), PointNames.of(request)
    store = Store(Path(cfg.results))
    key = bench.key(point.problem, point.variant, point.baseline, point.seeds)
    if cfg.dry_run:
        return _planned(cfg, program, bench, store, (key, point), names)
    record = None if cfg.fresh else store.get(key)
    already = record is not None and record.status in DONE
    LOG.debug("%s: key %s, %s %s", names.line, key, "measured already in" if already else "not measured yet in", store.path)
    if record is None or not already:
        plan.announce(point, bench, ERRORS)
        record = _measured(point, bench, store, key)
        store.put(record)
    sweep = sweep_manifest.keep(store, program, cfg, expander, request, (bench, record))
    LOG.debug("%s after %.3f s, %s", record.status.value, record.seconds, record.kernel or "tensor operations")
    figure, drawing = runners.objective(cfg.objective, record), figures.Drawing.of(cfg, sweep)
    ended = Ended(code_of_point(record.status), figure=figure, key=record.key, drawing=drawing)
    if _is_in_sweep() and metrics is Metrics.CHIEF:
        remark = record.reason or ("measured already" if already else f"{record.seconds:.2f} s")
        return ended.with_line(show.cells(record), record.status, remark)
    with progress.aside():
        show.point(output(), record, store.path, names, already=already, metrics=metrics)
    return ended


def request_of(cfg: DictConfig, expander: Expander, **values: Any) -> Request:
    """The request of a configuration, with some settings in place of its own."""
    raw = dict(flat({name: node for name, node in plain(cfg).items() if name != OPERATION})) | values
    return Request(raw, expander.composer.said(raw, expander.task), groups_of_points(HydraConfig.get().runtime.choices))


def _measured(point: StudyPoint, bench: Runner, store: Store, key: str) -> Record:
    with progress.of_point(point.seeds, ERRORS, live=has_own_terminal()) as bar:
        where: Where = {"folder": store.work(key), "shared": store.shared}
        where |= {"told": bar.replicates, "within": bar.within}
        return bench.measure(point.problem, point.variant, point.baseline, point.seeds, **where)


def _planned(
    cfg: DictConfig, program: str, bench: Runner, store: Store, point: tuple[str, StudyPoint], names: PointNames
) -> Ended:
    if cfg.objective is not None:
        raise BadInput("objective", cfg.objective, "a dry run has no figures; leave it out")
    estimates = plan.estimates(program, cfg, bench)
    own = plan.Plan.of([point], bench, store, estimates, fresh=cfg.fresh)
    if own.larger:
        plan.announce(point[1], bench, ERRORS)  # raises
    if _is_in_sweep():
        return Ended(plan=own).with_line(own.cells(), None, "measured already" if own.there else "to measure")
    console = output()
    console.print(names.line, style="bold", markup=False)
    console.print(own.sentence(), markup=False)
    plan.notes(console, estimates)
    return Ended()


def _is_in_sweep() -> bool:
    return HydraConfig.get().mode is RunMode.MULTIRUN
