"""The commands `measure`, `speed`, `train`, `paper`, `map` and `report`, each from a composed configuration."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf
from rich.console import Console

from numdev.cli.compose import OPERATION, Library, config_folder, overrides_of, plain, study_fields
from numdev.cli.exit_codes import BAD_OUTPUT, Ended
from numdev.cli.plotted import asked
from numdev.cli.progress import has_own_terminal, output
from numdev.errors import BadInput, one_of

FORMATS = ("parquet", "csv", "pdf", "html")
_MOST_NAMED = 4  # studies after which the folder of their report is named


def measure(cfg: DictConfig) -> Ended:
    """One point, or the points of one study."""
    if not asked(cfg):
        _refuse_out(cfg, "it is the folder of the figure that plot= asks for; give plot= too, or leave it out")
    _refuse_unwritable(cfg, "results", *(["out"] if asked(cfg) else []))
    return _study(cfg, "measure") if cfg.study is not None else _point(cfg, "measure")


def speed(cfg: DictConfig) -> Ended:
    """One point timed, or the points of one study and their report."""
    if cfg.study is None:
        return _point_without_report(cfg, "speed")
    _refuse_folders(cfg, None)
    ended = _study(cfg, "speed")
    if not cfg.dry_run:
        from numdev.report.document.report import make_speed_report

        with _report_of(cfg, None) as (results, folder, console):
            make_speed_report(results, folder, console)
    return ended


def train(cfg: DictConfig) -> Ended:
    """One rung trained beside its reference, or the rungs of one study and their report."""
    if cfg.objective is not None:
        raise BadInput("objective", cfg.objective, "numdev train has no figure for a sweeper; leave it out")
    if cfg.fresh:
        runs = Path(cfg.results) / "runs"
        raise BadInput("fresh", True, f"runs are shared by points and kept; remove {runs} to train them again")
    if cfg.study is None:
        return _point_without_report(cfg, "train")
    _refuse_folders(cfg, None)
    ended = _study(cfg, "train")
    if not cfg.dry_run:
        _make_report(cfg, None, "parquet")
    return ended


def paper(cfg: DictConfig) -> Ended:
    """Every study of the paper, then its report."""
    from numdev.cli import runners, studies

    _refuse_metrics(cfg)
    for name, whole in (("study", None), ("shard", 0), ("shards", 1), ("objective", None)):
        if cfg[name] != whole:
            value = HydraConfig.get().runtime.choices["study"] if name == "study" else cfg[name]
            raise BadInput(name, value, "numdev paper runs whole studies, studies=[a,b]; for one there is numdev measure study=")
    _refuse_format(cfg)
    if not cfg.studies:
        raise BadInput("studies", [], "give at least one, as in studies=[fig3,fig4]; numdev studies lists them")
    expander, work = studies.expander(HydraConfig.get(), cfg), []
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
        about = [str(name) for name in Library((config_folder(),)).load("paper")["studies"]]
        chosen = _measured_of(about, Path(cfg.results))
    head = {name: cfg[name] for name in ("title", "author") if cfg[name]}
    if head and cfg.format not in ("pdf", "html"):
        name = next(iter(head))
        raise BadInput(name, head[name], "it stands in a document; give format=pdf or format=html too")
    return Ended(0 if _make_report(cfg, chosen, cfg.format, asked(cfg), about, **head) else BAD_OUTPUT)


def _measured_of(names: list[str], results: Path) -> list[str]:
    """Those of some studies that were measured; all of them where none was, for the error to name."""
    from numdev.results.store import Store

    held = Store(results).studies()
    if absent := [name for name in names if name not in held]:
        output().print(f"note: {results} holds no {', '.join(absent)}", markup=False, highlight=False)
    return [name for name in names if name in held] or names


def _point(cfg: DictConfig, program: str) -> Ended:
    from numdev.cli import point

    return point.run(cfg, program)


def _point_without_report(cfg: DictConfig, program: str) -> Ended:
    _refuse_out(cfg, "a study ends with a report, one point with its figures; leave it out, or give study= too")
    _refuse_unwritable(cfg, "results")
    return _point(cfg, program)


def _study(cfg: DictConfig, program: str) -> Ended:
    from numdev.cli import figures, runners, studies
    from numdev.results.study import Shard

    _refuse_metrics(cfg)
    if cfg.objective is not None:
        raise BadInput("objective", cfg.objective, "it is a figure of one point; leave it out, or study=")
    hydra = HydraConfig.get()
    name = hydra.runtime.choices.get("study")
    if name is None:  # Hydra has merged several into one
        raise BadInput("study", "[...]", "give one, or sweep over several: -m study=fig3,fig4")
    fields, expander = study_fields(name, plain(cfg.study)), studies.expander(hydra, cfg, program)
    own = expander.of(name)
    bench = runners.runner(program, cfg, own.composer.of)
    if program == "train" and own.library.operation_of(name) is None and OPERATION not in expander.manner:
        raise BadInput("study", name, f"it trains nothing; numdev measure study={name}, or numdev speed for one of speed")
    work = [(own.study(name, fields), bench)]
    axes = own.axes(fields)
    figures.refuse(asked(cfg), list(axes), bench.kind, needs_x=not axes)
    shard = Shard(cfg.shard, cfg.shards)
    if cfg.dry_run:
        return studies.plan(work, cfg, program, shard)
    return replace(studies.run(work, cfg, live=has_own_terminal(), shard=shard), drawing=figures.Drawing.of(cfg, name))


def overrides() -> list[str]:
    """The overrides of this job, as they were written."""
    return overrides_of(HydraConfig.get())


def refuse_unknown(cfg: DictConfig, prefix: str = "", groups: Iterable[str] = ()) -> None:
    """Raise BadInput for a setting that no schema has, which `+name=value` can add.

    Beside the settings of the schema stand the groups of the operation, the nodes that it declares, and what its files refer to.
    """
    known = OmegaConf.get_type(cfg)
    names = [*([field.name for field in fields(known)] if is_dataclass(known) else map(str, cfg)), *groups]
    for name, value in cfg.items_ex(resolve=False):
        key = f"{prefix}{name!s}"
        declared = isinstance(value, DictConfig) and is_dataclass(OmegaConf.get_type(value))
        if not (name in names or declared) and (prefix or f"${{{key}" not in OmegaConf.to_yaml(cfg)):
            raise BadInput(key, value, f"there is no such setting; {one_of(name, names, most=12)}")
        if isinstance(value, DictConfig) and not value._is_none():
            refuse_unknown(value, f"{key}.")


def _refuse_out(cfg: DictConfig, hint: str) -> None:
    """Raise BadInput for a folder that the command line names and that the command does not write."""
    if any(text.lstrip("+").startswith("out=") for text in overrides()):
        raise BadInput("out", cfg.out, hint)


def _refuse_format(cfg: DictConfig) -> None:
    if cfg.format not in FORMATS:
        raise BadInput("format", cfg.format, one_of(cfg.format, FORMATS))


def _refuse_metrics(cfg: DictConfig) -> None:
    """Raise BadInput where metrics are chosen for points that are not printed."""
    if cfg.metrics != "chief":
        raise BadInput("metrics", cfg.metrics, "a study prints no metrics, its report has them; leave it out, or study=")


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
