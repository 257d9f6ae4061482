"""From a study's YAML to its points.

    title: Larger tiles make the deviation smaller
    question: Do larger tiles deviate less?   # for the section of the report, as are measured, source, table and place
    plot: "x: tiling.bc, y: out.rmse"   # a figure in words; or `figure` and `more`, names of figures that `figures` here or in
                                        # another study's file says how to draw
    claims:                             # claims of its own (`numdev.results.claim`), and names of those of other studies
      - fig6c
      - {claim: The RMSE falls with Bc, kind: slope, metric: out.rmse, over: tiling.bc, below: -0.1}
    base: {tiling.br: 64}               # common to all points
    scenarios:                          # each point belongs to one; without any there is one, `default`
      uniform_each:
        title: uniform inputs, every step in F, FlashAttention-1   # what a reader sees; the name unless given
        role: assumed                   # paper, assumed, beyond or control (`numdev.results.manifest.Role`); beyond unless given
        problem: uniform
        softmax: fa1
      captured: {problem: captured, axes: {problem.n: [64, 128, 256]}}   # replaces and adds axes
    axes:                               # the grid
      precision: [bf16, fp16]           # a group and its options, or a setting and its values
      tiling.bc: [16, 32, 64]
      step:                             # or names, each with any settings, and with what it is to the claims
        none: {role: control}           # subject, expected, control or aside (`numdev.results.manifest.EntryRole`)
        scores: {precision.scores: bf16}
        values: {precision.values: bf16}

Later statements override earlier ones, in this order: the defaults of `config.yaml`, `base`, the scenario, options chosen on an
axis or the command line, values of an axis, values on the command line. Choosing an option of a group states the contents of its
file. If the command line sets an axis, only that value of the axis is kept. All of these except the defaults are explicit, unless
they are null: a point whose variant does not read one of them is not measured, but recorded as unsupported. So is a point whose
label would be wrong because the command line overrides what an entry of the axis states.

The command line leaves out scenarios that it contradicts (`numdev.cli.contradicted`).
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from numdev.cli import build, schema
from numdev.cli.claims import Comparable, claims_of
from numdev.cli.comparable import comparable
from numdev.cli.composed import Composer, composer
from numdev.cli.contradicted import left, settings_of
from numdev.cli.layers import Ground, Layers
from numdev.cli.library import OPERATION, Library
from numdev.cli.plots import figures_of, function, plot_of
from numdev.cli.requests import Flat, Request, Statement, written
from numdev.cli.runners import operation_of
from numdev.cli.statements import Entry, Statements, entry_of, mapping, scenario_of
from numdev.errors import BadInput, NotHonoured
from numdev.results.claim import ClaimStatement
from numdev.results.manifest import EntryRole
from numdev.results.study import Study, StudyPoint

_SECTION = ("place", "measured", "source", "table", "figures")
"""Fields of a study's file that the report alone reads."""


@dataclass(frozen=True)
class _Place:
    """An entry of an axis, with what it states and why its label would be wrong, computed once for all its points."""

    entry: Entry
    choices: Statements
    values: Statements
    deny: Callable[[], NotHonoured | None]

    @cached_property
    def denied(self) -> NotHonoured | None:
        return self.deny()


