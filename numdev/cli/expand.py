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
"""

from __future__ import annotations

import itertools
import json
import re
import shlex
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
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
    composer_of,
    flat,
    groups_of_points,
    overrides_of,
    plain,
    written,
)
from numdev.errors import BadInput, NotHonoured, one_of
from numdev.results.claim import COLUMNS, ClaimKind, ClaimStatement
from numdev.results.record import Reference
from numdev.results.store import EntryRole, Role, Scenario
from numdev.results.study import Study, StudyPoint
from numdev.settings import choice, make

_ABOUT = ("axes", "title", "role", "stands_for")  # of a scenario, and no setting of its points
_MANNER = (OPERATION, "timing")  # of what, and how, a point is measured
_SECTION = ("place", "measured", "source", "figures")  # fields of a study's file that the report alone reads
Axes = Mapping[str, Sequence[Any]]  # the entries of each

_OF_A_PART = ("metric", "reference", "kind", "where", "over", "of", "to", "above", "below", "margin", "each", "condition", "also")
_FUNCTION = re.compile(r"[\w.]+:\w+")
_OF_POINTS = ("scenario.title", "output", "reference", "subject", "format", "policy")  # columns of every study, beside its axes
_DRAWN = ("draw", "about", "options", "title", "needs", "table")  # of a figure that a function draws


class Entry(NamedTuple):
    """One value of an axis: its label, what it states, and what it is to the claims."""

    label: Any
    statements: Statements
    role: EntryRole = EntryRole.SUBJECT


@dataclass(frozen=True)
class Expander:
    """Makes the points of studies.

    Attributes:
        composer: makes their requests.
        task: what the command line states about points; it overrides everything else.
        program: the command that runs the studies, for the command line that reproduces them.
        own: the config folder that the command line adds, for the same command line.
        manner: what the command line states about how, not which, points are measured; for the same command line too.
    """

    composer: Composer
    task: Statements = field(default_factory=dict)
    program: str = "measure"
    own: str | None = None
    manner: Statements = field(default_factory=dict)

    def of(self, study: str) -> Expander:
        """The expander for the operation that a study's file chooses, unless the command line chooses one."""
        own = self.composer.operation if OPERATION in self.manner else self.composer.operation_of(study)
        return replace(self, composer=composer(self.composer.folders, self.composer.name, own))

    def request(self) -> Request:
        """The request of the point that the command line states."""
        return self.composer.request(self.task)

    def study(self, name: str, fields: Mapping[str, Any]) -> Study:
        """The study with all its points, none of them twice.

        Raises:
            BadInput: naming the part of the study's file, or the setting, that cannot be used.
        """
        named = fields["scenarios"] or {"default": {"title": fields["title"]}}
        statements = {key: _mapping(f"study.scenarios.{key}", own) for key, own in named.items()}
        merged = {key: {**fields["axes"], **_mapping("axes", own.get("axes"))} for key, own in statements.items()}
        axes = {key: {axis: _written_out(entries) for axis, entries in own.items()} for key, own in merged.items()}
        known = {axis for own in axes.values() for axis in own if axis in self.task and _has(own[axis], self.task[axis])}
        scenarios, points, changed = dict[str, Scenario](), list[StudyPoint](), set[str]()
        for key, own in statements.items():
            lacking = {axis for axis in self.task if axis in axes[key] and not _has(axes[key][axis], self.task[axis])}
            if not lacking & {*known, *(own.get("axes") or {})}:
                try:
                    made = self._points(key, own, axes[key], fields["base"])
                except BadInput as error:
                    raise BadInput(error.field, error.value, f"{error.hint} (study {name}, scenario {key})") from None
                if made is not None:
                    points, changed = [*points, *made[0]], changed | made[1] | lacking
                    scenarios[key] = _scenario(key, own)
        settings = [f"{key}={written(value)}" for key, value in (*self.task.items(), *self.manner.items())]
        if not scenarios:
            others = " ".join(text for text in settings[: len(self.task)] if not text.startswith("seeds="))
            hint = "leave that out, or change a copy of the study's file"
            raise BadInput("study", name, f"each of its scenarios is about other settings than {others}; {hint}")
        if not points:
            raise BadInput("study", name, "it has no points; give every axis at least one value")
        folder = ["--config-dir", self.own] if self.own else []
        claims, plot = self._answers(name, fields, axes)
        # Neither another number of replicates nor the choice of one value of an axis makes another point
        overrides = [f"{key}={written(value)}" for key, value in self.task.items() if key in changed and key != "seeds"]
        if OPERATION in self.manner and self.manner[OPERATION] != self.composer.operation_of(name):
            overrides.insert(0, f"{OPERATION}={self.manner[OPERATION]}")
        return Study(
            name=name,
            title=fields["title"],
            figure=fields["figure"],
            claims=claims,
            points=tuple(points),
            more=tuple(fields["more"]),
            command=shlex.join(["numdev", self.program, *folder, f"study={name}", *settings]),
            scenarios=tuple(scenarios.values()),
            overrides=tuple(overrides),
            words={axis: schema.words(axis) for axis in dict.fromkeys(axis for point in points for axis in point.labels)},
            question=fields["question"],
            plot=plot,
            section={name: fields[name] for name in _SECTION if fields[name]},
            left_out=tuple(_scenario(key, own).title for key, own in statements.items() if key not in scenarios),
        )

    def _points(
        self, scenario: str, own: Statements, axes: Mapping[str, Any], base: Statements
    ) -> tuple[list[StudyPoint], set[str]] | None:
        """The points of a scenario, and what the command line changes in them; None where it makes the scenario another."""
        points, changed, settings = dict[str, StudyPoint](), set[str](), {key: own[key] for key in own if key not in _ABOUT}
        task_choices, task_values = self.composer.split(self.task)
        for combination in itertools.product(*(self._entries(axis, values) for axis, values in axes.items())):
            entries = dict(zip(axes, combination, strict=True))
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
                point = build.point(after, scenario, labels)
            except NotHonoured as error:
                point = build.refused_point(after, scenario, labels, str(error))
            roles = {axis: one.role for axis, one in entries.items() if one.role is not EntryRole.SUBJECT}
            points[place] = replace(point, roles=roles)
        return [*points.values()], changed

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

    def _answers(
        self, name: str, fields: Mapping[str, Any], axes: Mapping[str, Mapping[str, Any]]
    ) -> tuple[tuple[str | ClaimStatement, ...], dict[str, Any] | None]:
        """The claims, and what the figure shows, as the file states them; both are checked against axes and metrics."""
        entries, plot = dict[str, list[Any]](), fields["plot"]
        for axis, values in (item for own in axes.values() for item in own.items()):
            every = values if isinstance(values, (list, Mapping)) else [values]
            entries[axis] = [*entries.get(axis, ()), *(one for one in every if one not in entries.get(axis, ()))]
        try:
            check_figures(fields["figures"])
            if not fields["claims"] and plot is None:
                return (), None
            operation = build.operation_of(self.composer.of)
            metrics = build.kind(self.program, operation).comparable
            claims = claims_of(fields["claims"], entries, metrics)
            if plot is None:
                return claims, None
            if fields["figure"] is not None:
                raise BadInput("plot", plot, f"the study names the figure {fields['figure']} too; leave one of them out")
            if operation.golden is None:
                hint = f"{operation.name} has a value for every step and tensor; leave it out, the report draws its own figures"
                raise BadInput("plot", operation.name, hint)
            return claims, plot_of(plot, entries, metrics)
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
    return Expander(composer_of(hydra), task, program, folder, manner)


