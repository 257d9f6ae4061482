"""The commands `measure`, `speed`, `train`, `paper`, `map` and `report`, each from a composed configuration.

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
from textwrap import shorten
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli import build, expand, schema, show
from numdev.cli.compose import OPERATION, Request, at, overrides_of, plain, study_fields
from numdev.cli.exit_codes import FAILED, UNSUPPORTED, Ended, code_of_point, code_of_results, code_of_study, worst
from numdev.cli.expand import Expander
from numdev.cli.launch import Job, parsed
from numdev.cli.progress import ERRORS, Progress, is_live, output
from numdev.errors import BadInput, Unsupported, one_of
from numdev.measurement.deviation import Place, Subject, check_memory, head_of
from numdev.measurement.runner import Runner, failure
from numdev.measurement.studies import Batch, Plan, Shard
from numdev.results.record import DONE, Record, Reference, Status, Where, write_atomically
from numdev.results.store import Scenario, Store, refuse_unwritable
from numdev.results.study import Study, StudyPoint
from numdev.settings import choice
from numdev.sources import config_folder

LOG = logging.getLogger("numdev")
FORMATS = ("parquet", "csv", "pdf", "html")
_MOST_NAMED = 4  # studies after which the folder of their report is named; of more it has the name of the results
_TITLE = 60  # characters beside the words at the right of the histogram of a map
_IN_TITLE = ("out", "device", "output", "head", "seed")  # of what stands in its title anyway
_OF_THE_RUN = ("results", "device", "fresh")  # not of what is measured: a report says where, and reads anywhere
_OF_KIND = {
    "certificate": "certify",
    "invariance": "invariance",
    "mismatch": "mismatch",
}  # of a study that states it: what makes its runner
_OF_A_STUDY = dict.fromkeys(("shard", "shards", "workers"), "it is of a study; give study= too")
_OF_A_POINT = {
    "objective": "it is a figure of one point; leave it out",
    "metrics": "a study prints no metrics, its report has them; leave it out",
}
_OF_A_REPORT = {"out": "a study ends with a report, one point with its figures; leave it out, or give study= too"}


def measure(cfg: DictConfig, job: Job) -> Ended:
    """One point, or the points of one study; `numdev speed` and `numdev train` add a report on the study."""
    if cfg.study is None:
        _refuse(cfg, _OF_A_STUDY | (_OF_A_REPORT if "out" in cfg else {}))
        refuse_unwritable("results", Path(cfg.results))
        return _point(cfg, job)
    name = HydraConfig.get().runtime.choices.get("study")
    if name is None:  # Hydra has merged several into one
        raise BadInput("study", "[...]", "give one, or sweep over several: -m study=fig3,fig4")
    return _studies(cfg, job, [name], None)


def train(cfg: DictConfig, job: Job) -> Ended:
    """One rung trained beside its reference, or the rungs of one study and their report."""
    hint = f"runs are shared by points and kept; remove {cfg.results}/runs to train them again"
    _refuse(cfg, {"objective": "numdev train has no figure for a sweeper; leave it out", "fresh": hint})
    return measure(cfg, job)


def paper(cfg: DictConfig, job: Job) -> Ended:
    """Every study of the paper, then its report."""
    whole = "numdev paper runs whole studies, studies=[a,b]; for one there is numdev measure study="
    _refuse(cfg, dict.fromkeys(("study", "shard", "shards"), whole))
    _refuse_format(cfg)
    if not cfg.studies:
        raise BadInput("studies", [], "give at least one, as in studies=[fig3,fig4]; numdev studies lists them")
    return _studies(cfg, job, list(cfg.studies), list(cfg.studies))


def _point(cfg: DictConfig, job: Job) -> Ended:
    """Measure one point and show its figures; in a sweep return them for its row."""
    hydra, metrics = HydraConfig.get(), choice("metrics", show.Metrics, cfg.metrics)
    in_sweep, store = hydra.mode is RunMode.MULTIRUN, Store(Path(cfg.results))
    bench, expander = build.runner(job.command, cfg), expand.expander(hydra, cfg)
    if cfg.objective is not None and cfg.objective not in (figures := bench.kind.figures):
        raise BadInput("objective", cfg.objective, one_of(cfg.objective, figures, most=12))
    request = expander.request()
    point, names = build.point(request), show.PointNames.of(request)
    key = bench.key(*point.parts)
    if cfg.dry_run:
        _refuse(cfg, {"objective": "a dry run has no figures; leave it out"})
        if bench.kind.needed_bytes(point.problem, point.variant):
            check_memory(point.problem, bench.device, bench.kind.operation.smaller)
        if not in_sweep:
            output().print(names.line, style="bold", markup=False)
        return Ended(plan=Plan.of([(key, point)], bench, store, fresh=cfg.fresh))
    record = None if cfg.fresh else store.get(key)
    already = record is not None and record.status in DONE
    LOG.debug("%s: key %s, %s in %s", names.line, key, "measured already" if already else "not measured yet", store.path)
    if record is None or not already:
        text = f"job {hydra.job.num + 1}" if in_sweep else ""
        with Progress(1, ERRORS, live=is_live(), text=text) as bar:
            where: Where = {"folder": store.work(key), "shared": store.shared}
            where |= {"on_replicate": bar.replicates, "within": bar.within}
            record = bench.measure(*point.parts, **where)
        store.put(record)
    _keep(job, cfg, expander, request, (point, bench, record))
    LOG.debug("%s after %.3f s, %s", record.status.value, record.seconds, record.kernel or "tensor operations")
    figure = bench.kind.figure(cfg.objective, record) if cfg.objective else None
    ended = Ended(code_of_point(record.status), figure=figure, key=record.key)
    if in_sweep and metrics is show.Metrics.CHIEF:
        return replace(ended, row=show.row(record, already=already))
    show.point(output(), record, store.path, names, already=already, metrics=metrics)
    return ended


def _studies(cfg: DictConfig, job: Job, names: list[str], reported: list[str] | None) -> Ended:
    """Measure studies, and report on those that are `reported`, or on all of the results, where the command makes a report.

    What cannot be written is refused before anything is measured.
    """
    from numdev.report.document.folder import refuse_other  # late, as all of the report: pandas and matplotlib

    _refuse(cfg, _OF_A_POINT)
    refuse_unwritable("results", Path(cfg.results))
    if "out" in cfg:
        refuse_other(Path(cfg.out), Path(cfg.results), reported)
    hydra = HydraConfig.get()
    expander = expand.expander(hydra, cfg, "measure" if job.command == "paper" else job.command)
    work = []
    for name in names:
        own = expander.of(name)
        fields = own.composer.study(name) if cfg.study is None else study_fields(name, plain(cfg.study))
        pilot = expand.pilot_of(fields)
        if fields["kind"] == "speed" and job.command != "speed":
            raise BadInput("study", name, f"it times kernels; numdev speed study={name} measures it")
        bench = build.runner(_OF_KIND.get(fields["kind"], job.command), cfg, own.composer.of)
        work.append((own.study(name, fields), bench))
    batch = Batch(work, Store(Path(cfg.results)), Shard(cfg.shard, cfg.shards), fresh=cfg.fresh)
    for study, _ in work:
        if study.left_out:
            count = "a scenario is" if len(study.left_out) == 1 else f"{len(study.left_out)} scenarios are"
            text = f"{count} left out, since the command line states other settings: {'; '.join(study.left_out)}"
            ERRORS.print(f"note: {study.name}: {text}", markup=False)
    if cfg.dry_run:
        plans = batch.plans()
        if work[1:]:
            show.sweep("dry_run", [([f"study={name}"], show.plan_row(plan)) for name, plan in plans.items()])
        for study, _ in work if job.command == "train" else ():
            show.power(study, batch.store, pilot)
        return Ended(plan=sum(plans.values(), Plan()))
    is_alone = cfg.shards == 1 and hydra.runtime.choices.get("hydra/launcher") == "basic"
    bar = Progress(sum(map(len, batch.parts)), ERRORS, live=is_live())
    outcomes = batch.run(bar, cfg.workers, is_alone=is_alone)
    show.outcomes(outcomes, batch.store)
    if "out" in cfg:
        _make_report(cfg, reported, kind="speed" if job.command == "speed" else "")
    return Ended(worst(code_of_study(done.statuses) for done in outcomes.values()))


def error_map(cfg: DictConfig, job: Job) -> Ended:
    """The error of every element of one head, as figures and numbers."""
    from numdev.report.document.export import to_csv
    from numdev.report.figures.elements import element_errors, error_summary, write_errors

    hydra, out = HydraConfig.get(), Path(cfg.out)
    overrides, choices = {one.key_or_group: str(one.input_line) for one in overrides_of(hydra)}, hydra.runtime.choices
    subject, against = choice("subject", Subject, cfg.subject), choice("reference", Reference, cfg.reference)
    place = Place(cfg.output or "", cfg.head, cfg.seed, subject, against)
    refuse_unwritable("out", out)
    _refuse(cfg, {"study": "numdev map draws one point; state its settings, as numdev measure takes them"})
    if not place.needs_baseline and any(name.partition(".")[0] == "baseline" for name in overrides):
        hint = "it is not drawn; give subject=baseline or reference=baseline too, or leave it out"
        raise BadInput("baseline", choices["baseline"], hint)
    request = expand.expander(hydra, cfg).request()
    request = replace(request, raw=request.raw | {"seeds": place.seed + 1})  # as many replicates as it takes
    point, bench = build.point(request), build.runner(job.command, cfg)
    try:
        head = head_of(bench.kind.operation, point.problem, point.variant, place, bench.device, point.baseline)
    except Unsupported as error:
        return Ended(UNSUPPORTED, str(error))
    except SystemExit as error:  # of the user's function
        return Ended(FAILED, failure(error, bench.kind.operation.smaller)[1])
    if hydra.mode is not RunMode.RUN:  # each job of a sweep has a folder
        out /= hydra.job.override_dirname.replace("/", "_") or "defaults"
    table = out / "elements.csv"
    elements, reference = element_errors(head.x, head.reference, head.fmt), place.reference.value.replace("_", " ")
    where = f"{f'head {place.head} of {head.heads}, ' if head.heads > 1 else ''}replicate {place.seed}"
    settings = " ".join(text for name, text in overrides.items() if name not in _IN_TITLE) or "defaults"
    title = f"{head.output}, {where}\n{shorten(settings, _TITLE, placeholder=' ...')}"
    again = "; the last map there is replaced" if table.exists() else ""
    names = ", ".join(path.name for path in (*write_errors(elements, title, out, reference=reference), table))
    write_atomically(table, to_csv(elements))
    own = " ".join([build.kind_of(request), *(f"precision={one}" for one in [request.options.get("precision")] if one)])
    if subject is Subject.BASELINE:
        own = f"baseline={request.options.get('baseline', 'custom')}"
    first = f"{head.output} of {own}: {where}, {' x '.join(map(str, head.x.shape))} elements"
    for line in (first, *error_summary(elements, reference), f"map: {out}: {names}{again}"):
        output().print(line, markup=False, highlight=False, soft_wrap=True)
    return Ended()


def report(cfg: DictConfig, _: Job) -> Ended:
    """Tables, figures and documents from what was measured."""
    added = [str(name) for name in cfg if name not in schema.ReportConfig.__annotations__]  # by + or ++, which take any name
    _refuse(cfg, dict.fromkeys(added, "there is no such setting; numdev report --help lists them"))
    _refuse_format(cfg)
    if not Path(cfg.results).is_dir():
        raise BadInput("results", cfg.results, "there is no such folder; numdev measure and numdev paper make one")
    chosen = [cfg.studies] if isinstance(cfg.studies, str) else cfg.studies and list(cfg.studies)
    if chosen == ["paper"]:  # the studies of `numdev paper`, of which those that were measured
        listed, held = list(OmegaConf.load(config_folder() / "paper.yaml").studies), Store(Path(cfg.results)).studies()
        chosen, cfg.out = [name for name in listed if name in held] or listed, cfg.out or "reports/paper"
    if cfg.out is None:
        names = chosen if chosen and len(chosen) <= _MOST_NAMED else [Path(cfg.results).resolve().name]
        cfg.out = f"reports/{'_'.join(names)}"
    head = {name: cfg[name] for name in ("title", "author") if cfg[name]}
    if cfg.format not in ("pdf", "html"):
        _refuse(cfg, dict.fromkeys(head, "it stands in a document; give format=pdf or format=html too"))
    plot = {name: value for name, value in plain(cfg.plot, resolve=True).items() if value is not None}
    return Ended(code_of_results(map(Status, _make_report(cfg, chosen, plot=plot, **head))))


def _keep(job: Job, cfg: DictConfig, expander: Expander, request: Request, measured: tuple[StudyPoint, Runner, Record]) -> None:
    """Write beside a record which sweep it is of, or that it is a single point, and what was stated of it."""
    (point, bench, record), swept, settings = measured, _swept(job), {**expander.manner, **expander.task}
    store = Store(Path(cfg.results))
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
    overrides = OverridesParser.create().parse_overrides(parsed(job.arguments)[0].overrides)
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
    beside = [f"{schema.words(name)[0] or name} = {schema.written(value)}" for name, value in fixed.items() if name != OPERATION]
    title = "; ".join(filter(None, [f"Sweep over {over}", ", ".join(beside)]))
    return f"sweep_{short}_{hashlib.sha256(identity.encode()).hexdigest()[:6]}", title


def _plain(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values as JSON has them; a list is text, as on the command line."""
    scalar = (str, int, float, bool, type(None))
    return {name: value if isinstance(value, scalar) else schema.written(value) for name, value in values.items()}


