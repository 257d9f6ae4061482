"""From a study's YAML to its points.

A study has `base`, settings common to all points; `axes`, the grid: a group and its options, a setting and its values, or names,
each with any settings and with a `role`; and `scenarios`, each with a title, a role, settings of its own, and axes that replace
or add some. `docs/how-to/add-study.md` shows one.

Later statements override earlier ones, in this order: the defaults of `config.yaml`, `base`, the scenario, options chosen on an
axis or the command line, values of an axis, values on the command line. Choosing an option of a group states the contents of its
file. If the command line sets an axis, only that value of the axis is kept. All of these except the defaults are explicit, unless
they are null: a point whose variant does not read one of them is not measured, but recorded as unsupported. So is a point whose
label would be wrong because the command line overrides what an entry of the axis states.

The command line leaves out a scenario that it would make into another: one that states another value of a setting, itself or by
the file of an option, and one without the value of an axis that other scenarios have, or, where none has it, that states the axis
itself. The study is refused where no scenario is left. `seeds` changes no scenario.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from numdev.cli import build, schema
from numdev.cli.claims import check_figures, claims_of, function, mapping, plot_of
from numdev.cli.compose import (
    OPERATION,
    Composer,
    Statements,
    composer,
    flat,
    groups_of_points,
    overrides_of,
    plain,
    written,
)
from numdev.cli.runners import comparable, operation_of
from numdev.errors import BadInput, NotHonoured
from numdev.results.claim import ClaimStatement
from numdev.results.manifest import EntryRole, Role, Scenario
from numdev.results.study import Study, StudyPoint
from numdev.settings import choice

_ABOUT = ("axes", "title", "role", "stands_for")  # of a scenario, and no setting of its points
_MANNER = (OPERATION, "timing")  # of what, and how, a point is measured
_OF_RUN = ("study", "studies", "device", "results", "fresh", "shard", "shards", "workers", "out", "objective", "metrics")
_OF_OTHERS = ("dry_run", "plot", "output", "head", "seed", "subject", "reference", "format")  # of a figure, and of numdev map
_SECTION = ("place", "measured", "source", "table", "figures")  # fields of a study's file that the report alone reads


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
        own = None if OPERATION in self.manner else self.composer.operation_of(study)
        if own in (None, self.composer.operation):
            return self
        return replace(self, composer=composer(self.composer.folders, self.composer.name, own))

    def study(self, name: str, fields: Mapping[str, Any]) -> Study:
        """The study with all its points, none of them twice.

        Raises:
            BadInput: naming the part of the study's file, or the setting, that cannot be used.
        """
        every = _scenarios(fields)
        kept = self._kept(name, every, fields)
        points = self._points(name, kept, fields)
        if not points:
            raise BadInput("study", name, "it has no points; give every axis at least one value")
        claims, plot = self._answers(name, fields)
        settings = [f"{key}={written(value)}" for key, value in (*self.task.items(), *self.manner.items())]
        folder = ["--config-dir", self.own] if self.own else []
        return Study(
            name=name,
            title=fields["title"],
            figure=fields["figure"],
            claims=claims,
            points=points,
            more=tuple(fields["more"]),
            command=shlex.join(["numdev", self.program, *folder, f"study={name}", *settings]),
            scenarios=tuple(_scenario(key, own) for key, own in kept.items()),
            overrides=tuple(self._overrides(name, kept, fields)),
            words={axis: schema.words(axis) for axis in dict.fromkeys(axis for point in points for axis in point.labels)},
            question=fields["question"],
            plot=plot,
            section={name: fields[name] for name in _SECTION if fields[name]},
            left_out=tuple(_scenario(key, own).title for key, own in every.items() if key not in kept),
        )

    def axes(self, fields: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The axes of a study with their entries, those of any scenario."""
        axes: dict[str, list[Any]] = {}
        for own in _scenarios(fields).values():
            for axis, values in _axes(fields, own).items():
                entries = axes.setdefault(axis, [])
                entries += [one for one in (values if isinstance(values, (list, Mapping)) else [values]) if one not in entries]
        return axes

    def _answers(self, name: str, fields: Mapping[str, Any]) -> tuple[tuple[str | ClaimStatement, ...], dict[str, Any] | None]:
        """The claims, and what the figure shows, as the file states them; both are checked against axes and metrics."""
        axes, plot = self.axes(fields), fields["plot"]
        try:
            check_figures(fields["figures"])
            if fields["table"]:
                function("table", fields["table"])
            if not fields["claims"] and plot is None:
                return (), None
            operation = operation_of(self.composer.of)
            metrics = comparable(self.program, operation)
            claims = claims_of(fields["claims"], axes, metrics)
            if plot is None:
                return claims, None
            if fields["figure"] is not None:
                raise BadInput("plot", plot, f"the study names the figure {fields['figure']} too; leave one of them out")
            if operation.golden is None:
                hint = f"{operation.name} has a value for every step and tensor; leave it out, the report draws its own figures"
                raise BadInput("plot", operation.name, hint)
            return claims, plot_of(plot, axes, metrics)
        except BadInput as error:
            raise BadInput(error.field, error.value, f"{error.hint} (study {name})") from None

    def _kept(self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any]) -> dict[str, Statements]:
        """The scenarios that the command line does not make into others.

        Raises:
            BadInput: if there are none.
        """
        task = {key: value for key, value in self.task.items() if key != "seeds"}
        axes = {one: _axes(fields, own) for one, own in scenarios.items()}
        of_axes = {key for key, value in task.items() if any(_has(each.get(key), value) for each in axes.values())}

        def stays(one: str, own: Statements) -> bool:
            swept, of_its_own, layers = axes[one], own.get("axes") or {}, (fields["base"], _settings(own))
            if any(not _has(swept[key], task[key]) if key in of_axes else key in of_its_own for key in task if key in swept):
                return False
            others = {key: value for key, value in task.items() if key not in swept}
            before, after = (self.composer.request(*layers, more).raw for more in ({}, others))
            stated = (key for key, value in self.composer.stands_for(layers[1]).items() if value is not None and key in before)
            return all(key in after and after[key] == before[key] for key in stated)

        kept = {one: own for one, own in scenarios.items() if not task or stays(one, own)}
        if not kept:
            overrides = " ".join(f"{key}={written(value)}" for key, value in task.items())
            hint = "leave that out, or change a copy of the study's file"
            raise BadInput("study", name, f"each of its scenarios is about other settings than {overrides}; {hint}")
        return kept

    def _points(self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any]) -> tuple[StudyPoint, ...]:
        points: dict[str, StudyPoint] = {}
        for scenario, own in scenarios.items():
            try:
                axes = {key: self._axis(key, values) for key, values in _axes(fields, own).items()}
                for combination in itertools.product(*axes.values()):
                    entries = dict(zip(axes, combination, strict=True))
                    labels = {axis: entry.label for axis, entry in entries.items()}
                    place = json.dumps([scenario, labels], sort_keys=True)  # identifies what the entries state
                    if place not in points:
                        points[place] = self._point(scenario, labels, entries, (fields["base"], _settings(own)))
            except BadInput as error:
                raise BadInput(error.field, error.value, f"{error.hint} (study {name}, scenario {scenario})") from None
        return tuple(points.values())

    def _axis(self, key: str, values: Any) -> list[Entry]:
        """The values of an axis with what they state; only the command line's where it names the axis."""
        if key in self.task:
            values = [self.task[key]]
        if isinstance(values, list):
            return [Entry(value, {key: value}) for value in values]
        if not isinstance(values, Mapping):
            raise BadInput(f"axes.{key}", values, "give a list of values, or names with their settings")
        named = {name: dict(mapping(f"axes.{key}.{name}", own)) for name, own in values.items()}
        roles = {name: own.pop("role", EntryRole.SUBJECT.value) for name, own in named.items()}
        return [Entry(name, own, choice(f"axes.{key}.{name}.role", EntryRole, roles[name])) for name, own in named.items()]

    def _point(
        self, scenario: str, labels: Mapping[str, Any], entries: Mapping[str, Entry], below: tuple[Statements, Statements]
    ) -> StudyPoint:
        """The point; it is recorded as unsupported if it cannot honour something that is stated."""
        parts = [self.composer.split(entry.statements) for entry in entries.values()]
        choices, values = ({key: value for part in parts for key, value in part[i].items()} for i in (0, 1))
        task_choices, task_values = self.composer.split(self.task)
        request = self.composer.request(*below, choices | task_choices, values, task_values)
        try:
            for axis, entry in entries.items():
                self._check_label(axis, entry)
            point = build.point(request, scenario, labels)
        except NotHonoured as error:
            point = build.refused_point(request, scenario, labels, str(error))
        return replace(point, roles={axis: one.role for axis, one in entries.items() if one.role is not EntryRole.SUBJECT})

    def _check_label(self, axis: str, entry: Entry) -> None:
        """Raise NotHonoured for a label that would be wrong, since the command line overrides what the label stands for."""
        stands_for = self.composer.stands_for(entry.statements)
        for key, value in self.task.items():
            if stands_for.get(key, value) not in (None, value):
                hint = f"the points {axis}={written(entry.label)} stand for {key}={written(stands_for[key])}; leave it out"
                raise NotHonoured(key, value, hint)

    def _overrides(self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any]) -> Iterator[str]:
        """The overrides of the command line that make points which the study's file alone does not have.

        Neither another number of replicates nor the choice of one value of an axis makes another point.
        """
        usual = self.composer.operation_of(name) or composer(self.composer.folders, self.composer.name).own_operation
        if self.manner.get(OPERATION, usual) != usual:
            yield f"{OPERATION}={self.manner[OPERATION]}"
        requests = [(_axes(fields, own), self.composer.request(fields["base"], _settings(own))) for own in scenarios.values()]
        for key, value in self.task.items():
            own = (_has(axes[key], value) if key in axes else {**r.raw, **r.options}.get(key) == value for axes, r in requests)
            if key != "seeds" and not all(own):
                yield f"{key}={written(value)}"