def _has(entries: Any, value: Any) -> bool:
    return isinstance(entries, list) and value in entries


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


def _scenario(name: str, own: Statements) -> Scenario:
    title = own.get("title", name)
    if not isinstance(title, str) or not title.strip():
        raise BadInput(f"study.scenarios.{name}.title", title, "give it in words, as a reader is to see it")
    role = choice(f"study.scenarios.{name}.role", Role, own.get("role", Role.BEYOND.value))
    return Scenario(name, title, role, str(own.get("stands_for", "")))


def claims_of(claims: Any, axes: Axes, metrics: Collection[str]) -> tuple[str | ClaimStatement, ...]:
    """The claims of a study: a name of one that ships with numdev as it is, and each that the file states.

    Args:
        claims: the field `claims` of the study's file.
        axes: the entries of every axis in any scenario.
        metrics: what there is to compare.

    Raises:
        BadInput: naming the field, as in `claims[1].metric`.
    """
    if not isinstance(claims, (list, tuple)):
        raise BadInput("claims", claims, "give a list of claims")
    made = list[str | ClaimStatement]()
    for i, own in enumerate(claims):
        where = f"claims[{i}]"
        if not isinstance(own, (str, Mapping)):
            known = ", ".join(one.name for one in fields(ClaimStatement))
            raise BadInput(where, own, f"give the fields of a claim, {known}, or the name of one that numdev ships")
        made.append(own if isinstance(own, str) else _claim(where, own, axes, metrics))
    return tuple(made)


def _claim(where: str, own: Mapping[str, Any], axes: Axes, metrics: Collection[str]) -> ClaimStatement:
    claim = make(ClaimStatement, {name: value for name, value in own.items() if value is not None}, where)
    if claim.judge:
        function(f"{where}.judge", claim.judge)
        return claim
    for part, fields_of_part in claim.parts.items():
        for name in set(fields_of_part).difference(_OF_A_PART):
            hint = f"a part of a claim has no such field; {one_of(name, _OF_A_PART)}"
            raise BadInput(f"{where}.parts.{part}.{name}", fields_of_part[name], hint)
    for part, value in claim.values(where).items():
        _check(f"{where}.parts.{part}" if claim.parts else where, value, axes, metrics)
    if not (claim.parts or claim.is_bounded):
        raise BadInput(f"{where}.above", None, "give a number from which on the claim holds; or give below, or both")
    return claim