@dataclass
class Expander:
    """Makes points from statements.

    Attributes:
        library: where options of groups are found.
        task: what the command line states about points; it overrides everything else.
        program: the command that runs the studies, for the command line that reproduces them.
        own: the config folder that the command line adds, for the same command line.
        manner: what the command line states about how, not which, points are measured; for the same command line too.
        name: name of the primary file.
        operation: the option of `operation` of all points; None for that of the primary file.
    """

    library: Library
    task: Statements = field(default_factory=dict)
    program: str = "measure"
    own: str | None = None
    manner: Statements = field(default_factory=dict)
    name: str = "config"
    operation: str | None = None

    @cached_property
    def composer(self) -> Composer:
        """Composes the options by Hydra."""
        return composer(self.library.folders, self.name, self.operation)

    def of(self, study: str) -> Expander:
        """The expander for the operation that a study's file chooses, unless the command line chooses one."""
        own = None if OPERATION in self.manner else self.library.operation_of(study)
        return self if own in (None, self.operation) else replace(self, operation=own)

    @property
    def groups(self) -> Mapping[str, str]:
        """The groups of a point, with their default options."""
        return self.composer.choices

    def study(self, name: str, fields: Mapping[str, Any]) -> Study:
        """The study with all its points, none of them twice.

        Raises:
            BadInput: naming the part of the study's file, or the setting, that cannot be used.
        """
        every = {key: mapping(f"study.scenarios.{key}", own) for key, own in self._named(fields).items()}
        stated = left(name, every, fields, self.layers, self.task)
        scenarios = tuple(scenario_of(key, own) for key, own in stated.items())
        points = self._points(name, stated, fields)
        if not points:
            raise BadInput("study", name, "it has no points; give every axis at least one value")
        claims, plot = self._answers(name, fields)
        return Study(
            name,
            fields["title"],
            fields["figure"],
            claims,
            points,
            tuple(fields["more"]),
            self._command(name),
            scenarios,
            self._overrides(name, stated, fields, points),
            {axis: schema.words(axis) for axis in dict.fromkeys(axis for point in points for axis in point.labels)},
            fields["question"],
            plot,
            {name: fields[name] for name in _SECTION if fields[name]},
            tuple(scenario_of(key, own).title for key, own in every.items() if key not in stated),
        )

    @staticmethod
    def _named(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """A study's scenarios; a study that states none has a single one."""
        return fields["scenarios"] or {"default": {"title": fields["title"]}}

    def axes(self, fields: Mapping[str, Any]) -> dict[str, list[Any]]:
        """The axes of a study with their entries, those of any scenario."""
        axes: dict[str, list[Any]] = {}
        for key, own in self._named(fields).items():
            stated = mapping(f"study.scenarios.{key}", own)
            for axis, values in (fields["axes"] | mapping("axes", stated.get("axes"))).items():
                known = axes.setdefault(axis, [])
                known += [entry for entry in (values if isinstance(values, (list, Mapping)) else [values]) if entry not in known]
        return axes

    def _answers(self, name: str, fields: Mapping[str, Any]) -> tuple[tuple[str | ClaimStatement, ...], dict[str, Any] | None]:
        """The claims, and what the figure shows, as the file states them; both are checked against axes and metrics."""
        axes = self.axes(fields)
        try:
            claims = claims_of(fields["claims"], axes, self._comparable)
            figures_of(fields["figures"])
            if fields["table"]:
                function("table", fields["table"])
            if fields["plot"] is not None and fields["figure"] is not None:
                raise BadInput(
                    "plot", fields["plot"], f"the study names the figure {fields['figure']} too; leave one of them out"
                )
            return claims, None if fields["plot"] is None else plot_of(fields["plot"], axes, self._figures)
        except BadInput as error:
            raise BadInput(error.field, error.value, f"{error.mend} (study {name})") from None

    def _comparable(self) -> Comparable:
        """What a claim may compare."""
        return comparable(self.program, operation_of(self.composer.of))

    def _figures(self) -> list[str]:
        """What a figure may show.

        Raises:
            BadInput: for an operation without an exact result.
        """
        operation = operation_of(self.composer.of)
        if operation.golden is None:
            mend = f"a plot in YAML has one value for each point and replicate, and {operation.name} has one for every step and "
            raise BadInput("plot", operation.name, f"{mend}tensor; leave it out, the report draws its own figures")
        return list(comparable(self.program, operation).figures)

    def _points(self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any]) -> tuple[StudyPoint, ...]:
        points: dict[str, StudyPoint] = {}
        for scenario, own in scenarios.items():
            try:
                for entries, request, denied in self._grid(own, fields):
                    labels = {axis: entry.label for axis, entry in entries.items()}
                    place = json.dumps([scenario, labels], sort_keys=True)  # identifies what the entries state
                    if place not in points:
                        roles = {axis: entry.role for axis, entry in entries.items() if entry.role is not EntryRole.SUBJECT}
                        points[place] = replace(_point(request, scenario, labels, denied), roles=roles)
            except BadInput as error:
                raise BadInput(error.field, error.value, f"{error.mend} (study {name}, scenario {scenario})") from None
        return tuple(points.values())

    def _overrides(
        self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any], points: tuple[StudyPoint, ...]
    ) -> tuple[str, ...]:
        """What the command line states, if that makes a point that the study's file alone does not have.

        Neither another number of replicates nor the choice of one value of an axis makes another point.
        """
        of = {key: value for key, value in self.manner.items() if key == OPERATION}
        stated = tuple(f"{key}={written(value)}" for key, value in {**of, **self.task}.items() if key != "seeds")
        if not stated:
            return ()
        usual = replace(self, task={}, manner={}, operation=None if of else self.operation).of(name)
        try:
            plain = usual._points(name, scenarios, fields)
        except BadInput:  # the file alone makes no study
            return stated
        own = {(point.scenario, point.problem, point.variant, point.baseline) for point in plain}
        return stated if any((p.scenario, p.problem, p.variant, p.baseline) not in own for p in points) else ()

    @cached_property
    def layers(self) -> Layers:
        """Reads what is stated."""
        return Layers(self.library, self.composer)

    def request(self, *layers: Statements) -> Request:
        """The whole configuration after all layers, each above the one before it, and what the layers state of it."""
        return self.layers.above(self.layers.ground(*layers))

    def said(self, settings: Flat, *layers: Statements) -> dict[str, Statement]:
        """See `Layers.said`."""
        return self.layers.said(settings, *layers)

    def _command(self, name: str) -> str:
        """The command line that states `task` and `manner`."""
        stated = [f"{key}={written(value)}" for key, value in (*self.task.items(), *self.manner.items())]
        folder = ["--config-dir", self.own] if self.own else []
        return shlex.join(["numdev", self.program, *folder, f"study={name}", *stated])

    def _grid(self, own: Statements, fields: Mapping[str, Any]) -> Iterator[tuple[dict[str, Entry], Request, NotHonoured | None]]:
        """For each point of a scenario: its entries by axis, its request, and why a label would be wrong, if it would."""
        merged = fields["axes"] | mapping("axes", own.get("axes"))
        layer = settings_of(own)
        self.layers.check_replaced(self.task)
        task_choices, task_values = self.layers.split(self.task)
        axes = {key: [self._place(key, entry) for entry in self._axis(key, values)] for key, values in merged.items()}
        grounds: dict[str, Ground] = {}  # by the options that entries choose: a grid of values has one
        for combination in itertools.product(*axes.values()):
            places = dict(zip(axes, combination, strict=True))
            choices = {group: option for place in combination for group, option in place.choices.items()}
            values = {key: value for place in combination for key, value in place.values.items()}
            denied = next((error for place in combination if (error := place.denied) is not None), None)
            if (chosen := repr(choices)) not in grounds:
                grounds[chosen] = self.layers.ground(fields["base"], layer, choices | task_choices)
            entries = {axis: place.entry for axis, place in places.items()}
            yield entries, self.layers.above(grounds[chosen], values, task_values), denied

    def _place(self, axis: str, entry: Entry) -> _Place:
        choices, values = self.layers.split(entry.statements)
        return _Place(entry, choices, values, lambda: self._denied(axis, entry))

    def _denied(self, axis: str, entry: Entry) -> NotHonoured | None:
        """The reason why a label of an axis would be wrong: the command line overrides what the label stands for."""
        stands_for = self.layers.stands_for(entry.statements)
        for key, value in self.task.items():
            if stands_for.get(key) is not None and self.layers.typed(key, stands_for[key]) != self.layers.typed(key, value):
                mend = f"the points {axis}={written(entry.label)} stand for {key}={written(stands_for[key])}; leave it out"
                return NotHonoured(key, value, mend)
        return None

    def _axis(self, key: str, values: Any) -> list[Entry]:
        """The values of an axis with what they state; only the command line's where it names the axis."""
        if key in self.task:
            values = [self.task[key]]
        if isinstance(values, Mapping):
            return [entry_of(f"axes.{key}.{name}", name, mapping(f"axes.{key}.{name}", own)) for name, own in values.items()]
        if not isinstance(values, list):
            raise BadInput(f"axes.{key}", values, "give a list of values, or names with their settings")
        return [Entry(value, {key: value}) for value in values]


def _point(request: Request, scenario: str, labels: Mapping[str, Any], denied: NotHonoured | None) -> StudyPoint:
    """The point; it will be recorded as unsupported if it cannot honour something that is stated."""
    try:
        if denied is not None:
            raise denied
        return build.point(request, scenario, labels)
    except NotHonoured as error:
        return build.refused_point(request, scenario, labels, str(error))