def _refuse(cfg: DictConfig, hints: Mapping[str, str]) -> None:
    """Raise BadInput for the first of these settings that the command line gives, where the command has no use for it."""
    hydra = HydraConfig.get()
    names = [override.key_or_group for override in overrides_of(hydra)]
    for name, hint in hints.items():
        value = hydra.runtime.choices.get(name, cfg.get(name))
        if name in names and value is not None:
            raise BadInput(name, value, hint)


def _refuse_format(cfg: DictConfig) -> None:
    if cfg.format not in FORMATS:
        raise BadInput("format", cfg.format, one_of(cfg.format, FORMATS))


def _make_report(cfg: DictConfig, studies: list[str] | None, **how: Any) -> list[str]:
    """Report on some studies; returns how their points ended."""
    from numdev.report.document.folder import listed, replacing
    from numdev.report.document.report import make_report

    console, results, out = output(), Path(cfg.results), Path(cfg.out)
    last = listed(out)
    with replacing(out, results, studies) as folder:
        statuses = make_report(results, folder, studies, console, formats=(cfg.get("format", "parquet"),), **how)
    if gone := [name for name in last if not (out / name).exists()]:
        console.print(f"removed of the last report: {', '.join(gone[:8])}{' and more' * (len(gone) > 8)}", markup=False)
    console.print(f"report: {out}", markup=False, highlight=False)
    return statuses
