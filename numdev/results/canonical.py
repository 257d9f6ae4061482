"""Value objects as plain data in one canonical form, and the key that is the hash of it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import lru_cache
from typing import Any


def describe(value: object) -> Any:
    """A value object as plain data, in one canonical form: what a key is the hash of.

    What an object says of itself with `describe()` counts; else a dataclass becomes its class name and its fields, an Enum its
    value.

    Raises:
        TypeError: for what has no such form.
    """
    kind: Any = type(value)
    return _form(kind)(value)


@lru_cache(maxsize=4096)
def _form(kind: type) -> Callable[[Any], Any]:
    """How the objects of a class become plain data. Each class is asked once: a large study describes millions of values."""
    if issubclass(kind, (bool, int, float, str, type(None))):
        return _itself
    if not issubclass(kind, type):
        if callable(getattr(kind, "describe", None)):
            return lambda value: describe(value.describe())
        if issubclass(kind, Enum):
            return lambda value: value.value
        if is_dataclass(kind):
            return _fields_of(kind)
    if issubclass(kind, (tuple, list)):
        return lambda value: [describe(item) for item in value]
    if issubclass(kind, Mapping):
        return lambda value: {str(key): describe(item) for key, item in value.items()}
    raise TypeError(f"{kind.__name__} has no canonical form")


def _itself(value: object) -> object:
    return value


def _fields_of(kind: type) -> Callable[[Any], dict[str, Any]]:
    """What describes the objects of a dataclass: its name, its fields, and its `digest` where it stands for a file."""
    names = [(f.name, "float" in str(f.type)) for f in fields(kind)]
    head = {"type": kind.__name__}

    def described(value: Any) -> dict[str, Any]:
        found = dict(head)
        for name, is_float in names:
            item = getattr(value, name)
            whole = is_float and isinstance(item, int)  # 4 and 4.0 are equal, and so are objects that hold them
            found[name] = describe(float(item) if whole else item)
        return found | ({"digest": value.digest} if hasattr(value, "digest") else {})

    return described


_INFORMATION = ("revision",)  # facts of an environment that change no result


def key_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The point's key: a hash of its canonical configuration, of the sources that computed it and of the environment.

    The environment holds the digest of numdev's sources (`numdev.sources`); the configuration that of a user's function and of a
    captured file. The state of a repository, `revision`, is information for the reader: neither a commit nor documentation gives
    another key.
    """
    facts = {name: value for name, value in environment.items() if name not in _INFORMATION}
    text = json.dumps({"config": config, "environment": facts}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]