def expander(hydra: Any, cfg: DictConfig, program: str = "measure") -> Expander:
    """An expander over the config folders of this run, with what its command line states of a point.

    `hydra` is Hydra's own part of the configuration; `program` see `Expander`.
    """
    runtime, overrides = hydra.runtime, OverridesParser.create().parse_overrides(overrides_of(hydra))
    folders = tuple(Path(source.path) for source in runtime.config_sources if source.schema == "file")
    of_point = [str(key) for key in cfg if key not in (*_MANNER, *_OF_RUN, *_OF_OTHERS)]
    groups, settings = (OPERATION, *groups_of_points(runtime.choices)), plain(cfg)

    def explicit(names: Sequence[str]) -> dict[str, Any]:
        """The options and values of some settings that overrides give explicitly, as Hydra composed them."""
        statements: dict[str, Any] = {}
        for key, package in ((override.key_or_group, override.package) for override in overrides):
            if key in names and key in groups and package is None and isinstance(runtime.choices.get(key), str):
                statements[key] = runtime.choices[key]
            elif key.partition(".")[0] in names:
                statements |= dict(flat({key: build.at(settings, key)}))
        return statements

    own = next((Path(source.path) for source in runtime.config_sources if source.provider == "command-line"), None)
    folder = None if own is None else str(own.relative_to(runtime.cwd) if own.is_relative_to(runtime.cwd) else own)
    known = composer(folders, hydra.job.config_name, runtime.choices.get(OPERATION))
    return Expander(known, explicit(of_point), program, folder, explicit(_MANNER))


def _has(entries: Any, value: Any) -> bool:
    return isinstance(entries, list) and value in entries


def _scenarios(fields: Mapping[str, Any]) -> dict[str, Statements]:
    """A study's scenarios; a study that states none has a single one."""
    named = fields["scenarios"] or {"default": {"title": fields["title"]}}
    return {key: mapping(f"study.scenarios.{key}", own) for key, own in named.items()}


def _axes(fields: Mapping[str, Any], scenario: Statements) -> dict[str, Any]:
    return {**fields["axes"], **mapping("axes", scenario.get("axes"))}


def _settings(scenario: Statements) -> Statements:
    """The settings that a scenario states of its points."""
    return {key: value for key, value in scenario.items() if key not in _ABOUT}


def _scenario(name: str, own: Statements) -> Scenario:
    title = own.get("title", name)
    if not isinstance(title, str) or not title.strip():
        raise BadInput(f"study.scenarios.{name}.title", title, "give it in words, as a reader is to see it")
    role = choice(f"study.scenarios.{name}.role", Role, own.get("role", Role.BEYOND.value))
    return Scenario(name, title, role, str(own.get("stands_for", "")))
