"""From a node of a configuration to the object that its `_target_` names."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import lru_cache
from typing import Any

from hydra.errors import InstantiationException
from hydra.utils import instantiate

from numdev.cli.compose import reference
from numdev.errors import BadInput
from numdev.settings import make, types_of

TARGET = "_target_"


def build(config: Mapping[str, Any], path: str) -> Any:
    """The object of a node, with those of the nodes that it holds or refers to; see `numdev.settings.make`.

    Args:
        config: the whole configuration, nested, whose references to values are resolved; those to nodes are not.
        path: of the node, with dots. One without `_target_` is its value.

    Raises:
        BadInput: naming the setting.
    """
    return _built(config, path, at(config, path))


def _built(config: Mapping[str, Any], path: str, node: Any) -> Any:
    if isinstance(node, str):
        name = reference(node, path) if "${" in node else None
        return node if name is None else _built(config, name, at(config, name))
    if not isinstance(node, Mapping) or TARGET not in node:
        return node
    own = {name: _built(config, f"{path}.{name}", value) for name, value in node.items() if not name.startswith("_")}
    return make(_target(node[TARGET], path), own, path)


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


def _target(name: str, path: str) -> Callable[..., Any]:
    """The class or function of a `_target_`.

    Raises:
        BadInput: naming the node, if it cannot be imported.
    """
    try:
        return _located(name)
    except InstantiationException as error:
        raise BadInput(f"{path}.{TARGET}", name, " ".join(str(error).split())) from None


def made_by(name: str) -> type | None:
    """The class of the object that a `_target_` makes, if it is known."""
    located = _located(name)
    kind = located if isinstance(located, type) else types_of(located).get("return")
    return kind if isinstance(kind, type) else None
