"""Hydra's schemas and `--help`, derived from the fields that declare settings: of value objects, and of the run here."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from functools import cache, reduce
from textwrap import wrap
from typing import Any

from hydra.core.config_store import ConfigStore
from omegaconf import MISSING, OmegaConf

from numdev.attention.groups import BACKWARD_DEFAULTS, BACKWARD_GROUPS, GROUPS
from numdev.settings import Setting, declared, node_of, setting
from numdev.training.rung import DEFAULTS as TRAINING_DEFAULTS
from numdev.training.rung import GROUPS as TRAINING_GROUPS

_LABEL, _WIDTH = 30, 76  # columns of a setting with its default, and of both columns of the help

_OPERATIONS: dict[str, tuple[dict[str, type], dict[str, Any]]] = {
    "attention": (GROUPS, {}),
    "attention_backward": (BACKWARD_GROUPS, BACKWARD_DEFAULTS),
    "training": (TRAINING_GROUPS, TRAINING_DEFAULTS),
}
"""The groups and nodes of each operation whose settings are fields, and defaults that differ from those of the fields."""


@dataclass
class StudyConfig:
    """A file of `configs/study`; see `numdev.cli.expand`."""

    title: str = MISSING
    kind: str = "deviation"  # of measurement; or certificate, invariance, mismatch, or speed, which numdev speed alone measures
    figure: str | None = None
    more: list[str] = field(default_factory=list)
    claims: Any = field(default_factory=list)  # a list; `numdev.cli.expand` checks it
    place: int = 1000
    question: str = ""
    measured: str = ""
    source: str = ""
    figures: dict[str, Any] = field(default_factory=dict)  # by name, what draws them
    plot: Any = None  # text or a mapping; `numdev.cli.expand` checks it
    pilot: dict[str, Any] = field(default_factory=dict)  # `numdev.results.claim.Pilot`, from which a dry run knows the power
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
    dry_run: bool = setting(
        False, "count points and memory, and say what a study of training can decide; measure and write nothing"
    )
    study: StudyConfig | None = None
    shard: int = setting(0, "measure this part of a study, of `shards` parts")
    shards: int = setting(1, "parts of the study", "count")
    workers: int | None = setting(
        None,
        "processes that measure a study on a CPU, each with one thread; null is one for each core, and 1 for a shard or little "
        "work. No result depends on it",
        "count",
    )
    objective: str | None = setting(
        None,
        "what a sweeper minimises (hydra/sweeper=optuna): output.metric of a point, as in out.max_difference, and of numdev "
        "speed a figure, as in latency",
    )


@dataclass
class TimingConfig:
    """`numdev.measurement.speed.Budget`."""

    seconds: float = setting(0.3, "time for all timed calls together, within the least and the most of them", "s")
    least: int = setting(10, "calls that are timed at least", "count")
    most: int = setting(100, "calls that are timed at most", "count")


@dataclass
class TimedConfig:
    """The settings of `numdev speed` alone."""

    timing: TimingConfig = field(default_factory=TimingConfig)
    out: str = setting("reports/speed", "folder of the report")


@dataclass
class TrainedConfig:
    """The settings of `numdev train` alone."""

    out: str = setting("reports/training", "folder of the report")


@dataclass
class StudiesConfig:
    """The settings of `numdev paper` alone."""

    studies: list[str] = MISSING
    out: str = setting("reports/paper", "folder of the report")
    format: str = setting(
        "pdf", "what the report has beside tables and figures, as numdev report takes it: pdf, html, parquet, csv"
    )


@dataclass
class MappedConfig:
    """The head that `numdev map` draws; see `numdev.measurement.deviation.Place`."""

    output: str | None = setting(None, "output of the operation, such as out, lse, dq, dk, dv; null is the primary one")
    head: int = setting(0, "head of the output, from 0; those of further batch entries stand behind one another")
    seed: int = setting(0, "replicate, as numdev measure counts them from 0")
    subject: str = setting("variant", "whose error it is: variant or baseline")
    reference: str = setting("golden", "what it is compared with: golden, golden_same_inputs or baseline")
    device: str = setting("auto", "where it runs: auto, cpu or cuda")
    out: str = setting("reports/map", "folder of the files; a sweep makes a folder in it for each job")


@dataclass
class PlotConfig:
    """The columns of a figure; see `numdev.report.reading.view.View`."""

    x: str | None = setting(None, "what the metric is drawn over, such as problem.n")
    y: str | None = setting(None, "the metric, such as rmse, or out.max_difference of the output out")
    colour: Any = setting(None, "what the lines differ in, one name or several, as in [precision,softmax]")
    facet: Any = setting(None, "what the panels differ in, likewise")
    reference: str | None = setting(None, "what the metric is taken against: golden, golden_same_inputs or baseline")


@dataclass
class ReportConfig:
    """`numdev report`."""

    results: str = setting("results", "folder of the records")
    out: str | None = setting(None, "folder of the report; null is that of the study, or else of the results, in reports")
    studies: Any = setting(None, "a study, a list of studies, or null for all that results have; study= is the same")
    format: str = setting(
        "parquet",
        "tables and figures, with a row per replicate in results.parquet; csv has these in results.csv, pdf adds report.pdf, "
        "html report.html",
    )
    title: str | None = setting(None, "of report.pdf and report.html; null names what was measured")
    author: str | None = setting(None, "of report.pdf and report.html; null leaves it out")
    plot: PlotConfig = field(default_factory=PlotConfig)


_COMMANDS: dict[str, tuple[type, ...]] = {
    "map": (MappedConfig,),
    "measure": (RunConfig,),
    "paper": (StudiesConfig, RunConfig),
    "speed": (TimedConfig, RunConfig),
    "train": (TrainedConfig, RunConfig),
    "report": (ReportConfig,),
}
"""The classes whose fields the configuration of each command has."""


@cache
def of_commands() -> dict[str, Setting]:
    """The declared settings of all commands, by name."""
    return {one.name: one for kinds in _COMMANDS.values() for kind in kinds for one in declared(kind)}


@cache
def of_runs() -> set[str]:
    """The settings that are of a command, and not of the points that it measures."""
    return {one.name for kinds in _COMMANDS.values() for kind in kinds for one in fields(kind)} - {"seeds"}


def register() -> None:
    """Make known to Hydra what the primary files of `configs/` and those of operations name in their defaults lists.

    A command's schema leaves room for the groups of an operation. The node of a group holds the defaults of its settings, whose
    types `numdev.settings.make` checks.
    """
    OmegaConf.register_new_resolver("numdev.settings", explained, replace=True)
    store = ConfigStore.instance()
    for command, kinds in _COMMANDS.items():
        flags = {} if command == "report" else {"struct": False}
        store.store(name=f"{command}_schema", node=OmegaConf.structured(make_dataclass("Config", [], bases=kinds), flags=flags))
    for operation, (groups, defaults) in _OPERATIONS.items():
        nodes: dict[str, Any] = {}
        for group, kind in groups.items():
            nodes |= {f"{group}._target_": f"{kind.__module__}.{kind.__qualname__}"}
            nodes |= {f"{group}.{name}": default for name, default in node_of(kind).items()}
            nodes |= {f"{group}.{one.name}": one.default for one in declared(kind)}
        changed = {name: default for name, default in defaults.items() if name in nodes}
        store.store(name=f"{operation}_schema", node=nested(nodes | changed))


def nested(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings by dotted name as mappings within mappings."""
    config: dict[str, Any] = {}
    for key, value in settings.items():
        *parents, name = key.split(".")
        reduce(lambda node, parent: node.setdefault(parent, {}), parents, config)[name] = value
    return config


