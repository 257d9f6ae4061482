"""Layers of statements, each overriding the one before it: which options they choose, and the resulting settings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from numdev.cli.composed import Composer
from numdev.cli.library import Library
from numdev.cli.nodes import TARGET
from numdev.cli.requests import Flat, Request, Statement, changed, flat, request, written
from numdev.cli.statements import Statements
from numdev.errors import BadInput, NotHonoured
from numdev.nearest import one_of

_ELSEWHERE = ("device", "results", "fresh", "metrics", "dry_run")  # settings of the run, not of a point


@dataclass(frozen=True)
class Ground:
    """What points that differ only in values have in common.

    Attributes:
        settings: every setting of the chosen options, with the stated values.
        said: what states each of these values.
        foreign: stated settings that the chosen options do not have, with the reason.
        chosen: the explicitly chosen options, by group.
        options: the options of all groups.
    """

    settings: Flat
    said: dict[str, Statement]
    foreign: dict[str, NotHonoured]
    chosen: Mapping[str, str]
    options: Mapping[str, str]

    @cached_property
    def request(self) -> Request | None:
        """The request that the points share; None if a reference cannot be resolved until a value replaces it."""
        try:
            return request(self.settings, self.said, self.options)
        except BadInput:
            return None


@dataclass(frozen=True)
class Layers:
    """Reads layers of statements.

    Attributes:
        library: where options of groups are found.
        composer: composes the options by Hydra.
    """

    library: Library
    composer: Composer

    def ground(self, *layers: Statements) -> Ground:
        """The result of some layers, above which layers without options can be added."""
        chosen = self._chosen(layers)
        settings: Flat = dict(self.composer.values())
        for group, option in chosen.items():
            settings = {key: value for key, value in settings.items() if not key.startswith(f"{group}.")}
            settings |= self.composer.values(group, option)
        ground = Ground(settings, {}, {}, chosen, {**self.composer.choices, **chosen})
        for statements, group, replaced in self._stated(layers, chosen):
            if group:
                settings |= statements
            else:
                values, foreign = self._values(settings, statements, chosen, replaced)
                settings |= values
                ground.foreign.update(foreign)
            ground.said.update(self._saying(statements, group, chosen))
        return ground

    def above(self, ground: Ground, *layers: Statements) -> Request:
        """The request with further values, which override everything else."""
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
        """What states each setting of the layers whose final value is not null.

        An option whose file names a constructor, `_target_`, states that choice; any other option states what its file holds.
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
        """The option of each group that the layers choose; the last choice counts."""
        for layer in layers:
            self.check_replaced(layer)
        return {group: self._option(group, layer[group]) for layer in layers for group in layer if group in self.composer.choices}

    def _stated(self, layers: Sequence[Statements], chosen: Mapping[str, str]) -> Iterator[tuple[Flat, str, frozenset[str]]]:
        """Every statement, later ones overriding earlier ones.

        The statements of an option's file come with its group; values come with the groups whose option a later layer chooses.
        """
        last = {group: i for i, layer in enumerate(layers) for group in layer if group in self.composer.choices}
        for i, layer in enumerate(layers):
            choices, values = self.split(layer)
            for group in choices:
                if last[group] == i:
                    names = dict(flat({group: self.library.leaf(group, chosen[group])}))
                    own = self.composer.values(group, chosen[group])
                    yield {key: value for key, value in own.items() if key in names}, group, frozenset()
            yield dict(flat(values)), "", frozenset(group for group in last if last[group] > i)

    def check_replaced(self, layer: Statements) -> None:
        """Check a layer for an option of whose file nothing is left, since values of the layer itself replace it.

        Raises:
            NotHonoured: naming the group.
        """
        choices, values = self.split(layer)
        replaced = dict(flat(values))
        for group, option in choices.items():
            own = flat({group: self.library.leaf(group, self._option(group, option))})
            own_values = {key: value for key, value in own if value is not None}
            if own_values and all(replaced.get(key, value) not in (None, value) for key, value in own_values.items()):
                stronger = " and ".join(f"{key}={written(replaced[key])}" for key in own_values)
                raise NotHonoured(group, option, f"{stronger} replaces all that it states; leave one of them out")

    def split(self, statements: Statements) -> tuple[dict[str, Any], dict[str, Any]]:
        """Options of groups, and values."""
        choices = {key: value for key, value in statements.items() if key in self.composer.choices}
        return choices, {key: value for key, value in statements.items() if key not in self.composer.choices}

    def stands_for(self, statements: Statements) -> Flat:
        """The options and values that are stated, and what the files of the options state."""
        choices, values = self.split(statements)
        leaves = {group: self.library.leaf(group, str(option)) for group, option in choices.items()}
        return dict(flat(leaves)) | choices | dict(flat(values))

    def typed(self, key: str, value: Any) -> Any:
        """A value of the type of its setting."""
        return self.composer.check("", "", key, value) if key in self.composer.values() else value

    def _option(self, group: str, option: Any) -> str:
        if isinstance(option, (Mapping, list)):
            raise BadInput(group, option, f"give one of its options, and its settings with dots, as in {group}.name: value")
        return str(option)

    def _values(
        self, settings: Flat, statements: Flat, chosen: Mapping[str, str], replaced: frozenset[str]
    ) -> tuple[Flat, dict[str, NotHonoured]]:
        """The values, converted to the right type, and settings that only other options have, with the reason.

        An option of a later layer replaces a node within its group, such as the source of a problem, with its parameters.
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
    """The statements whose setting is not null."""
    return {key: one for key, one in said.items() if key in chosen or settings.get(key, one.value) is not None}


def lacking(group: str, option: str, able: Sequence[str]) -> str:
    """How to correct a setting that this option lacks and other options have."""
    return f"{group}={option} does not read it; leave it out, or take {group}={' or '.join(able)}"
