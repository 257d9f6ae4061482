"""From a study's YAML to its points.

A study has `base`, settings common to all points; `axes`, the grid: a group and its options, a setting and its values, or names,
each with any settings and with a `role`; and `scenarios`, each with a title, a role, settings of its own, and axes that replace
or add some. Names with like settings share an entry, `{each: [NAME, ...], precision.@: bf16}`. `docs/how-to/add-study.md` shows a
study.

Later statements override earlier ones, in this order: the defaults of `config.yaml`, `base`, the scenario, options chosen on an
axis or the command line, values of an axis, values on the command line. Choosing an option of a group states the contents of its
file. If the command line sets an axis, only that value of the axis is kept. All of these except the defaults are explicit, unless
they are null: a point whose variant does not read one of them is not measured, but recorded as unsupported.

A point is requested with and without the command line. Where the two differ in what its scenario states, the scenario would be
another, and is left out; where they differ in what an entry of an axis states, the label would be wrong, and the point is
unsupported; any other difference is an override of the study. A scenario is also left out if the command line sets an axis to a
value that it lacks and another one has, or where none has it, if the scenario states the axis itself. `seeds` changes none.

Every mistake in a file is a BadInput that names the field, as in `claims[1].metric` or `figures.ladder.draw`.
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from omegaconf import DictConfig, OmegaConf

from numdev.cli import build, schema
from numdev.cli.compose import (
    OPERATION,
    Composer,
    Request,
    Statement,
    Statements,
    at,
    composer,
    groups_of_points,
    overrides_of,
    plain,
)
from numdev.cli.schema import written
from numdev.errors import BadInput, NotHonoured, one_of
from numdev.results.claim import COLUMNS, ClaimKind, ClaimStatement, Pilot
from numdev.results.record import Reference
from numdev.results.store import EntryRole, Scenario
from numdev.results.study import Study, StudyPoint
from numdev.settings import choice, flat, make

_MANNER = (OPERATION, "timing")  # of what, and how, a point is measured
_SECTION = ("place", "measured", "source", "figures")  # fields of a study's file that the report alone reads
_OF_A_PART = ("metric", "reference", "kind", "where", "over", "of", "to", "above", "below", "margin", "each", "condition", "also")
_OF_POINTS = ("scenario.title", "output", "reference", "subject", "format", "policy")  # columns of every study, beside its axes
_DRAWN = ("draw", "about", "options", "title", "needs", "table")  # of a figure that a function draws
Axes = Mapping[str, Sequence[Any]]  # the entries of each
Claims = tuple[str | ClaimStatement, ...]
Fields = Mapping[str, Any]  # of a study's file


class Entry(NamedTuple):
    """One value of an axis: its label, what it states, and what it is to the claims."""

    label: Any
    statements: Statements
    role: EntryRole = EntryRole.SUBJECT


class Circumstances(NamedTuple):
    """A scenario of a study's file."""

    about: Scenario
    settings: Statements  # of its own
    changed: Statements  # the axes that it replaces or adds
    axes: Mapping[str, Any]  # all of them

    @classmethod
    def of(cls, name: str, stated: Any, axes: Mapping[str, Any]) -> Circumstances:
        """The scenario of a name; `axes` are those of the study."""
        where = f"study.scenarios.{name}"
        settings = dict(_mapping(where, stated))
        changed = _mapping("axes", settings.pop("axes", None))
        about = {key: settings.pop(key) for key in ("title", "role", "stands_for") if key in settings}
        scenario = make(Scenario, {"name": name, "title": name} | about, where)
        if not scenario.title.strip():
            raise BadInput(f"{where}.title", scenario.title, "give it in words, as a reader is to see it")
        return cls(scenario, settings, changed, {axis: _written_out(own) for axis, own in {**axes, **changed}.items()})


