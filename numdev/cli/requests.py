"""Settings as plain containers: by dotted name, of the right type, with their references followed."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from numdev.errors import BadInput, NotHonoured
from numdev.nearest import one_of

_REFERENCE = re.compile(r"\$\{(\.*)([\w.]+)\}")
_MOST_REFERENCES = 8  # longest chain of references; a longer one is taken for a cycle


Flat = dict[str, Any]  # dotted name to value


@dataclass(frozen=True)
class Statement:
    """What states a setting: the setting and its value, or the option of a group, whose file states it."""

    name: str
    value: Any

    def __str__(self) -> str:
        return f"{self.name}={written(self.value)}"


Said = Mapping[str, Statement]
Structure = tuple[tuple[str, str | None], ...]
"""The names of all settings, and the values of references and targets: the same for all points of a grid of values."""


@dataclass(frozen=True)
class Request:
    """The configuration of a point, and which part of it is stated explicitly.

    Attributes:
        config: every setting of the point, nested; references to values are resolved, those to nodes are not.
        said: what states each explicit setting, by dotted name. Defaults are not explicit, and null states nothing.
        raw: every setting by dotted name, as it is written.
        foreign: stated settings that the chosen options do not have.
        options: the option of each group.
        structure: see `Structure`.
    """

    config: Mapping[str, Any]
    said: Said
    raw: Flat
    foreign: tuple[NotHonoured, ...]
    options: Mapping[str, str]
    structure: Structure


def request(raw: Flat, said: Said, options: Mapping[str, str], foreign: tuple[NotHonoured, ...] = ()) -> Request:
    """The request that settings make."""
    return Request(nested(resolved(raw)), said, raw, foreign, options, structure_of(raw))


def changed(below: Request, values: Flat, said: Said, foreign: tuple[NotHonoured, ...]) -> Request:
    """The request `below` with other values of some settings; it shares every node of `below` that they do not affect."""
    raw = below.raw | values
    reach = None if any(map(_refers, values.values())) else _reach(below.structure, frozenset(values))
    if reach is None:
        return request(raw, said, below.options, foreign)
    structure, reached = reach
    config, own = dict(below.config), set[str]()
    for key in reached:
        parents, name = _split(key)
        node, path = config, ""
        for parent in parents:
            path += f"{parent}."
            if path not in own:
                own.add(path)
                node[parent] = dict(node[parent])
            node = node[parent]
        node[name] = _follow(raw, key)
    return Request(config, said, raw, foreign, below.options, structure)


def structure_of(raw: Flat) -> Structure:
    """The structure of settings by dotted name, as they are written."""
    return tuple((name, value if _refers(value) or name.endswith("._target_") else None) for name, value in raw.items())


@lru_cache(maxsize=256)
def _reach(structure: Structure, names: frozenset[str]) -> tuple[Structure, tuple[str, ...]] | None:
    """The structure after some settings change, and the settings affected: these and those that refer to them.

    None if OmegaConf must resolve a setting, since it may refer to anything.
    """
    after = tuple((name, None if name in names else value) for name, value in structure)
    references = {name: reference(value, name) for name, value in after if value is not None and _refers(value)}
    if None in references.values():
        return None
    reached: set[str] = set()
    more = set(names)
    while more:
        reached |= more
        more = {name for name, target in references.items() if target in reached} - reached
    return after, tuple(name for name, _ in after if name in reached)


def flat(settings: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every setting with its dotted name; a mapping is never a value."""
    for name, value in settings.items():
        if isinstance(value, Mapping):
            yield from flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def written(value: Any) -> str:
    """A value as Hydra reads it."""
    if isinstance(value, list):
        return f"[{','.join(map(written, value))}]"
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return str(value)


def type_mend(message: str) -> str:
    """Which type a setting takes, derived from OmegaConf's message."""
    first = message.splitlines()[0]
    wanted = re.search(r"could not be converted to (\w+)", first)
    if wanted:
        kinds = {"Integer": "a whole number", "Float": "a number", "Boolean": "true or false"}
        return f"give {kinds.get(wanted[1], wanted[1])}"
    if "is not a valid bool" in first:
        return "give true or false"
    if "Cannot convert" in first and "to string" in first:
        return "give text"
    if "is not Optional" in first:
        return "it cannot be null"
    return "give a list" if "not a ListConfig" in first else first


def nested(settings: Flat) -> dict[str, Any]:
    """The inverse of `flat`."""
    config: dict[str, Any] = {}
    for key, value in settings.items():
        parents, name = _split(key)
        node = config
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = value
    return config


@lru_cache(maxsize=4096)
def _split(key: str) -> tuple[tuple[str, ...], str]:
    """The names of the nodes that a setting lies in, and its own."""
    *parents, name = key.split(".")
    return tuple(parents), name


def resolved(settings: Flat) -> Flat:
    """The settings with every `${name}` and `${.name}` replaced by the value that it names.

    OmegaConf resolves other interpolations (`${oc.env:HOME}`). It is not used for all, because resolving a whole configuration
    takes milliseconds, which is long for a point of a study.
    """
    referring = [key for key, value in settings.items() if _refers(value)]
    settings = settings | {key: _follow(settings, key) for key in referring}
    rest = [key for key in referring if _refers(settings[key]) and reference(settings[key], key) is None]
    if rest:
        try:
            plain = OmegaConf.to_container(OmegaConf.create(nested(settings)), resolve=True)
        except OmegaConfBaseException as error:
            raise BadInput(rest[0], settings[rest[0]], str(error).splitlines()[0]) from None
        assert isinstance(plain, dict)
        return dict(flat({str(key): value for key, value in plain.items()}))
    return settings


def _refers(value: Any) -> bool:
    return isinstance(value, str) and "${" in value


@lru_cache(maxsize=4096)
def reference(value: str, key: str) -> str | None:
    """The dotted name that `${name}` or `${.name}`, as the value of a setting, refers to; None where it is neither."""
    match = _REFERENCE.fullmatch(value)
    if match is None:
        return None
    dots, name = match.groups()
    parts = key.split(".")
    return ".".join([*(parts[: len(parts) - len(dots)] if dots else []), name])


def _follow(settings: Flat, key: str, depth: int = 0) -> Any:
    """The value of a setting, with references to other settings followed; a reference to a node is kept."""
    value = settings[key]
    target = reference(value, key) if isinstance(value, str) else None
    if target is None:
        return value
    if depth == _MOST_REFERENCES:
        raise BadInput(key, value, "it refers to itself; give a value")
    if target not in settings:
        if _is_node(settings, target):
            return f"${{{target}}}"
        raise BadInput(key, value, f"there is no setting {target}; {one_of(target, settings, most=12)}")
    return _follow(settings, target, depth + 1)


def _is_node(settings: Flat, name: str) -> bool:
    return any(key.startswith(f"{name}.") for key in settings)
