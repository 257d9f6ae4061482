"""The commands `measure`, `speed`, `train`, `paper`, `map` and `report`, each from a composed configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import fill, shorten
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli.compose import composer, config_folder, overrides_of, plain, study_fields
from numdev.cli.exit_codes import FAILED, UNSUPPORTED, Ended, code_of_results, code_of_study, worst
from numdev.cli.progress import ERRORS, Progress, is_live, output
from numdev.errors import BadInput, Unsupported, one_of
from numdev.settings import choice

if TYPE_CHECKING:
    from numdev.cli.launch import Job

FORMATS = ("parquet", "csv", "pdf", "html")
_MOST_NAMED = 4  # studies after which the folder of their report is named; of more it has the name of the results
_TITLE = 60  # characters beside the words at the right of the histogram of a map
_IN_TITLE = ("out", "device", "output", "head", "seed")  # of what stands in its title anyway
_OF_A_STUDY = dict.fromkeys(("shard", "shards", "workers"), "it is of a study; give study= too")
_OF_A_POINT = {
    "objective": "it is a figure of one point; leave it out",
    "metrics": "a study prints no metrics, its report has them; leave it out",
}
_OF_A_REPORT = {"out": "a study ends with a report, one point with its figures; leave it out, or give study= too"}


def measure(cfg: DictConfig, job: Job) -> Ended:
    """One point, or the points of one study; `numdev speed` and `numdev train` add a report on the study."""
    from numdev.cli import point
    from numdev.results.store import refuse_unwritable  # late: help does not need it

    if cfg.study is None:
        _refuse(cfg, _OF_A_STUDY | (_OF_A_REPORT if "out" in cfg else {}))
        refuse_unwritable("results", Path(cfg.results))
        return point.run(cfg, job)
    name = HydraConfig.get().runtime.choices.get("study")
    if name is None:  # Hydra has merged several into one
        raise BadInput("study", "[...]", "give one, or sweep over several: -m study=fig3,fig4")
    return _studies(cfg, job, [name], None)


speed = measure


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


def _studies(cfg: DictConfig, job: Job, names: list[str], reported: list[str] | None) -> Ended:
    """Measure studies, and report on those that are `reported`, or on all of the results, where the command makes a report.

    What cannot be written is refused before anything is measured.
    """
    from numdev.cli import build, expand, show
    from numdev.measurement.studies import Batch, Plan, Shard
    from numdev.report.document.folder import refuse_other
    from numdev.results.store import Store, refuse_unwritable

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
        if fields["kind"] == "speed" and job.command != "speed":
            raise BadInput("study", name, f"it times kernels; numdev speed study={name} measures it")
        bench = build.runner("certify" if fields["kind"] == "certificate" else job.command, cfg, own.composer.of)
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
        return show.planned(sum(plans.values(), Plan()), in_sweep=hydra.mode is RunMode.MULTIRUN)
    is_alone = cfg.shards == 1 and hydra.runtime.choices.get("hydra/launcher") == "basic"
    bar = Progress(sum(map(len, batch.parts)), ERRORS, live=is_live())
    outcomes = batch.run(bar, cfg.workers, is_alone=is_alone)
    show.outcomes(outcomes, batch.store)
    if "out" in cfg:
        _make_report(cfg, reported, kind="speed" if job.command == "speed" else "")
    return Ended(worst(code_of_study(done.statuses) for done in outcomes.values()))


def error_map(cfg: DictConfig, job: Job) -> Ended:
    """The error of every element of one head, as figures and numbers.

    Raises:
        BadInput: naming the setting that cannot be used.
    """
    from numdev.cli import build, expand
    from numdev.measurement.deviation import Place, Subject, head_of
    from numdev.measurement.runner import failure
    from numdev.report.document.export import to_csv  # late: pandas and matplotlib
    from numdev.report.figures.elements import element_errors, error_summary, write_errors
    from numdev.results.record import Reference, write_atomically
    from numdev.results.store import refuse_unwritable

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
    operation = bench.kind.operation
    try:
        head = head_of(operation, point.problem, point.variant, place, bench.device, point.baseline)
    except Unsupported as error:
        return Ended(UNSUPPORTED, str(error))
    except SystemExit as error:  # of the user's function
        return Ended(FAILED, failure(error, operation.smaller)[1])
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
    from numdev.results.record import Status

    _refuse_format(cfg)
    if not Path(cfg.results).is_dir():
        raise BadInput("results", cfg.results, "there is no such folder; numdev measure and numdev paper make one")
    chosen = [cfg.studies] if isinstance(cfg.studies, str) else cfg.studies and list(cfg.studies)
    if chosen == ["paper"]:  # the studies of `numdev paper`, of which those that were measured
        from numdev.results.store import Store

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


def list_studies() -> int:
    """Print the name and the title of every study."""
    own = composer((config_folder(),))
    width = max(map(len, own.options("study"))) + 2
    for name in own.options("study"):
        print(fill(own.load(f"study/{name}")["title"], 80, initial_indent=f"{name:<{width}}", subsequent_indent=" " * width))
    return 0


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
