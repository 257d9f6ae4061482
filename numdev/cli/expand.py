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
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from numdev.cli import build, nodes
from numdev.cli.composed import Composer, composer
from numdev.cli.library import OPERATION, Library
from numdev.cli.nodes import TARGET
from numdev.cli.requests import Flat, Request, Statement, changed, flat, request, written
from numdev.cli.statements import Entry, Statements, entry_of, mapping, scenario_of
from numdev.errors import BadInput, NotHonoured
from numdev.nearest import one_of
from numdev.results.scenario import EntryRole
from numdev.results.study import Study, StudyPoint

_OF_SCENARIO = ("title", "role", "stands_for")
_ELSEWHERE = ("device", "results", "fresh")  # of the run, not of a point


@dataclass(frozen=True)
class Ground:
    """What the points of a grid have in common that differ in values alone.

    Attributes:
        settings: every setting of the options chosen, with the values that are stated.
        said: what states each of these.
        foreign: what is stated that the options do not have, with the reason.
        chosen: the option of each group of which one is chosen.
        options: that of every group.
    """

    settings: Flat
    said: dict[str, Statement]
    foreign: dict[str, NotHonoured]
    chosen: Mapping[str, str]
    options: Mapping[str, str]

    @cached_property
    def request(self) -> Request | None:
        """What the points share; None where a reference leads nowhere, unless a value takes its place."""
        try:
            return request(self.settings, self.said, self.options)
        except BadInput:
            return None


@dataclass(frozen=True)
class _Place:
    """An entry of an axis, and once for all its points: what it states, and why its label would not be true."""

    entry: Entry
    choices: Statements
    values: Statements
    deny: Callable[[], NotHonoured | None]

    @cached_property
    def denied(self) -> NotHonoured | None:
        return self.deny()