@dataclass(frozen=True)
class Expander:
    """Makes the points of studies."""

    composer: Composer  # makes their requests
    task: Statements = field(default_factory=dict)  # what the command line states about points; it overrides everything else
    program: str = "measure"  # the command that runs the studies, for the command line that reproduces them
    own: str | None = None  # the config folder that the command line adds, for the same command line
    manner: Statements = field(default_factory=dict)  # what the command line states about how, not which, points are measured

    def of(self, study: str) -> Expander:
        """The expander for the operation that a study's file chooses, unless the command line chooses one."""
        own = self.composer.operation if OPERATION in self.manner else self.composer.operation_of(study)
        return replace(self, composer=composer(self.composer.folders, self.composer.name, own))

    def request(self) -> Request:
        """The request of the point that the command line states."""
        return self.composer.request(self.task)

    def study(self, name: str, fields: Fields) -> Study:
        """The study with all its points, none of them twice."""
        stated = fields["scenarios"] or {"default": {"title": fields["title"]}}
        scenarios = [Circumstances.of(key, own, fields["axes"]) for key, own in stated.items()]
        lacking = [{axis for axis in self.task if axis in one.axes and not self._has(one, axis)} for one in scenarios]
        known = {axis for one in scenarios for axis in one.axes if axis in self.task and self._has(one, axis)}
        kept, points, changed = list[Scenario](), list[StudyPoint](), set[str]()
        for one, lacks in zip(scenarios, lacking, strict=True):
            if lacks & {*known, *one.changed}:
                continue
            try:
                made = self._points(one, fields["base"])
            except BadInput as error:
                raise BadInput(error.field, error.value, f"{error.hint} (study {name}, scenario {one.about.name})") from None
            if made is not None:
                points, changed = [*points, *made[0]], changed | made[1] | lacks
                kept.append(one.about)
        settings = [f"{key}={written(value)}" for key, value in (*self.task.items(), *self.manner.items())]
        if not kept:
            others = " ".join(text for text in settings[: len(self.task)] if not text.startswith("seeds="))
            hint = "leave that out, or change a copy of the study's file"
            raise BadInput("study", name, f"each of its scenarios is about other settings than {others}; {hint}")
        if not points:
            raise BadInput("study", name, "it has no points; give every axis at least one value")
        folder = ["--config-dir", self.own] if self.own else []
        claims, plot = self._answers(name, fields, scenarios)
        # Neither another number of replicates nor the choice of one value of an axis makes another point
        overrides = [f"{key}={written(value)}" for key, value in self.task.items() if key in changed and key != "seeds"]
        if OPERATION in self.manner and self.manner[OPERATION] != self.composer.operation_of(name):
            overrides.insert(0, f"{OPERATION}={self.manner[OPERATION]}")
        return Study(
            name,
            claims=claims,
            points=tuple(points),
            more=tuple(fields["more"]),
            command=shlex.join(["numdev", self.program, *folder, f"study={name}", *settings]),
            scenarios=tuple(kept),
            overrides=tuple(overrides),
            words={axis: schema.words(axis) for axis in dict.fromkeys(axis for point in points for axis in point.labels)},
            plot=plot,
            section={name: fields[name] for name in _SECTION if fields[name]},
            left_out=tuple(one.about.title for one in scenarios if one.about not in kept),
            **{part: fields[part] for part in ("title", "figure", "question")},
        )

    def _has(self, scenario: Circumstances, axis: str) -> bool:
        """Whether the value of an axis on the command line is one of the scenario's."""
        return isinstance(scenario.axes[axis], list) and self.task[axis] in scenario.axes[axis]

    def _points(self, scenario: Circumstances, base: Statements) -> tuple[list[StudyPoint], set[str]] | None:
        """The points of a scenario, and what the command line changes in them; None where it makes the scenario another."""
        points, changed, settings, name = dict[str, StudyPoint](), set[str](), scenario.settings, scenario.about.name
        task_choices, task_values = self.composer.split(self.task)
        for combination in itertools.product(*(self._entries(axis, values) for axis, values in scenario.axes.items())):
            entries = dict(zip(scenario.axes, combination, strict=True))
            labels = {axis: entry.label for axis, entry in entries.items()}
            place = json.dumps(labels, sort_keys=True)  # identifies what the entries state
            if place in points:
                continue
            parts = [self.composer.split(entry.statements) for entry in combination]
            choices, values = ({key: value for part in parts for key, value in part[i].items()} for i in (0, 1))
            before = self.composer.request(base, settings, choices, values)
            after = self.composer.request(base, settings, choices | task_choices, values, task_values) if self.task else before
            if self._overridden(settings, before, after):
                return None
            changed |= {key for key, value in self.task.items() if {**before.raw, **before.options}.get(key) != value}
            try:
                for axis, entry in entries.items():
                    if one := self._overridden(entry.statements, before, after):
                        hint = f"the points {axis}={written(entry.label)} stand for {one[0]}; leave it out"
                        raise NotHonoured(one[1].name, one[1].value, hint)
                point = build.point(after, name, labels)
            except NotHonoured as error:
                point = build.refused_point(after, name, labels, str(error))
            roles = {axis: one.role for axis, one in entries.items() if one.role is not EntryRole.SUBJECT}
            points[place] = replace(point, roles=roles)
        return [one for point in points.values() for one in build.replicated(point)], changed

    def _overridden(self, statements: Statements, before: Request, after: Request) -> tuple[Statement, Statement] | None:
        """A statement of which the command line changes a setting, and the statement of the command line; None without."""
        for key, one in self.composer.statements(statements).items() if after is not before else ():
            if key != "seeds" and before.raw.get(key) is not None and after.raw.get(key) != before.raw[key]:
                group = key.partition(".")[0]
                by = after.said.get(key) or after.said.get(group) or Statement(group, self.task.get(group))
                return one, by
        return None

    def _entries(self, axis: str, values: Any) -> list[Entry]:
        """The values of an axis with what they state; only the command line's where it names the axis."""
        if axis in self.task:
            values = [self.task[axis]]
        if isinstance(values, list):
            return [Entry(value, {axis: value}) for value in values]
        if not isinstance(values, Mapping):
            raise BadInput(f"axes.{axis}", values, "give a list of values, or names with their settings")
        named = {name: dict(_mapping(f"axes.{axis}.{name}", own)) for name, own in values.items()}
        roles = {name: own.pop("role", EntryRole.SUBJECT.value) for name, own in named.items()}
        return [Entry(name, own, choice(f"axes.{axis}.{name}.role", EntryRole, roles[name])) for name, own in named.items()]

    def _answers(self, name: str, fields: Fields, scenarios: Sequence[Circumstances]) -> tuple[Claims, dict[str, Any] | None]:
        """The claims, and what the figure shows, as the file states them; both are checked against axes and metrics."""
        entries, plot = dict[str, list[Any]](), fields["plot"]
        for axis, values in (item for one in scenarios for item in one.axes.items()):
            every = values if isinstance(values, (list, Mapping)) else [values]
            entries[axis] = [*entries.get(axis, ()), *(one for one in every if one not in entries.get(axis, ()))]
        try:
            check_figures(fields["figures"])
            pilot_of(fields)
            if not fields["claims"] and plot is None:
                return (), None
            operation = build.operation_of(self.composer.of)
            metrics = build.kind(self.program, operation).comparable
            if plot is not None and fields["figure"] is not None:
                raise BadInput("plot", plot, f"the study names the figure {fields['figure']} too; leave one of them out")
            if plot is not None and operation.golden is None:
                hint = f"{operation.name} has a value for every step and tensor; leave it out, the report draws its own figures"
                raise BadInput("plot", operation.name, hint)
            return claims_of(fields["claims"], entries, metrics), plot and plot_of(plot, entries, metrics)
        except BadInput as error:
            raise BadInput(error.field, error.value, f"{error.hint} (study {name})") from None


