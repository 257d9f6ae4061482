"""From a study's YAML to its points.

    title: Larger tiles make the deviation smaller
    figure: fig6c                       # a figure function, or null
    more: [rescales]                    # further figures of the same rows
    claims: [fig6c]
    base: {tiling.br: 64}               # common to all points
    scenarios:                          # each point belongs to one; without any there is one, `default`
      uniform_each:
        title: uniform inputs, every step in F, FlashAttention-1   # what a reader sees; the name unless given
        role: assumed                   # paper, assumed, beyond or control (`numdev.results.scenario.Role`); beyond unless given
        problem: uniform
        softmax: fa1
      captured: {problem: captured, axes: {problem.n: [64, 128, 256]}}   # replaces and adds axes
    axes:                               # the grid
      precision: [bf16, fp16]           # a group and its options, or a setting and its values
      tiling.bc: [16, 32, 64]
      step:                             # or names, each with any settings, and with what it is to the claims
        none: {role: control}           # subject, expected, control or aside (`numdev.results.scenario.EntryRole`)
        scores: {precision.scores: bf16}
        values: {precision.values: bf16}

The later of two statements holds: the defaults of `config.yaml`, `base`, the scenario, options chosen on an axis or the command
line, values of an axis, values on the command line. An option of a group states what stands in its file. What the command
line says of an axis leaves that one value of it. All of these but the defaults are explicit, unless they are null: a point
whose variant does not honour one of them is not measured, but recorded as unsupported. So is a point whose label would not be
true, because the command line states otherwise what an entry of an axis states.
"""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from numdev.cli import build
from numdev.cli.library import Library
from numdev.cli.schema import GROUPS
from numdev.cli.settings import Flat, Request, Statement, Types, flat, nested, resolved, written
from numdev.errors import BadInput, NotHonoured
from numdev.results.scenario import EntryRole, Role, Scenario
from numdev.results.study import Study, StudyPoint

Statements = Mapping[str, Any]  # a group and its option, or a dotted setting and its value


class Entry(NamedTuple):
    """One value of an axis: its label, what it states, and what it is to the claims."""

    label: Any
    statements: Statements
    role: EntryRole = EntryRole.SUBJECT


_OF_SCENARIO = ("title", "role", "stands_for")
_ELSEWHERE = ("device", "results", "fresh")  # of the run, not of a point