@dataclass
class Expander:
    """Points from statements.

    Attributes:
        library: where options of groups are found.
        task: what the command line states; it stands above everything else.
        program: the command that runs the studies, as they are told to be run again.
        own: the config folder that the command line adds, as `--config-dir` takes it again.
        manner: what the command line states of how points are measured, not of which; it is told again too.
        name: of the primary file.
        operation: the option of `operation` that all points are of; None for that of the primary file.
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
        """What Hydra makes of the options."""
        return composer(self.library.folders, self.name, self.operation)

    def of(self, study: str) -> Expander:
        """The same for the operation that a study's file chooses, unless the command line does."""
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
        stated = {key: mapping(f"study.scenarios.{key}", own) for key, own in self._named(fields).items()}
        scenarios = tuple(scenario_of(key, own) for key, own in stated.items())
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
        made = nodes.Made()
        for scenario, own in scenarios.items():
            try:
                for entries, request, denied in self._grid(own, fields):
                    labels = {axis: entry.label for axis, entry in entries.items()}
                    place = json.dumps([scenario, labels], sort_keys=True)  # which says what the entries state
                    if place not in points:
                        roles = {axis: entry.role for axis, entry in entries.items() if entry.role is not EntryRole.SUBJECT}
                        points[place] = replace(_point(request, scenario, labels, denied, made), roles=roles)
            except BadInput as error:
                raise BadInput(error.field, error.value, f"{error.mend} (study {name}, scenario {scenario})") from None
        return tuple(points.values())

    def _overrides(
        self, name: str, scenarios: Mapping[str, Statements], fields: Mapping[str, Any], points: tuple[StudyPoint, ...]
    ) -> tuple[str, ...]:
        """What the command line states, if that makes a point which the study's file alone does not have.

        Another number of replicates is no other point, nor is one value of an axis.
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

    def request(self, *layers: Statements) -> Request:
        """The whole configuration after all layers, each above the one before it, and what the layers state of it."""
        return self._above(self._ground(*layers))

    def _ground(self, *layers: Statements) -> Ground:
        """What some layers come to, on which layers can stand that choose no options."""
        chosen = self._chosen(layers)
        settings: Flat = dict(self.composer.values())
        for group, option in chosen.items():
            settings = {key: value for key, value in settings.items() if not key.startswith(f"{group}.")}
            settings |= self.composer.values(group, option)
        ground = Ground(settings, {}, {}, chosen, {**self.groups, **chosen})
        for statements, group, replaced in self._stated(layers, chosen):
            if group:
                settings |= statements
            else:
                values, foreign = self._values(settings, statements, chosen, replaced)
                settings |= values
                ground.foreign.update(foreign)
            ground.said.update(self._saying(statements, group, chosen))
        return ground

    def _above(self, ground: Ground, *layers: Statements) -> Request:
        """The request of values that stand above everything else."""
        values, said, foreign = dict[str, Any](), dict(ground.said), dict(ground.foreign)
        for layer in layers:
            statements = dict(flat(layer))
            more, others = self._values(ground.settings, statements, ground.chosen, frozenset())
            values, foreign = values | more, foreign | others
            said |= self._saying(statements, "", ground.chosen)
        settings = ground.settings | values
        said = _not_null(said, settings, ground.chosen)
        if ground.request is None:
            return request(settings, said, ground.options, tuple(foreign.values()))
        return changed(ground.request, values, said, tuple(foreign.values()))

    def said(self, settings: Flat, *layers: Statements) -> dict[str, Statement]:
        """What states each setting that the layers give, where it is not null in the end.

        An option whose file names a constructor of its own, `_target_`, states that choice; another what stands in its file.
        """
        said: dict[str, Statement] = {}
        chosen = self._chosen(layers)
        for statements, group, _ in self._stated(layers, chosen):
            said |= self._saying(statements, group, chosen)
        return _not_null(said, settings, chosen)

    @staticmethod
    def _saying(statements: Flat, group: str, chosen: Mapping[str, str]) -> dict[str, Statement]:
        """What each statement of `_stated` says."""
        if not group:
            return {key: Statement(key, value) for key, value in statements.items()}
        option = Statement(group, chosen[group])
        own = [key for key in statements if "._" not in key]
        return {group: option} if f"{group}.{TARGET}" in statements else dict.fromkeys(own, option)

    def _chosen(self, layers: Sequence[Statements]) -> dict[str, str]:
        """The option of each group that the layers choose, of which the last counts."""
        return {group: self._option(group, layer[group]) for layer in layers for group in layer if group in self.groups}

    def _stated(self, layers: Sequence[Statements], chosen: Mapping[str, str]) -> Iterator[tuple[Flat, str, frozenset[str]]]:
        """Every statement in the order in which they hold.

        That of an option's file comes with its group; values come with the groups of which a later layer chooses the option.
        """
        last = {group: i for i, layer in enumerate(layers) for group in layer if group in self.groups}
        for i, layer in enumerate(layers):
            choices, values = self._split(layer)
            for group in choices:
                if last[group] == i:
                    names = dict(flat({group: self.library.leaf(group, chosen[group])}))
                    own = self.composer.values(group, chosen[group])
                    yield {key: value for key, value in own.items() if key in names}, group, frozenset()
            yield dict(flat(values)), "", frozenset(group for group in last if last[group] > i)

    def _command(self, name: str) -> str:
        """The command line that states what `task` and `manner` do."""
        stated = [f"{key}={written(value)}" for key, value in (*self.task.items(), *self.manner.items())]
        folder = ["--config-dir", self.own] if self.own else []
        return shlex.join(["numdev", self.program, *folder, f"study={name}", *stated])

    def _grid(self, own: Statements, fields: Mapping[str, Any]) -> Iterator[tuple[dict[str, Entry], Request, NotHonoured | None]]:
        """Entries of each point of one scenario by axis, what is asked for, and whether the command line denies a label."""
        merged = fields["axes"] | mapping("axes", own.get("axes"))
        layer = {key: value for key, value in own.items() if key not in ("axes", *_OF_SCENARIO)}
        task_choices, task_values = self._split(self.task)
        axes = {key: [self._place(key, entry) for entry in self._axis(key, values)] for key, values in merged.items()}
        grounds: dict[str, Ground] = {}  # by what the entries choose: of a grid of values there is one
        for combination in itertools.product(*axes.values()):
            places = dict(zip(axes, combination, strict=True))
            choices = {group: option for place in combination for group, option in place.choices.items()}
            values = {key: value for place in combination for key, value in place.values.items()}
            denied = next((error for place in combination if (error := place.denied) is not None), None)
            if (chosen := repr(choices)) not in grounds:
                grounds[chosen] = self._ground(fields["base"], layer, choices | task_choices)
            entries = {axis: place.entry for axis, place in places.items()}
            yield entries, self._above(grounds[chosen], values, task_values), denied

    def _place(self, axis: str, entry: Entry) -> _Place:
        choices, values = self._split(entry.statements)
        return _Place(entry, choices, values, lambda: self._denied(axis, entry))

    def _denied(self, axis: str, entry: Entry) -> NotHonoured | None:
        """Why a label of an axis would not be true: the command line states otherwise what the label stands for."""
        choices, values = self._split(entry.statements)
        stands_for = {
            key: value for group, option in choices.items() for key, value in flat({group: self.library.leaf(group, str(option))})
        }
        stands_for |= choices | dict(flat(values))
        for key, value in self.task.items():
            if stands_for.get(key) is not None and self._typed(key, stands_for[key]) != self._typed(key, value):
                mend = f"the points {axis}={written(entry.label)} stand for {key}={written(stands_for[key])}; leave it out"
                return NotHonoured(key, value, mend)
        return None

    def _typed(self, key: str, value: Any) -> Any:
        return self.composer.check("", "", key, value) if key in self.composer.values() else value

    def _split(self, statements: Statements) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of groups, and values."""
        choices = {key: value for key, value in statements.items() if key in self.groups}
        return choices, {key: value for key, value in statements.items() if key not in self.groups}

    def _axis(self, key: str, values: Any) -> list[Entry]:
        """The values of an axis with what they state; only the command line's where it names the axis."""
        if key in self.task:
            values = [self.task[key]]
        if isinstance(values, Mapping):
            return [entry_of(f"axes.{key}.{name}", name, mapping(f"axes.{key}.{name}", own)) for name, own in values.items()]
        if not isinstance(values, list):
            raise BadInput(f"axes.{key}", values, "give a list of values, or names with their settings")
        return [Entry(value, {key: value}) for value in values]

    def _option(self, group: str, option: Any) -> str:
        if isinstance(option, (Mapping, list)):
            raise BadInput(group, option, f"give one of its options, and its settings with dots, as in {group}.name: value")
        return str(option)

    def _values(
        self, settings: Flat, statements: Flat, chosen: Mapping[str, str], replaced: frozenset[str]
    ) -> tuple[Flat, dict[str, NotHonoured]]:
        """The values, each of the right type, and those that options other than the chosen ones have, with the reason.

        An option of a later layer replaces a node inside its own, such as the source of a problem, with its parameters.
        """
        values, foreign = dict[str, Any](), dict[str, NotHonoured]()
        for key, value in statements.items():
            if key in _ELSEWHERE:
                raise BadInput(key, value, "it belongs to the run, not to a point of a study; give it on the command line")
            group = key.partition(".")[0]
            option = chosen.get(group, self.composer.choices.get(group, ""))
            if key in settings and "._" not in key:
                values[key] = self.composer.check(group if option else "", option, key, value)
                continue
            able = self.composer.of_others(group, key) if option else []
            if not able:
                raise BadInput(key, value, f"there is no such setting; {one_of(key, self.composer.known(), most=12)}")
            if value is not None and not (group in replaced and key.count(".") > 1):
                foreign[key] = NotHonoured(key, value, lacking(group, option, able))
        return values, foreign


def _not_null(said: Mapping[str, Statement], settings: Flat, chosen: Mapping[str, str]) -> dict[str, Statement]:
    """The statements of which something is left."""
    return {key: one for key, one in said.items() if key in chosen or settings.get(key, one.value) is not None}


def _point(
    request: Request, scenario: str, labels: Mapping[str, Any], denied: NotHonoured | None, made: nodes.Made
) -> StudyPoint:
    """The point; one that is recorded as unsupported where something is stated that it cannot honour."""
    try:
        if denied is not None:
            raise denied
        return build.point(request, scenario, labels, made)
    except NotHonoured as error:
        return build.refused_point(request, scenario, labels, str(error))


def lacking(group: str, option: str, able: Sequence[str]) -> str:
    """The mend for a setting that an option lacks and others have."""
    return f"{group}={option} does not honour it; leave it out, or take {group}={' or '.join(able)}"
