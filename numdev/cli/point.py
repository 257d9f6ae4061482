"""One point from its configuration: measured and shown, as a line of a sweep, or only planned.

Beside its record a point keeps the overrides of its command, in the manifest of its sweep or of single points: reports know the
axes of a sweep by it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli import build, expand, launch, schema, show
from numdev.cli.compose import OPERATION, Request, at, written
from numdev.cli.exit_codes import Ended, code_of_point
from numdev.cli.expand import Expander
from numdev.cli.launch import Job
from numdev.cli.progress import ERRORS, Progress, is_live, output
from numdev.cli.show import Metrics, PointNames
from numdev.errors import BadInput, one_of
from numdev.measurement.deviation import check_memory
from numdev.measurement.runner import Runner
from numdev.measurement.studies import DONE, Plan
from numdev.results.record import Record, Where
from numdev.results.store import Scenario, Store
from numdev.results.study import Study, StudyPoint
from numdev.settings import choice

LOG = logging.getLogger("numdev")
_OF_THE_RUN = ("results", "device", "fresh")  # not of what is measured: a report says where, and reads anywhere


def run(cfg: DictConfig, job: Job) -> Ended:
    """Measure one point and show its figures; in a sweep return them for its row."""
    hydra, metrics = HydraConfig.get(), choice("metrics", Metrics, cfg.metrics)
    bench, expander = build.runner(job.command, cfg), expand.expander(hydra, cfg)
    if cfg.objective is not None and cfg.objective not in (figures := bench.kind.figures):
        raise BadInput("objective", cfg.objective, one_of(cfg.objective, figures, most=12))
    in_sweep = hydra.mode is RunMode.MULTIRUN
    store = Store(Path(cfg.results))
    request = expander.request()
    point, names = build.point(request), PointNames.of(request)
    key = bench.key(*point.parts)
    if cfg.dry_run:
        if cfg.objective is not None:
            raise BadInput("objective", cfg.objective, "a dry run has no figures; leave it out")
        if bench.kind.needed_bytes(point.problem, point.variant):
            check_memory(point.problem, bench.device, bench.kind.operation.smaller)
        if not in_sweep:
            output().print(names.line, style="bold", markup=False)
        return show.planned(Plan.of([(key, point)], bench, store, fresh=cfg.fresh), in_sweep=in_sweep)
    record = None if cfg.fresh else store.get(key)
    already = record is not None and record.status in DONE
    state = "measured already" if already else "not measured yet"
    LOG.debug("%s: key %s, %s in %s", names.line, key, state, store.path)
    if record is None or not already:
        text = f"job {hydra.job.num + 1}" if in_sweep else ""
        with Progress(1, ERRORS, live=is_live(), text=text) as bar:
            where: Where = {"folder": store.work(key), "shared": store.shared}
            where |= {"on_replicate": bar.replicates, "within": bar.within}
            record = bench.measure(*point.parts, **where)
        store.put(record)
    _keep(store, job, cfg, expander, request, (point, bench, record))
    LOG.debug("%s after %.3f s, %s", record.status.value, record.seconds, record.kernel or "tensor operations")
    figure = bench.kind.figure(cfg.objective, record) if cfg.objective else None
    ended = Ended(code_of_point(record.status), figure=figure, key=record.key)
    if in_sweep and metrics is Metrics.CHIEF:
        return replace(ended, row=show.row(record, already=already))
    show.point(output(), record, store.path, names, already=already, metrics=metrics)
    return ended


Measured = tuple[StudyPoint, Runner, Record]


def _keep(store: Store, job: Job, cfg: DictConfig, expander: Expander, request: Request, measured: Measured) -> None:
    """Write beside a record which sweep it is of, or that it is a single point, and what was stated of it."""
    (point, bench, record), swept, settings = measured, _swept(job), {**expander.manner, **expander.task}
    labels = {name: settings.get(name, OmegaConf.select(cfg, name)) for name in swept} or settings
    fixed = {name: value for name, value in settings.items() if swept and name not in swept and name != "seeds"}
    name, title = _named(job.command, record, swept, fixed)
    words = {each: schema.words(each) for each in dict.fromkeys([*labels, *fixed])} if swept else schema.all_words()
    own = {name: at(request.config, name) for name in request.raw if name.partition(".")[0] not in schema.of_runs()}
    values = {name: value for name, value in own.items() if not name.endswith("_target_") and not isinstance(value, Mapping)}
    apart = set(_OF_THE_RUN).difference(swept)
    command = [text for text in job.arguments if text.partition("=")[0].lstrip("+") not in apart]
    stored = replace(point, labels=_plain(labels)).stored(
        record.key,
        number=HydraConfig.get().job.num if swept else store.count(name),
        command=shlex.join(["numdev", job.command, *command]),
        explicit=[*labels, *fixed],
        composed=_plain({**values, **request.options, **fixed}),  # what a figure can be drawn over
    )
    study = Study(name, title, words=words, swept=swept, scenarios=(Scenario("default", ""),))
    store.put_point(study.manifest((), record.kind, bench.kind.operation.settings()), stored)


def _swept(job: Job) -> tuple[str, ...]:
    """The names of what the command sweeps over; none where it is a single point."""
    hydra: Any = HydraConfig.get()
    if hydra.mode is not RunMode.MULTIRUN:
        return ()
    overrides = OverridesParser.create().parse_overrides(launch.parsed(job.arguments)[0].overrides)
    of_file = OmegaConf.select(hydra, "sweeper.params") or ()
    return tuple(dict.fromkeys([*(one.key_or_group for one in overrides if one.is_sweep_override()), *map(str, of_file)]))


def _named(program: str, record: Record, swept: Sequence[str], fixed: Mapping[str, Any]) -> tuple[str, str]:
    """The name of a sweep, equal for all its jobs and runs, with a hash of what its points share; and its title in words."""
    of = record.operation if record.kind == "deviation" else f"{record.operation}_{record.kind}"
    if not swept:
        return f"points_{of}", f"Single points of {record.operation.replace('_', ' ')}"
    identity = json.dumps([program, of, sorted(swept), sorted(fixed.items())], default=str)
    short = "_".join(dict.fromkeys(name.rpartition(".")[2].rpartition("/")[2] for name in swept))
    axes = [schema.words(name)[0] or name for name in swept]
    over = " and ".join([", ".join(axes[:-1]), axes[-1]] if axes[1:] else axes)
    beside = [f"{schema.words(name)[0] or name} = {written(value)}" for name, value in fixed.items() if name != OPERATION]
    title = "; ".join(filter(None, [f"Sweep over {over}", ", ".join(beside)]))
    return f"sweep_{short}_{hashlib.sha256(identity.encode()).hexdigest()[:6]}", title


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them; a list is text, as on the command line."""
    scalar = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, scalar) else written(value) for name, value in values.items()}