@dataclass
class Expander:
    """Points from statements.

    Attributes:
        library: where options of groups are read.
        task: what the command line states; it stands above everything else.
        program: the command that runs the studies, as they are told to be run again.
        own: the config folder that the command line adds, as `--config-dir` takes it again.
        manner: what the command line states of how points are measured, not of which; it is told again too.
    """

    library: Library
    task: Statements = field(default_factory=dict)
    program: str = "measure"
    own: str | None = None
    manner: Statements = field(default_factory=dict)
    _types: Types = field(default_factory=Types)

    def study(self, name: str, fields: Mapping[str, Any]) -> Study:
        """The study with all its points, none of them twice.

        Raises:
            BadInput: naming the part of the study's file, or the setting, that cannot be used.
        """
        stated = {key: _mapping(f"study.scenarios.{key}", own) for key, own in self._named(fields).items()}
        scenarios = tuple(_scenario(key, own) for key, own in stated.items())
        points = self._points(name, stated, fields)
        if not points:
            raise BadInput("study", name, "it has no points; give every axis at least one value")
        return Study(
            name,
            fields["title"],
            fields["figure"],
            tuple(fields["claims"]),
            points,
            tuple(fields["more"]),
            self._command(name),
            scenarios,
            self._overrides(name, stated, fields, points),
        )

    @staticmethod
    def _named(fields: Mapping[str, Any]) -> Mapping[str, Any]:
        """A study's scenarios; one that states none has a single one, which is called as the study is."""
        return fields["scenarios"] or {"default": {"title": fields["title"]}}

    def _points(self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any]) -> tuple[StudyPoint, ...]:
        points: dict[str, StudyPoint] = {}
        for scenario, own in scenarios.items():
            try:
                for entries, request, denied in self._grid(own, fields):
                    labels = {axis: entry.label for axis, entry in entries.items()}
                    roles = {axis: entry.role for axis, entry in entries.items() if entry.role is not EntryRole.SUBJECT}
                    key = json.dumps([scenario, labels, request.config], sort_keys=True)
                    points.setdefault(key, replace(_point(request, scenario, labels, denied), roles=roles))
            except BadInput as error:
                raise BadInput(error.field, error.value, f"{error.mend} (study {name}, scenario {scenario})") from None
        return tuple(points.values())

    def _overrides(
        self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any], points: tuple[StudyPoint, ...]
    ) -> tuple[str, ...]:
        """What the command line states, if that makes a point which the study's file alone does not have.

        Another number of replicates is no other point, nor is one value of an axis.
        """
        stated = tuple(f"{key}={written(value)}" for key, value in self.task.items() if key != "seeds")
        if not stated:
            return ()
        try:
            plain = Expander(self.library)._points(name, scenarios, fields)
        except BadInput:  # the file alone makes no study
            return stated
        own = {(point.scenario, point.problem, point.variant, point.baseline) for point in plain}
        return stated if any((p.scenario, p.problem, p.variant, p.baseline) not in own for p in points) else ()

    def request(self, *layers: Statements) -> Request:
        """The whole configuration after all layers, each above the one before it, and what the layers state of it."""
        chosen = {group for layer in layers for group in layer}
        settings = dict(self._defaults)
        for group, option in self.library.default_choices().items():
            if group in GROUPS and group not in chosen:
                self._state(settings, {group: self._leaf(group, option)})
        for statements, _ in self._stated(layers):
            self._state(settings, statements)
        settings = resolved(settings)
        return Request(nested(settings), self.said(settings, *layers))

    def said(self, settings: Flat, *layers: Statements) -> dict[str, Statement]:
        """What states each setting that the layers give, where it is not null in the end."""
        said: dict[str, Statement] = {}
        for statements, option in self._stated(layers):
            said |= {key: option or Statement(key, value) for key, value in flat(statements)}
        return {key: statement for key, statement in said.items() if settings.get(key) is not None}

    def _stated(self, layers: Sequence[Statements]) -> Iterator[tuple[Statements, Statement | None]]:
        """Every statement in the order in which they hold; that of an option's file with the option, of which the last counts."""
        last = {group: i for i, layer in enumerate(layers) for group in layer if group in GROUPS}
        for i, layer in enumerate(layers):
            choices, values = _split(layer)
            for group, option in choices.items():
                if last[group] == i:
                    yield {group: self._leaf(group, option)}, Statement(group, option)
            yield values, None

    def _command(self, name: str) -> str:
        """The command line that states what `task` and `manner` do."""
        stated = [f"{key}={written(value)}" for key, value in (*self.task.items(), *self.manner.items())]
        folder = ["--config-dir", self.own] if self.own else []
        return shlex.join(["numdev", self.program, *folder, f"study={name}", *stated])

    def _grid(self, own: Statements, fields: Mapping[str, Any]) -> Iterator[tuple[dict[str, Entry], Request, NotHonoured | None]]:
        """Entries of each point of one scenario by axis, what is asked for, and whether the command line denies a label."""
        merged = fields["axes"] | _mapping("axes", own.get("axes"))
        layer = {key: value for key, value in own.items() if key not in ("axes", *_OF_SCENARIO)}
        task_choices, task_values = _split(self.task)
        axes = {key: self._axis(key, values) for key, values in merged.items()}
        for combination in itertools.product(*axes.values()):
            entries = dict(zip(axes, combination, strict=True))
            choices, values = _split({key: value for entry in combination for key, value in entry.statements.items()})
            found = (self._denied(axis, entry) for axis, entry in entries.items())
            denied = next((error for error in found if error is not None), None)
            yield entries, self.request(fields["base"], layer, choices | task_choices, values, task_values), denied

    def _denied(self, axis: str, entry: Entry) -> NotHonoured | None:
        """Why a label of an axis would not be true: the command line states otherwise what the label stands for."""
        choices, values = _split(entry.statements)
        stands_for = {key: value for group, option in choices.items() for key, value in flat({group: self._leaf(group, option)})}
        stands_for |= choices | dict(flat(values))
        for key, value in self.task.items():
            if stands_for.get(key) is not None and self._typed(key, stands_for[key]) != self._typed(key, value):
                mend = f"the points {axis}={written(entry.label)} stand for {key}={written(stands_for[key])}; leave it out"
                return NotHonoured(key, value, mend)
        return None

    def _typed(self, key: str, value: Any) -> Any:
        return value if key in GROUPS else self._types.check(key, value)

    def _axis(self, key: str, values: Any) -> list[Entry]:
        """The values of an axis with what they state; only the command line's where it names the axis."""
        if key in self.task:
            values = [self.task[key]]
        if isinstance(values, Mapping):
            return [_entry(f"axes.{key}.{name}", name, _mapping(f"axes.{key}.{name}", own)) for name, own in values.items()]
        if not isinstance(values, list):
            raise BadInput(f"axes.{key}", values, "give a list of values, or names with their settings")
        return [Entry(value, {key: value}) for value in values]

    def _leaf(self, group: str, option: Any) -> Statements:
        if isinstance(option, (Mapping, list)):
            raise BadInput(group, option, f"give one of its options, and its settings with dots, as in {group}.name: value")
        return self.library.leaf(group, str(option))

    def _state(self, settings: Flat, statements: Statements) -> None:
        for key, value in flat(statements):
            if key in _ELSEWHERE:
                raise BadInput(key, value, "it belongs to the run, not to a point of a study; give it on the command line")
            settings[key] = self._types.check(key, value)

    @cached_property
    def _defaults(self) -> Flat:
        root = self.library.root()
        return dict(flat({key: root[key] for key in (*GROUPS, "seeds")}))


def _point(request: Request, scenario: str, labels: Mapping[str, Any], denied: NotHonoured | None) -> StudyPoint:
    """The point; one that is recorded as unsupported where something is stated that it cannot honour."""
    try:
        if denied is not None:
            raise denied
        return build.point(request, scenario, labels)
    except NotHonoured as error:
        return build.refused_point(request, scenario, labels, str(error))


def _scenario(name: str, own: Statements) -> Scenario:
    title = own.get("title", name)
    if not isinstance(title, str) or not title.strip():
        raise BadInput(f"study.scenarios.{name}.title", title, "give it in words, as a reader is to see it")
    role = build.choice(f"study.scenarios.{name}.role", Role, own.get("role", Role.BEYOND.value))
    return Scenario(name, title, role, str(own.get("stands_for", "")))


def _entry(where: str, name: str, own: Statements) -> Entry:
    role = build.choice(f"{where}.role", EntryRole, own.get("role", EntryRole.SUBJECT.value))
    return Entry(name, {key: value for key, value in own.items() if key != "role"}, role)


def _split(statements: Statements) -> tuple[dict[str, Any], dict[str, Any]]:
    """Options of groups, and values."""
    choices = {key: value for key, value in statements.items() if key in GROUPS}
    return choices, {key: value for key, value in statements.items() if key not in GROUPS}


def _mapping(where: str, value: Any) -> Statements:
    """Settings with their values; nothing at all states nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise BadInput(where, value, "give settings with their values, {setting: value}")
    return value