def expander(hydra: Any, cfg: DictConfig, program: str = "measure") -> Expander:
    """An expander over the config folders of this run, with what its command line states of a point.

    `hydra` is Hydra's own part of the configuration; `program` see `Expander`.
    """
    runtime = hydra.runtime
    groups, settings = (OPERATION, *groups_of_points(runtime.choices)), plain(cfg)
    task, manner = dict[str, Any](), dict[str, Any]()
    for override in overrides_of(hydra):
        key, value = override.key_or_group, override.value()
        name = key.partition(".")[0]
        statements = manner if name in _MANNER else task
        if key in groups and override.package is None and isinstance(runtime.choices.get(key), str) and isinstance(value, str):
            statements[key] = runtime.choices[key]
        elif name in settings and (name in _MANNER or name not in schema.of_runs()):
            statements |= dict(flat({key: value if isinstance(value, dict) else at(settings, key)}))
    own = next((Path(source.path) for source in runtime.config_sources if source.provider == "command-line"), None)
    folder = None if own is None else str(own.relative_to(runtime.cwd) if own.is_relative_to(runtime.cwd) else own)
    folders = tuple(Path(source.path) for source in runtime.config_sources if source.schema == "file")
    return Expander(composer(folders, hydra.job.config_name, runtime.choices.get(OPERATION)), task, program, folder, manner)


