"""From a node of a configuration to the object that its `_target_` names, by `hydra.utils.instantiate`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any, Union, get_args, get_origin, get_type_hints

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from numdev.cli.requests import reference
from numdev.errors import BadInput
from numdev.nearest import choice
from numdev.settings import declared

_WORDS = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
TARGET = "_target_"


def build(config: Mapping[str, Any], path: str) -> Any:
    """The object of a node, with those of the nodes that it holds or refers to.

    A value becomes what the target's annotation says: a member of an Enum by its value, a number or text as it is.

    Args:
        config: the whole configuration, nested, whose references to values are resolved; those to nodes are not.
        path: of the node, with dots. One without `_target_` is its value.

    Raises:
        BadInput: naming the setting.
    """
    node = at(config, path)
    if isinstance(node, str) and (name := reference(node, path)) is not None:
        return build(config, name)
    if not isinstance(node, Mapping) or TARGET not in node:
        return node
    make, hints = target(node[TARGET], path), types_of(node[TARGET])
    own = {name: build(config, f"{path}.{name}") for name in node if not name.startswith("_")}
    unknown = [name for name in own if not _takes(node[TARGET], name)]
    if unknown:
        raise BadInput(f"{path}.{unknown[0]}", own[unknown[0]], f"{node[TARGET]} takes no such argument")
    texts = sentences(node[TARGET])
    arguments = {
        name: converted(f"{path}.{name}", hints.get(name, Any), value, texts.get(name, "")) for name, value in own.items()
    }
    return make(**arguments)


def at(config: Mapping[str, Any], path: str) -> Any:
    """The node or value of a dotted path."""
    node: Any = config
    for part in path.split("."):
        node = node[part]
    return node


def place(config: Mapping[str, Any], path: str) -> str:
    """The path of the node that a node refers to, its own where it is no reference."""
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
    """Types of the arguments of a `_target_`, and of what it returns; none where they are for a type checker alone."""
    located = _located(name)
    try:
        return get_type_hints(located)
    except NameError:
        return {}


@lru_cache(maxsize=256)
def sentences(name: str) -> dict[str, str]:
    """What the arguments of a `_target_` mean, where its fields declare settings."""
    located = _located(name)
    return {one.name: one.text for one in declared(located)} if is_dataclass(located) and isinstance(located, type) else {}


@lru_cache(maxsize=256)
def _parameters(name: str) -> tuple[frozenset[str], bool]:
    parameters = inspect.signature(_located(name)).parameters.values()
    return frozenset(each.name for each in parameters), any(each.kind is each.VAR_KEYWORD for each in parameters)


def _takes(name: str, argument: str) -> bool:
    known, whatever = _parameters(name)
    return whatever or argument in known


def made_by(name: str) -> type | None:
    """The class whose object a `_target_` makes, where it is known."""
    located = _located(name)
    found = located if isinstance(located, type) else types_of(name).get("return")
    return found if isinstance(found, type) else None


def converted(where: str, hint: Any, value: Any, text: str = "") -> Any:
    """A value of a configuration as an argument of this type; `text` says what it means.

    Raises:
        BadInput: naming the setting and what it takes.
    """
    arms = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    if value is None and type(None) in arms:
        return None
    errors = []
    for arm in arms:
        try:
            return _as(where, arm, value)
        except BadInput as error:
            errors.append(error)
    first = errors[0]
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
