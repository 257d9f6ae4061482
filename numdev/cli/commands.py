"""The commands `measure`, `speed`, `train`, `paper`, `map` and `report`, each from a composed configuration."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from numdev.cli import schema
from numdev.cli.compose import OPERATION, composer, config_folder, overrides_of, plain, study_fields
from numdev.cli.exit_codes import BAD_OUTPUT, Ended
from numdev.cli.progress import output
from numdev.errors import BadInput, one_of

if TYPE_CHECKING:
    from numdev.cli.launch import Job

FORMATS = ("parquet", "csv", "pdf", "html")
_MOST_NAMED = 4  # studies after which the folder of their report is named; of more it has the name of the results
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
    from numdev.cli import build, expand, studies
    from numdev.report.document.folder import refuse_other
    from numdev.results.store import refuse_unwritable

    _refuse(cfg, _OF_A_POINT)
    refuse_unwritable("results", Path(cfg.results))
    if "out" in cfg:
        refuse_other(Path(cfg.out), Path(cfg.results), reported)
    expander = expand.expander(HydraConfig.get(), cfg, "measure" if job.command == "paper" else job.command)
    work = []
    for name in names:
        own = expander.of(name)
        fields = own.composer.study(name) if cfg.study is None else study_fields(name, plain(cfg.study))
        bench = build.runner("certify" if fields["kind"] == "certificate" else job.command, cfg, own.composer.of)
        if job.command == "train" and own.composer.operation_of(name) is None and OPERATION not in expander.manner:
            raise BadInput("study", name, f"it trains nothing; numdev measure study={name}, or numdev speed for one of speed")
        work.append((own.study(name, fields), bench))
    if cfg.dry_run:
        return studies.dry_run(work, cfg)
    ended = studies.run(work, cfg)
    if "out" in cfg:
        _make_report(cfg, reported, kind="speed" if job.command == "speed" else "")
    return ended


def error_map(cfg: DictConfig, job: Job) -> Ended:
    """The error of every element of one head."""
    from numdev.cli import map as error

    return error.draw(cfg, job)


def report(cfg: DictConfig, _: Job) -> Ended:
    """Tables, figures and documents from what was measured."""
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
    return Ended(0 if _make_report(cfg, chosen, plot=plot, **head) else BAD_OUTPUT)


def list_studies() -> int:
    """Print the name and the title of every study."""
    own = composer((config_folder(),))
    width = max(map(len, own.options("study"))) + 2
    for name in own.options("study"):
        print(fill(own.study(name)["title"], 80, initial_indent=f"{name:<{width}}", subsequent_indent=" " * width))
    return 0


def refuse_unknown(cfg: DictConfig, choices: Iterable[str]) -> None:
    """Raise BadInput for a setting that neither a schema nor an operation has, which `+name=value` adds."""
    kind: Any = OmegaConf.get_type(cfg)
    known, text = [*kind.__dataclass_fields__, *choices, *schema.nodes()], OmegaConf.to_yaml(cfg)
    for name, value in plain(cfg).items():
        if name not in known and f"${{{name}" not in text:  # a node of a user's operation, which another refers to
            raise BadInput(name, value, f"there is no such setting; {one_of(name, known, most=12)}")


def _refuse(cfg: DictConfig, hints: Mapping[str, str]) -> None:
    """Raise BadInput for the first of these settings that the command line gives, where the command has no use for it."""
    hydra = HydraConfig.get()
    names = [text.lstrip("+").partition("=")[0] for text in overrides_of(hydra)]
    for name, hint in hints.items():
        value = hydra.runtime.choices.get(name, cfg[name])
        if name in names and value is not None:
            raise BadInput(name, value, hint)


def _refuse_format(cfg: DictConfig) -> None:
    if cfg.format not in FORMATS:
        raise BadInput("format", cfg.format, one_of(cfg.format, FORMATS))


def _make_report(cfg: DictConfig, studies: list[str] | None, **how: Any) -> bool:
    """Whether all outputs in the report on some studies are sound."""
    from numdev.report.document.folder import listed, replacing
    from numdev.report.document.report import make_report

    console, results, out = output(), Path(cfg.results), Path(cfg.out)
    last = listed(out)
    with replacing(out, results, studies) as folder:
        is_sound = make_report(results, folder, studies, console, formats=(cfg.get("format", "parquet"),), **how)
    if gone := [name for name in last if not (out / name).exists()]:
        console.print(f"removed of the last report: {', '.join(gone[:8])}{' and more' * (len(gone) > 8)}", markup=False)
    console.print(f"report: {out}", markup=False, highlight=False)
    return is_sound