def _mapping(where: str, value: Any) -> Mapping[str, Any]:
    """Settings with their values; nothing at all states nothing."""
    if value is not None and not isinstance(value, Mapping):
        raise BadInput(where, value, "give settings with their values, {setting: value}")
    return value or {}


def _written_out(entries: Any) -> Any:
    """The entries of an axis, of which one with `each`, a list, has become one for each of its items, in place of `@`.

    It stands in settings, at the end of values, and in the name of the entry, which is the item where there is no `@`.
    """
    if not isinstance(entries, Mapping):
        return entries
    made: dict[Any, Any] = {}
    for name, own in entries.items():
        if not isinstance(own, Mapping) or not isinstance(own.get("each"), list):
            made[name] = own
            continue
        for item in own["each"]:
            label = str(name).replace("@", str(item)) if "@" in str(name) else item
            made[label] = {key.replace("@", str(item)): _ending(value, item) for key, value in own.items() if key != "each"}
    return made


def _ending(value: Any, item: Any) -> Any:
    """A value with an item in place of the `@` at its end; CAST@16 has it elsewhere."""
    if not isinstance(value, str) or not value.endswith("@"):
        return value
    return item if value == "@" else f"{value[:-1]}{item}"


def claims_of(claims: Any, axes: Axes, metrics: Collection[str]) -> Claims:
    """The claims of a study: a name of one that ships with numdev as it is, and each that the file states.

    `axes` are the entries of every axis in any scenario, `metrics` what there is to compare.
    """
    if not isinstance(claims, (list, tuple)):
        raise BadInput("claims", claims, "give a list of claims")
    return tuple(one if isinstance(one, str) else _claim(f"claims[{i}]", one, axes, metrics) for i, one in enumerate(claims))


def _claim(where: str, own: Any, axes: Axes, metrics: Collection[str]) -> ClaimStatement:
    if not isinstance(own, Mapping):
        known = ", ".join(ClaimStatement.__dataclass_fields__)
        raise BadInput(where, own, f"give the fields of a claim, {known}, or the name of one that numdev ships")
    claim = make(ClaimStatement, {name: value for name, value in own.items() if value is not None}, where)
    if claim.judge:
        _check_function(f"{where}.judge", claim.judge)
        return claim
    for part, fields in claim.parts.items():
        _check_keys(f"{where}.parts.{part}", fields, _OF_A_PART, "a part of a claim")
    for part, value in claim.values(where).items():
        _check(f"{where}.parts.{part}" if claim.parts else where, value, axes, metrics)
    if not (claim.parts or claim.is_bounded):
        raise BadInput(f"{where}.above", None, "give a number from which on the claim holds; or give below, or both")
    return claim


