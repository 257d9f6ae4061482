"""Hydra's schemas, derived from where each setting is declared: of operations in their packages' `settings`, of the run here."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from textwrap import wrap
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from numdev.attention.settings import BACKWARD_GROUPS
from numdev.attention.settings import GROUPS as TYPED
from numdev.settings import Setting, declared, setting
from numdev.training.settings import GROUPS as TRAINING_GROUPS
from numdev.training.settings import Reference

_LABEL, _WIDTH = 30, 76  # columns of a setting with its default, and of both columns of the help

_OPERATIONS: dict[str, dict[str, type]] = {
    "attention": TYPED,
    "attention_backward": BACKWARD_GROUPS,
    "training": TRAINING_GROUPS,
}
"""The groups and nodes of each operation that have a schema."""


@dataclass
class StudyConfig:
    """A file of `configs/study`; see `numdev.cli.expand`."""

    title: str = MISSING
    figure: str | None = None
    more: list[str] = field(default_factory=list)
    claims: list[str] = field(default_factory=list)
    base: dict[str, Any] = field(default_factory=dict)
    scenarios: dict[str, Any] = field(default_factory=dict)
    axes: dict[str, Any] = field(default_factory=dict)


@dataclass
class RunConfig:
    """How many replicates, where they run and where their records go, of any operation."""

    seeds: int | None = setting(
        None, "replicates 0 to seeds - 1; null is 10 draws of a distribution, every head of captured tensors", "count"
    )
    device: str = setting("auto", "where it is measured: auto, cpu or cuda")
    results: str = setting("results", "folder of the records")
    fresh: bool = setting(False, "measure again what is there")
    metrics: str = setting("chief", "what a point prints: chief, or all for every metric of every output")
    dry_run: bool = setting(False, "estimate points, time and memory; measure and write nothing")
    study: StudyConfig | None = None
    shard: int = setting(0, "measure this part of a study, of `shards` parts")
    shards: int = setting(1, "parts of the study", "count")
    objective: str | None = setting(
        None,
        "what a sweeper minimises (hydra/sweeper=optuna): output.metric of a point, as in out.max_difference, and of numdev "
        "speed a figure, as in latency",
    )


@dataclass
class TimingConfig:
    """`numdev.measurement.speed.timing.Budget`."""

    seconds: float = setting(0.3, "time for all timed calls together, within the least and the most of them", "s")
    least: int = setting(10, "calls that are timed at least", "count")
    most: int = setting(100, "calls that are timed at most", "count")


@dataclass
class TimedConfig:
    """What `numdev speed` adds."""

    timing: TimingConfig = field(default_factory=TimingConfig)
    counters: bool = setting(False, "count the bytes that calls move too: an NVIDIA GPU with Nsight Compute (ncu)")
    out: str = setting("reports/speed", "folder of the report")


@dataclass
class TrainedConfig:
    """What `numdev train` adds."""

    out: str = setting("reports/training", "folder of the report")


@dataclass
class StudiesConfig:
    """What `numdev paper` adds."""

    studies: list[str] = MISSING
    out: str = setting("reports/paper", "folder of the report")


@dataclass
class ReportConfig:
    """`numdev report`."""

    results: str = setting("results", "folder of the records")
    out: str = setting("reports/paper", "folder of the report")
    studies: Any = setting(None, "a study, a list of studies, paper, or null for all that results have; study= is the same")
    format: str = setting("csv", "tables and figures; parquet adds results.parquet, pdf adds report.pdf")


@dataclass
class PointConfig(RunConfig):
    """A run, and the nodes that every point has; the groups that an operation adds stand beside them."""

    operation: Any = None
    problem: Any = None
    variant: Any = None
    baseline: Any = None


@dataclass
class SpeedConfig(TimedConfig, PointConfig):
    """`numdev speed`."""


@dataclass
class TrainConfig(TrainedConfig, PointConfig):
    """`numdev train`."""


@dataclass
class PaperConfig(StudiesConfig, PointConfig):
    """`numdev paper`."""


def _schemas() -> Iterator[tuple[str, Any]]:
    """The schema of each command, which leaves room for an operation's groups, and those of the groups of each operation."""
    for name, kind in (("measure", PointConfig), ("paper", PaperConfig), ("speed", SpeedConfig), ("train", TrainConfig)):
        yield name, OmegaConf.structured(kind, flags={"struct": False})
    yield "report", ReportConfig
    for name, groups in _OPERATIONS.items():
        yield name, dict(groups)


_NODES = {"reference": "baseline"}
"""Where an option with settings of its own stands that is explained like a group."""


@cache
def settings() -> dict[str, Setting]:
    """Every declared setting of the groups that have a schema, by its dotted name."""
    groups = [item for own in reversed(_OPERATIONS.values()) for item in own.items()]  # what several have is as in attention
    return {f"{group}.{one.name}": one for group, kind in groups for one in declared(kind)}


def explained(group: str, *names: str) -> str:
    """What `--help` says of the settings of a group, of the run or of `timed`: each with its default, unit and sentence.

    A group of another operation than attention has its name in front, as in `attention_backward/problem`. Some settings where
    these are named, as a command states those whose defaults are its own.
    """
    lines = []
    operation, _, group = group.rpartition("/")
    kinds = _OPERATIONS[operation or "attention"]
    for one in declared({**kinds, "run": RunConfig, "timed": TimedConfig, "reference": Reference}[group]):
        if names and one.name not in names:
            continue
        name = f"{_NODES.get(group, group)}.{one.name}" if group in kinds or group in _NODES else one.name
        default = "null" if one.default is None else str(one.default).replace("${", "").replace("}", "")
        stated = f"{name}={default.lower() if isinstance(one.default, bool) else default}"
        lines += _hanging(stated, f"{one.unit}: {one.text}" if one.unit else one.text)
    return "\n  ".join(lines)


def _hanging(label: str, text: str) -> list[str]:
    """A setting and its sentence in two columns, as wide as a terminal behind the indent of the help."""
    gap = " " * _LABEL
    first = f"{label:<{_LABEL}}" if len(label) + 2 <= _LABEL else gap
    found = wrap(text, _WIDTH, initial_indent=first, subsequent_indent=gap, break_long_words=False, break_on_hyphens=False)
    return found if first != gap else [label, *found]


def register() -> None:
    """Make the types known to Hydra, which the primary files of `configs/` name in their defaults lists."""
    OmegaConf.register_new_resolver("numdev.settings", explained, replace=True)
    store = ConfigStore.instance()
    for name, node in _schemas():
        store.store(name=f"{name}_schema", node=node)
