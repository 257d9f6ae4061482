"""Value objects as plain data in one canonical form, and the key that is the hash of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Described(Protocol):
    """An object that has a form of its own: text, or what `describe` makes plain."""

    def describe(self) -> Any: ...


def describe(value: object) -> Any:
    """A value object as plain data, in one canonical form: what a key is the hash of.

    What an object says of itself with `describe()` counts; else a dataclass becomes its class name and its fields, an Enum its
    value.

    Raises:
        TypeError: for what has no such form.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Described) and not isinstance(value, type):
        return describe(value.describe())
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {"type": type(value).__name__} | _fields(value)
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no canonical form")


def _fields(value: Any) -> dict[str, Any]:
    """The fields of a dataclass, and its `digest` where it stands for a file."""
    described = {}
    for f in fields(value):
        item = getattr(value, f.name)
        whole = isinstance(item, int) and "float" in str(f.type)  # 4 and 4.0 are equal, and so are objects that hold them
        described[f.name] = describe(float(item) if whole else item)
    return described | ({"digest": value.digest} if hasattr(value, "digest") else {})


_INFORMATION = ("revision",)  # facts of an environment that change no result


def key_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The point's key: a hash of its canonical configuration, of the sources that computed it and of the environment.

    The environment holds the digest of numdev's sources (`numdev.sources`); the configuration that of a user's function and of a
    captured file. The state of a repository, `revision`, is information for the reader: neither a commit nor documentation makes
    another key.
    """
    facts = {name: value for name, value in environment.items() if name not in _INFORMATION}
    text = json.dumps({"config": config, "environment": facts}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