def _check(where: str, claim: ClaimStatement, axes: Axes, metrics: Collection[str]) -> None:
    """Refuse a claim on one value that names what the study does not have."""
    entries: Axes = {**dict.fromkeys(COLUMNS, ()), **axes}
    sides = {"where": claim.where, "of": claim.of, "to": claim.to if isinstance(claim.to, Mapping) else {}}
    chosen = [(side, axis, entry) for side, own in sides.items() for axis, entry in own.items()]
    _check_names(f"{where}.metric", [claim.metric or None], metrics)
    for part, names in {"over": [claim.over], "each": [claim.each], **sides}.items():
        _check_names(f"{where}.{part}", filter(None, names), entries)
    if claim.kind is ClaimKind.SLOPE and not all(type(one) in (int, float) and one > 0 for one in entries[claim.over]):
        hint = "a slope is over positive numbers, and its entries are not; give another axis"
        raise BadInput(f"{where}.over", claim.over, hint)
    for side, axis, entry in chosen:
        if isinstance(entry, Mapping):
            choice(f"{where}.{side}.{axis}.role", EntryRole, entry.get("role"))
        else:
            _check_names(f"{where}.{side}.{axis}", [entry], entries[axis] or [entry])
    _check_names(f"{where}.order", claim.order, entries.get(claim.over) or claim.order)


def pilot_of(fields: Fields) -> Pilot | None:
    """What a study's file knows beforehand; None where that is nothing."""
    return make(Pilot, fields["pilot"], "pilot") if fields["pilot"] else None


def plot_of(plot: Any, axes: Collection[str], metrics: Sequence[str]) -> dict[str, Any]:
    """The parts of a figure by key, each name checked; `colour` and `facet` are lists.

    `plot` is a mapping, or text such as `x: problem.n, y: out.rmse, colour: precision`; `axes` are names that a figure can be
    drawn over, beside those of every study.
    """
    try:
        parts: Any = OmegaConf.to_container(OmegaConf.create(f"{{{plot.strip('{}')}}}")) if isinstance(plot, str) else plot
    except Exception:  # whatever the parser of YAML raises
        parts = None
    if not isinstance(parts, Mapping) or None in parts.values():
        raise BadInput("plot", plot, "give it as in x: problem.n, y: out.rmse, colour: precision")
    names = list(dict.fromkeys([*axes, *_OF_POINTS]))
    known = {"y": metrics, "reference": [each.value for each in Reference], "x": names, "colour": names, "facet": names}
    _check_keys("plot", parts, known, "a figure")
    if missing := {"x", "y"}.difference(parts):
        raise BadInput(f"plot.{min(missing)}", None, "name what stands on this axis, as in x: problem.n, y: out.rmse")
    lists = {key: value if isinstance(value, list) else [value] for key, value in parts.items() if value != []}
    for key, own in lists.items():
        _check_names(f"plot.{key}", own, known[key])
    return {key: own if key in ("colour", "facet") else parts[key] for key, own in lists.items()}


def check_figures(figures: Mapping[str, Any]) -> None:
    """Check the figures that a study's file says how to draw, by name."""
    for name, own in figures.items():
        _check_keys(f"figures.{name}", own if isinstance(own, Mapping) else {"": own}, _DRAWN, "a figure")
        if "draw" in own or "options" not in own:
            _check_function(f"figures.{name}.draw", own.get("draw"))
        if not isinstance(own.get("about"), str):
            raise BadInput(f"figures.{name}.about", own.get("about"), "describe it for those who cannot see it")


def _check_names(where: str, names: Iterable[Any], known: Collection[Any]) -> None:
    for name in names:
        if name not in known:
            raise BadInput(where, name, one_of(name, map(str, known), most=12))


def _check_keys(where: str, own: Mapping[str, Any], known: Collection[str], whole: str) -> None:
    for key in own:
        if key not in known:
            raise BadInput(f"{where}.{key}", own[key], f"{whole} has no {key}; {one_of(key, known)}")


def _check_function(where: str, value: Any) -> None:
    if not isinstance(value, str) or not re.fullmatch(r"[\w.]+:\w+", value):
        raise BadInput(where, value, "give a function as module:name")