def _check(where: str, claim: ClaimStatement, axes: Axes, metrics: Collection[str]) -> None:
    """Refuse a claim on one value that names what the study does not have."""
    entries: Axes = {**dict.fromkeys(COLUMNS, ()), **axes}
    if claim.metric not in metrics:
        raise BadInput(f"{where}.metric", claim.metric or None, one_of(claim.metric, metrics, most=12))
    for axis in filter(None, (claim.over, claim.each)):
        if axis not in entries:
            raise BadInput(f"{where}.over", axis, one_of(axis, axes) if axes else "the study has no axes; give it one")
        if claim.kind is ClaimKind.SLOPE and not all(type(one) in (int, float) and one > 0 for one in entries[axis]):
            raise BadInput(f"{where}.over", axis, "a slope is over positive numbers, and its entries are not; give another axis")
    labels: dict[str, Any] = {"where": claim.where, "of": claim.of, "to": claim.to if isinstance(claim.to, Mapping) else {}}
    chosen = [(name, axis, entry) for name, own in labels.items() for axis, entry in own.items()]
    for name, axis, entry in (*chosen, *(("order", claim.over, entry) for entry in claim.order)):
        place = where + (f".{name}" if name == "order" else f".{name}.{axis}")
        if axis not in entries:
            raise BadInput(f"{where}.{name}", axis, f"it is no axis of the study; {one_of(axis, entries)}")
        if isinstance(entry, Mapping):
            choice(f"{place}.role", EntryRole, entry.get("role"))
        elif entries[axis] and entry not in entries[axis]:
            raise BadInput(place, entry, one_of(entry, map(str, entries[axis]), most=12))


def plot_of(plot: Any, axes: Collection[str], metrics: Sequence[str]) -> dict[str, Any]:
    """The parts of a figure by key, each name checked; `colour` and `facet` are lists.

    Args:
        plot: as `x: problem.n, y: out.rmse, colour: precision`, or as a mapping.
        axes: names that a figure can be drawn over, beside those of every study.
        metrics: as `output.metric`.

    Raises:
        BadInput: naming the field, as in `plot.x`.
    """
    try:
        parts: Any = OmegaConf.to_container(OmegaConf.create(f"{{{plot.strip('{}')}}}")) if isinstance(plot, str) else plot
    except Exception:  # whatever the parser of YAML raises
        parts = None
    if not isinstance(parts, Mapping) or None in parts.values():
        raise BadInput("plot", plot, "give it as in x: problem.n, y: out.rmse, colour: precision")
    names = list(dict.fromkeys([*axes, *_OF_POINTS]))
    known = {"y": metrics, "reference": [each.value for each in Reference], **dict.fromkeys(("x", "colour", "facet"), names)}
    for key, value in parts.items():
        if key not in known:
            raise BadInput(f"plot.{key}", value, f"a figure has no such part; {one_of(key, known)}")
        for name in value if isinstance(value, list) else [value]:
            if name not in known[key]:
                raise BadInput(f"plot.{key}", name, one_of(name, known[key], most=12))
    for key in ("x", "y"):
        if key not in parts:
            raise BadInput(f"plot.{key}", None, "name what stands on this axis, as in x: problem.n, y: out.rmse")
    lists = {key: [own] for key in ("colour", "facet") if (own := parts.get(key)) is not None and not isinstance(own, list)}
    return {key: value for key, value in {**parts, **lists}.items() if value != []}


def function(where: str, value: Any) -> None:
    """Refuse what is no name of a function, `module:name`."""
    if not isinstance(value, str) or not _FUNCTION.fullmatch(value):
        raise BadInput(where, value, "give a function as module:name")


def check_figures(figures: Mapping[str, Any]) -> None:
    """Check the figures that a study's file says how to draw, by name.

    Raises:
        BadInput: naming the field, as in `figures.ladder.draw`.
    """
    for name, own in figures.items():
        parts = own if isinstance(own, Mapping) else {"": own}
        for part in set(parts).difference(_DRAWN):
            raise BadInput(f"figures.{name}.{part}", parts[part], f"a figure has no such part; {one_of(part, _DRAWN)}")
        if "draw" in own or "options" not in own:
            function(f"figures.{name}.draw", own.get("draw"))
        if not isinstance(own.get("about"), str):
            raise BadInput(f"figures.{name}.about", own.get("about"), "describe it for those who cannot see it")
