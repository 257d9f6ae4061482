"""The commands `measure`, `speed`, `train`, `paper`, `map` and `report`, each from a composed configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from numdev.cli import schema
from numdev.cli.compose import OPERATION, Library, config_folder, overrides_of, plain, study_fields
from numdev.cli.exit_codes import BAD_OUTPUT, Ended
from numdev.cli.progress import has_own_terminal, output
from numdev.errors import BadInput, one_of

FORMATS = ("parquet", "csv", "pdf", "html")
_MOST_NAMED = 4  # studies after which the folder of their report is named
_OF_A_STUDY = dict.fromkeys(("shard", "shards", "workers"), "it is of a study; give study= too")
_OF_A_POINT = {
    "objective": "it is a figure of one point; leave it out",
    "metrics": "a study prints no metrics, its report has them; leave it out",
}


def measure(cfg: DictConfig) -> Ended:
    """One point, or the points of one study."""
    if plot_parts(cfg):
        _refuse_unwritable(cfg, "results", "out")
    else:
        _refuse(cfg, {"out": "it is the folder of the figure that plot= asks for; give plot= too, or leave it out"})
        _refuse_unwritable(cfg, "results")
    return _study(cfg, "measure") if cfg.study is not None else _point(cfg, "measure")


def speed(cfg: DictConfig) -> Ended:
    """One point timed, or the points of one study and their report."""
    if cfg.study is None:
        return _point_without_report(cfg, "speed")
    _refuse_folders(cfg, None)
    ended = _study(cfg, "speed")
    if not cfg.dry_run:
        from numdev.report.document.report import make_report

        with _report_of(cfg, None) as (results, folder, console):
            make_report(results, folder, console=console, kind="speed")
    return ended


def train(cfg: DictConfig) -> Ended:
    """One rung trained beside its reference, or the rungs of one study and their report."""
    runs = Path(cfg.results) / "runs"
    _refuse(cfg, {"objective": "numdev train has no figure for a sweeper; leave it out"})
    _refuse(cfg, {"fresh": f"runs are shared by points and kept; remove {runs} to train them again"})
    if cfg.study is None:
        return _point_without_report(cfg, "train")
    _refuse_folders(cfg, None)
    ended = _study(cfg, "train")
    if not cfg.dry_run:
        _make_report(cfg, None, "parquet")
    return ended


def paper(cfg: DictConfig) -> Ended:
    """Every study of the paper, then its report."""
    from numdev.cli import expand, runners, studies

    whole = "numdev paper runs whole studies, studies=[a,b]; for one there is numdev measure study="
    _refuse(cfg, {**dict.fromkeys(("study", "shard", "shards"), whole), **_OF_A_POINT})
    _refuse_format(cfg)
    if not cfg.studies:
        raise BadInput("studies", [], "give at least one, as in studies=[fig3,fig4]; numdev studies lists them")
    expander, work = expand.expander(HydraConfig.get(), cfg), []
    for name in cfg.studies:
        own = expander.of(name)
        work.append((own.study(name, expander.library.study(name)), runners.runner("paper", cfg, own.composer.of)))
    _refuse_folders(cfg, cfg.studies)
    if cfg.dry_run:
        return studies.plan(work, cfg, "paper")
    ended = studies.run(work, cfg, live=None)
    _make_report(cfg, list(cfg.studies), cfg.format)
    return ended


def error_map(cfg: DictConfig) -> Ended:
    """The error of every element of one head."""
    from numdev.cli.map import draw

    return draw(cfg, overrides())


def report(cfg: DictConfig) -> Ended:
    """Tables, figures and documents from what was measured."""
    _refuse_format(cfg)
    if not Path(cfg.results).is_dir():
        raise BadInput("results", cfg.results, "there is no such folder; numdev measure and numdev paper make one")
    chosen = [cfg.studies] if isinstance(cfg.studies, str) else cfg.studies and list(cfg.studies)
    if cfg.out is None:
        names = chosen or [Path(cfg.results).resolve().name]
        more = [f"and_{len(names) - _MOST_NAMED}_more"] if len(names) > _MOST_NAMED else []
        cfg.out = f"reports/{'_'.join([*names[:_MOST_NAMED], *more])}"
    about = chosen
    if chosen == ["paper"]:
        from numdev.results.store import Store

        about = [str(name) for name in Library((config_folder(),)).load("paper")["studies"]]
        held = Store(Path(cfg.results)).studies()
        if absent := [name for name in about if name not in held]:
            output().print(f"note: {cfg.results} holds no {', '.join(absent)}", markup=False, highlight=False)
        chosen = [name for name in about if name in held] or about  # where none was measured, for the error to name
    head = {name: cfg[name] for name in ("title", "author") if cfg[name]}
    if cfg.format not in ("pdf", "html"):
        _refuse(cfg, dict.fromkeys(head, "it stands in a document; give format=pdf or format=html too"))
    return Ended(0 if _make_report(cfg, chosen, cfg.format, plot_parts(cfg), about, **head) else BAD_OUTPUT)


def _point(cfg: DictConfig, program: str) -> Ended:
    from numdev.cli import point

    _refuse(cfg, _OF_A_STUDY)
    return point.run(cfg, program)


def _point_without_report(cfg: DictConfig, program: str) -> Ended:
    _refuse(cfg, {"out": "a study ends with a report, one point with its figures; leave it out, or give study= too"})
    _refuse_unwritable(cfg, "results")
    return _point(cfg, program)


def _study(cfg: DictConfig, program: str) -> Ended:
    from numdev.cli import expand, figures, runners, studies
    from numdev.results.study import Shard

    _refuse(cfg, _OF_A_POINT)
    hydra = HydraConfig.get()
    name = hydra.runtime.choices.get("study")
    if name is None:  # Hydra has merged several into one
        raise BadInput("study", "[...]", "give one, or sweep over several: -m study=fig3,fig4")
    fields, expander = study_fields(name, plain(cfg.study)), expand.expander(hydra, cfg, program)
    own = expander.of(name)
    bench = runners.runner(program, cfg, own.composer.of)
    if program == "train" and own.library.operation_of(name) is None and OPERATION not in expander.manner:
        raise BadInput("study", name, f"it trains nothing; numdev measure study={name}, or numdev speed for one of speed")
    work = [(own.study(name, fields), bench)]
    axes = own.axes(fields)
    figures.refuse(cfg, list(axes), bench.kind, needs_x=not axes)
    shard = Shard(cfg.shard, cfg.shards)
    if cfg.dry_run:
        return studies.plan(work, cfg, program, shard)
    return replace(studies.run(work, cfg, live=has_own_terminal(), shard=shard), drawing=Drawing.of(cfg, name))


def overrides() -> list[str]:
    """The overrides of this job, as they were written."""
    return overrides_of(HydraConfig.get())


def plot_parts(cfg: DictConfig) -> dict[str, Any]:
    """The parts of the figure that a command asks for; none where it asks for no figure."""
    node = cfg.get("plot")
    parts = {} if node is None else plain(node, resolve=True)
    return {key: value for key, value in parts.items() if value is not None}


@dataclass(frozen=True)
class Drawing:
    """A figure that a job of a command asks for.

    Attributes:
        results: folder of the records.
        out: folder of the figure.
        study: the study or sweep that it shows, after which it is named.
        plot: its parts.
    """

    results: Path
    out: Path
    study: str
    plot: Mapping[str, Any]

    @classmethod
    def of(cls, cfg: DictConfig, study: str) -> Drawing | None:
        """The figure of a study or sweep that a job has measured, if one is asked for."""
        plot = plot_parts(cfg)
        return cls(Path(cfg.results), Path(cfg.out), study, plot) if plot and not cfg.dry_run else None


def refuse_unknown(cfg: DictConfig, choices: Iterable[str]) -> None:
    """Raise BadInput for a setting that neither a schema nor an operation has, which `+name=value` adds."""
    kind: Any = OmegaConf.get_type(cfg)
    known, text = [*kind.__dataclass_fields__, *choices, *schema.nodes()], OmegaConf.to_yaml(cfg)
    for name, value in plain(cfg).items():
        if name not in known and f"${{{name}" not in text:  # a node of a user's operation, which another refers to
            raise BadInput(name, value, f"there is no such setting; {one_of(name, known, most=12)}")


def _refuse(cfg: DictConfig, hints: dict[str, str]) -> None:
    """Raise BadInput for the first of these settings that the command line gives, where the command has no use for it."""
    names = [text.lstrip("+").partition("=")[0] for text in overrides()]
    for name, hint in hints.items():
        value = HydraConfig.get().runtime.choices.get(name, cfg[name])
        if name in names and value is not None:
            raise BadInput(name, value, hint)


def _refuse_format(cfg: DictConfig) -> None:
    if cfg.format not in FORMATS:
        raise BadInput("format", cfg.format, one_of(cfg.format, FORMATS))


def _refuse_folders(cfg: DictConfig, studies: Iterable[str] | None) -> None:
    """Find out before anything is measured that records, or the report on them, cannot be written; see `refuse_other`."""
    from numdev.report.document.folder import refuse_other

    _refuse_unwritable(cfg, "results")
    refuse_other(Path(cfg.out), Path(cfg.results), None if studies is None else list(studies))


def _refuse_unwritable(cfg: DictConfig, *settings: str) -> None:
    from numdev.results.files import refuse_unwritable  # late: neither help nor completion needs it

    for name in settings:
        refuse_unwritable(name, Path(cfg[name]))


@contextmanager
def _report_of(cfg: DictConfig, studies: list[str] | None) -> Iterator[tuple[Path, Path, Console]]:
    """Results, a folder to write the report on some of their studies into, and where to print; at the end it is in `out`."""
    from numdev.report.document.folder import listed, replacing

    console, results, out = output(), Path(cfg.results), Path(cfg.out)
    last = listed(out)
    with replacing(out, results, studies) as folder:
        yield results, folder, console
    if gone := [name for name in last if not (out / name).exists()]:
        console.print(f"removed of the last report: {', '.join(gone[:8])}{' and more' * (len(gone) > 8)}", markup=False)
    console.print(f"report: {out}", markup=False, highlight=False)


def _make_report(
    cfg: DictConfig,
    studies: list[str] | None,
    fmt: str,
    plot: dict[str, Any] | None = None,
    about: list[str] | None = None,
    **head: str,
) -> bool:
    """The report on some studies, and whether all outputs are sound; `about` are those asked for, where not all are measured."""
    from numdev.report.document.report import make_report

    with _report_of(cfg, about or studies) as (results, folder, console):
        return make_report(results, folder, studies, console, formats=(fmt,), plot=plot, **head)