def written(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


@cache
def settings() -> dict[str, Setting]:
    """Every declared setting of the groups that have a schema, by its dotted name."""
    groups = [item for own, _ in reversed(_OPERATIONS.values()) for item in own.items()]  # what several have is as in attention
    return {f"{group}.{one.name}": one for group, kind in groups for one in declared(kind)}


_WORDS = {
    "attention": "implementation",
    "backward": "implementation",
    "precision": "precision policy",
    "forward_precision": "precision policy of the forward pass",
    "problem": "inputs",
    "softmax": "softmax recurrence",
    "recompute": "recomputation",
    "attention.backend": "backend",
    "attention.kernel": "kernel",
    "seeds": "replicates",
}
"""Words on the axis of a figure for groups, and for settings that an option alone has."""


def words(name: str) -> tuple[str, str]:
    """The word for a setting or group on the axis of a figure, empty where that is its name, and its unit."""
    known = settings().get(name)
    if known is None:
        return _WORDS.get(name, ""), ""
    if known.unit == "format":  # a step of a policy
        return f"format of {name.rpartition('.')[2].replace('_', ' ')}", ""
    return known.word, known.unit


def all_words() -> dict[str, tuple[str, str]]:
    """Those of all settings and groups that have any."""
    return {name: known for name in (*_WORDS, *settings()) if (known := words(name)) != ("", "")}


def explained(group: str, *names: str) -> str:
    """The help on the settings of a group, of a command or of every run: each with its default, unit and sentence.

    A group of another operation than attention has its name in front, as in `attention_backward/problem`. Some settings where
    these are named, as a command states those whose defaults are its own.
    """
    rows = []
    operation, _, group = group.rpartition("/")
    kinds, defaults = _OPERATIONS[operation or "attention"]
    of_commands = {"run": RunConfig} | {command: own[0] for command, own in _COMMANDS.items()}
    for one in declared({**kinds, **of_commands}[group]):
        name = f"{group}.{one.name}" if group in kinds else one.name
        default = written(defaults.get(name, one.default)).replace("${", "").replace("}", "")
        if not names or one.name in names:
            rows.append((f"{name}={default}", f"{one.unit}: {one.text}" if one.unit else one.text))
    return in_columns(rows)


def in_columns(rows: Iterable[tuple[str, str]]) -> str:
    """Settings or options, and their sentences beside them, as wide as a terminal behind the indent of the help."""
    lines, gap = list[str](), " " * _LABEL
    for label, text in rows:
        first = f"{label:<{_LABEL}}" if len(label) + 2 <= _LABEL else gap
        lines += [label] if first == gap else []
        lines += wrap(text, _WIDTH, initial_indent=first, subsequent_indent=gap, break_long_words=False, break_on_hyphens=False)
    return "\n  ".join(lines)
