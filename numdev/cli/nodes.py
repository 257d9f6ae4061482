"""From a node of a configuration to the object that its `_target_` names, by `hydra.utils.instantiate`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from cachetools import LRUCache, cached
from hydra.errors import InstantiationException
from hydra.utils import instantiate

from numdev.cli.requests import reference
from numdev.errors import BadInput
from numdev.nearest import NotAChoice, choice
from numdev.settings import declared

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
TARGET = "_target_"


class Made:
    """The objects of nodes; points with equal nodes share one object, if it is a frozen dataclass."""

    def __init__(self) -> None:
        self._objects: dict[tuple[Any, ...], Any] = {}
        self._kept: set[int] = set()  # identities of these objects, which stay valid while the objects are kept
        self._whole: dict[int, tuple[Mapping[str, Any], Any]] = {}  # by identity: nodes that refer to no other, and their objects

    def known(self, node: Mapping[str, Any]) -> Any:
        """The object kept for this node, compared by identity; None if there is none."""
        return self._whole.get(id(node), (node, None))[1]

    def keep(self, node: Mapping[str, Any], found: Any) -> None:
        """Keep the object of a node for later, if the node alone determines the object."""
        if id(found) in self._kept and not _refers(node):
            self._whole[id(node)] = node, found

    def get(self, name: str, arguments: Mapping[str, Any], make: Callable[[], Any]) -> Any:
        """The object that a target makes of these arguments."""
        asked = name, *arguments, *map(self._identity, arguments.values())
        if asked in self._objects:
            return self._objects[asked]
        found = make()
        if _is_frozen(found) and None not in asked:
            self._objects[asked] = found
            self._kept.add(id(found))
        return found

    def _identity(self, value: Any) -> Any:
        """A value that identifies an argument; equal numbers of different types differ. None if it cannot be identified."""
        if isinstance(value, str):
            return value, str
        if value is None or isinstance(value, (bool, int, float, list, dict)):
            return repr(value)  # distinguishes -0.0 from 0.0
        return id(value) if id(value) in self._kept else None


def _is_frozen(value: Any) -> bool:
    """Whether a value is a frozen dataclass."""
    parameters = getattr(value, "__dataclass_params__", None)
    return parameters is not None and parameters.frozen


def build(config: Mapping[str, Any], path: str, made: Made | None = None) -> Any:
    """The object of a node, with those of the nodes that it holds or refers to.

    A value is converted to the type in the target's annotation: text to the member of an Enum; numbers and text stay.

    Args:
        config: the whole configuration, nested, whose references to values are resolved; those to nodes are not.
        path: of the node, with dots. One without `_target_` is its value.
        made: objects that were built before.

    Raises:
        BadInput: naming the setting.
    """
    return _built(config, path, at(config, path), Made() if made is None else made)


def _built(config: Mapping[str, Any], path: str, node: Any, made: Made) -> Any:
    if node is None or isinstance(node, (bool, int, float)):
        return node
    if isinstance(node, str):
        name = reference(node, path) if "${" in node else None
        return node if name is None else _built(config, name, at(config, name), made)
    if not isinstance(node, Mapping) or TARGET not in node:
        return node
    if (found := made.known(node)) is None:
        own = {name: _built(config, f"{path}.{name}", value, made) for name, value in node.items() if not name.startswith("_")}
        found = made.get(node[TARGET], own, lambda: _made(node[TARGET], path, own))
        made.keep(node, found)
    return found


def _refers(value: Any) -> bool:
    """Whether a node, or one in it, holds a reference."""
    if isinstance(value, Mapping):
        return any(map(_refers, value.values()))
    return isinstance(value, str) and "${" in value


def _made(name: str, path: str, own: Mapping[str, Any]) -> Any:
    """The object that a target makes, with each argument converted to the type that it takes."""
    make, hints, texts = target(name, path), types_of(name), sentences(name)
    for argument in own:
        if not _takes(name, argument):
            raise BadInput(f"{path}.{argument}", own[argument], f"{name} takes no such argument")
    return make(
        **{
            argument: converted(f"{path}.{argument}", hints.get(argument, Any), value, texts.get(argument, ""))
            for argument, value in own.items()
        }
    )


def at(config: Mapping[str, Any], path: str) -> Any:
    """The node or value of a dotted path."""
    node: Any = config
    for part in path.split("."):
        node = node[part]
    return node


def place(config: Mapping[str, Any], path: str) -> str:
    """The path of the node that a node refers to; its own path if it is not a reference."""
    node = at(config, path)
    name = reference(node, path) if isinstance(node, str) else None
    return path if name is None else place(config, name)


@lru_cache(maxsize=256)
def _located(name: str) -> Callable[..., Any]:
    made: Any = instantiate({TARGET: name, "_partial_": True})
    located: Callable[..., Any] = made.func
    return located


def target(name: str, path: str) -> Callable[..., Any]:
    """The class or function of a `_target_`.

    Raises:
        BadInput: naming the node, if it cannot be imported.
    """
    try:
        return _located(name)
    except InstantiationException as error:
        raise BadInput(f"{path}.{TARGET}", name, " ".join(str(error).split())) from None


@lru_cache(maxsize=256)
def types_of(name: str) -> dict[str, Any]:
    """Types of the arguments and of the result of a `_target_`; none if they exist only for a type checker."""
    located = _located(name)
    try:
        return get_type_hints(located)
    except NameError:
        return {}


@lru_cache(maxsize=256)
def sentences(name: str) -> dict[str, str]:
    """The meanings of the arguments of a `_target_`, if its fields declare settings."""
    located = _located(name)
    return {one.name: one.text for one in declared(located)} if is_dataclass(located) and isinstance(located, type) else {}


@cached(LRUCache(256), key=lambda value, protocol: (type(value), protocol))
def satisfies(value: object, protocol: type) -> bool:
    """Whether a value satisfies a protocol; checked once per class, since a check takes tens of microseconds."""
    return isinstance(value, protocol)


@lru_cache(maxsize=256)
def _parameters(name: str) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(_located(name)).parameters.values()
    return frozenset(each.name for each in parameters), any(each.kind is each.VAR_KEYWORD for each in parameters)


def _takes(name: str, argument: str) -> bool:
    known, whatever = _parameters(name)
    return whatever or argument in known


def made_by(name: str) -> type | None:
    """The class of the object that a `_target_` makes, if it is known."""
    located = _located(name)
    found = located if isinstance(located, type) else types_of(name).get("return")
    return found if isinstance(found, type) else None


def converted(where: str, hint: Any, value: Any, text: str = "") -> Any:
    """A value of a configuration converted to an argument of this type; `text` states its meaning.

    Raises:
        BadInput: naming the setting and what it takes.
    """
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in arms:
        return None
    errors = []
    for arm in (arm for arm in arms if arm is not type(None)):
        try:
            return _as(where, arm, value)
        except BadInput as error:
            errors.append(error)
    first = errors[0]
    if isinstance(first, NotAChoice):
        raise NotAChoice(where, value, first.known, text)
    raise BadInput(where, value, f"{first.mend}: {text}" if text else first.mend)


def _as(where: str, kind: Any, value: Any) -> Any:
    if isinstance(kind, type) and issubclass(kind, Enum) and not isinstance(value, kind):
        return choice(where, kind, value)
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if kind in _WORDS and type(value) is not kind:
        raise BadInput(where, value, f"give {_WORDS[kind]}")
    if get_origin(kind) is tuple and isinstance(value, list):
        return tuple(value)
    return value
