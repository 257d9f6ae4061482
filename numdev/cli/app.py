"""What `numdev measure`, `speed`, `train`, `paper` and `report` do with a composed configuration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf

from numdev.cli.library import OPERATION, Library, config_folder, study_fields
from numdev.cli.outcome import Ended
from numdev.errors import BadInput
from numdev.nearest import one_of

FORMATS = ("csv", "parquet", "pdf", "html")


def measure(cfg: DictConfig) -> Ended:
    """One point, or the points of one study."""
    from numdev.cli import show

    return _measure_point(cfg, show, "measure") if cfg.study is None else _measure_study(cfg, "measure")


def speed(cfg: DictConfig) -> Ended:
    """One point timed, or the points of one study and their report."""
    from numdev.cli import show_speed

    if cfg.study is None and any(text.lstrip("+").startswith("out=") for text in overrides()):
        raise BadInput("out", cfg.out, "a study ends with a report, one point with its figures; leave it out, or give study= too")
    if cfg.study is None:
        return _measure_point(cfg, show_speed, "speed")
    ended = _measure_study(cfg, "speed")
    from numdev.cli.console import output
    from numdev.report.document.speed import make_speed_report

    make_speed_report(Path(cfg.results), Path(cfg.out), output())
    return ended


def train(cfg: DictConfig) -> Ended:
    """One rung trained beside its reference, or the rungs of one study and their report."""
    from numdev.cli import show_training

    _refuse_of_training(cfg)
    if cfg.study is None:
        return _measure_point(cfg, show_training, "train")
    ended = _measure_study(cfg, "train")
    _make_report(Path(cfg.results), Path(cfg.out), None, "csv")
    return ended


def _refuse_of_training(cfg: DictConfig) -> None:
    """Raise BadInput for what is stated and means nothing here."""
    if cfg.objective is not None:
        raise BadInput("objective", cfg.objective, "numdev train has no figure for a sweeper; leave it out")
    if cfg.fresh:
        runs = Path(cfg.results) / "runs"
        raise BadInput("fresh", True, f"runs are shared by points and kept; remove {runs} to train them again")
    if cfg.study is None and any(text.lstrip("+").startswith("out=") for text in overrides()):
        raise BadInput("out", cfg.out, "a study ends with a report, one point with its figures; leave it out, or give study= too")


def paper(cfg: DictConfig) -> Ended:
    """Every study of the paper, then its report."""
    from numdev.cli import studies
    from numdev.cli.runners import runner

    for name, whole in (("study", None), ("shard", 0), ("shards", 1), ("objective", None)):
        if cfg[name] != whole:
            value = HydraConfig.get().runtime.choices["study"] if name == "study" else cfg[name]
            raise BadInput(name, value, "numdev paper runs whole studies, studies=[a,b]; for one there is numdev measure study=")
    _refuse_format(cfg)
    if not cfg.studies:
        raise BadInput("studies", [], "give at least one, as in studies=[fig3,fig4]; numdev studies lists them")
    expander = studies.expander(HydraConfig.get(), cfg)
    work = []
    for name in cfg.studies:
        own = expander.of(name)
        work.append((own.study(name, expander.library.study(name)), runner("paper", cfg, own.composer.of)))
    ended = studies.run(work, cfg, live=None)
    _make_report(Path(cfg.results), Path(cfg.out), list(cfg.studies), cfg.format)
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
    if chosen == ["paper"]:
        chosen = _measured_of_paper(Path(cfg.results))
    plain = _plain(cfg.plot)
    _make_report(
        Path(cfg.results), Path(cfg.out), chosen, cfg.format, {name: one for name, one in plain.items() if one is not None}
    )
    return Ended()


def _refuse_format(cfg: DictConfig) -> None:
    if cfg.format not in FORMATS:
        raise BadInput("format", cfg.format, one_of(cfg.format, FORMATS))


def _measured_of_paper(results: Path) -> list[str]:
    """The studies of the paper that were measured; all of them where none was, for the error to name."""
    from numdev.cli.console import output
    from numdev.results.store import Store

    names = [str(name) for name in Library((config_folder(),)).load("paper")["studies"]]
    held = Store(results).studies()
    if absent := [name for name in names if name not in held]:
        output().print(f"note: {results} holds no {', '.join(absent)}", markup=False, highlight=False)
    return [name for name in names if name in held] or names


def _measure_study(cfg: DictConfig, program: str) -> Ended:
    from numdev.cli import studies
    from numdev.cli.runners import runner
    from numdev.results.study import Shard

    if cfg.objective is not None:
        raise BadInput("objective", cfg.objective, "it is a figure of one point; leave it out, or study=")
    hydra = HydraConfig.get()
    name = hydra.runtime.choices.get("study")
    if name is None:  # Hydra has merged several into one
        raise BadInput("study", "[...]", "give one, or sweep over several: -m study=fig3,fig4")
    fields = study_fields(name, _plain(cfg.study))
    expander = studies.expander(hydra, cfg, program)
    own = expander.of(name)
    bench = runner(program, cfg, own.composer.of)
    if program == "train" and own.library.operation_of(name) is None and OPERATION not in expander.manner:
        raise BadInput("study", name, f"it trains nothing; numdev measure study={name}, or numdev speed for one of speed")
    work = [(own.study(name, fields), bench)]
    return studies.run(work, cfg, live=_has_own_terminal(), shard=Shard(cfg.shard, cfg.shards))


def _measure_point(cfg: DictConfig, show: Any, program: str) -> Ended:
    """One point, and all its figures; in a sweep one line of them. `show` has a `record` and a `job`."""
    from numdev.cli import build, objective, placed, studies
    from numdev.cli.codes import code_of_point
    from numdev.cli.composed import of_points
    from numdev.cli.console import ERRORS, output
    from numdev.cli.progress import Progress
    from numdev.cli.requests import flat, request
    from numdev.cli.runners import runner
    from numdev.results.store import Store
    from numdev.results.study import DONE
    from numdev.results.where import Where

    for name, whole in (("shard", 0), ("shards", 1)):
        if cfg[name] != whole:
            raise BadInput(name, cfg[name], "it is a part of a study; give study= too")
    bench = runner(program, cfg)
    objective.refuse_unusable(cfg.objective, bench.kind)
    hydra, raw = HydraConfig.get(), dict(flat(_plain(cfg)))
    expander = studies.expander(hydra, cfg)
    options = of_points(hydra.runtime.choices)
    wanted = request(raw, expander.said(raw, expander.task), options)
    point = build.point(wanted)
    store = Store(Path(cfg.results))
    key = bench.key(point.problem, point.variant, point.baseline, point.seeds)
    found = None if cfg.fresh else store.get(key)
    already = found is not None and found.status in DONE
    if found is None or not already:
        parts = point.problem, point.variant, point.baseline, point.seeds
        with Progress(point.seeds, ERRORS, live=_has_own_terminal(), unit="replicates") as progress:
            where: Where = {"folder": store.work(key), "shared": store.shared}
            where |= {"told": progress.replicates, "within": progress.within}
            found = bench.measure(*parts, **where)
        store.put(found)
    placed.keep(store, program, cfg, expander, wanted, (bench, found))
    if hydra.mode is RunMode.MULTIRUN:
        output().print(show.job(" ".join(overrides()), found, already=already), soft_wrap=True)
    else:
        show.record(output(), found, store.path, already=already)
    return Ended(code_of_point(found.status), figure=objective.value(cfg.objective, found), key=found.key)


def _has_own_terminal() -> bool | None:
    """False where other jobs write to the same terminal at the same time, so that bars would overwrite each other."""
    hydra = HydraConfig.get()
    basic = hydra.launcher._target_.rpartition(".")[2] == "BasicLauncher"
    return None if hydra.mode is RunMode.RUN or basic else False


def refuse_unknown(cfg: DictConfig, prefix: str = "", groups: Iterable[str] = ()) -> None:
    """Raise BadInput for a setting that no schema knows: `+name=value` brings one in.

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


def overrides() -> list[str]:
    """What the command line says of this job, as it was written."""
    return [str(text) for text in OmegaConf.to_container(HydraConfig.get().overrides.task, resolve=False)]  # type: ignore[union-attr]


def _make_report(results: Path, out: Path, studies: list[str] | None, fmt: str, plot: dict[str, Any] | None = None) -> None:
    from numdev.cli.console import output
    from numdev.report.document.paper import make_report

    make_report(results, out, studies, fmt == "parquet", output(), pdf=fmt == "pdf", html=fmt == "html", plot=plot)


def _plain(cfg: Any, *, resolve: bool = False) -> dict[str, Any]:
    plain = OmegaConf.to_container(cfg, resolve=resolve)
    assert isinstance(plain, dict)
    return {str(key): value for key, value in plain.items()}
