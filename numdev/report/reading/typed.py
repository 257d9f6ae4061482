"""Nested dictionaries as tables: dotted names, columns in a fixed order, each of one type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pandas as pd


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """A nested configuration with dotted names: `{"a": {"b": 1}}` is `{"a.b": 1}`; a list is JSON text."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{name}.")
        else:
            flat[f"{prefix}{name}"] = json.dumps(value) if isinstance(value, list) else value
    return flat


def typed(records: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Makes a table of dictionaries. It has at least these columns, and they come first; each column has one type."""
    names = list(dict.fromkeys([*columns, *(name for record in records for name in record)]))
    return pd.DataFrame({name: _column([record.get(name) for record in records]) for name in _ordered(names)})


def _ordered(names: list[str]) -> list[str]:
    """Sorts column names by kind: place, labels, roles, configuration, counters; within a kind by first appearance."""
    kinds = ("label.", "role.", "problem.", "variant.", "baseline.", "seeds", "counter.", "seconds")
    place = {name: next((i for i, kind in enumerate(kinds, 1) if name.startswith(kind)), 0) for name in names}
    place |= {name: 1 for name in ("attention", "kernel", "format", "policy", "tiling.area", "pairing") if name in place}
    return sorted(names, key=lambda name: place[name])


def _column(values: list[Any]) -> pd.Series[Any]:
    """Makes a column: numbers stay numbers, integers with gaps become nullable integers, mixed values become text."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, bool) for value in present):
        return pd.Series(values, dtype="boolean")
    if present and all(isinstance(value, int) for value in present):
        return pd.Series(values, dtype="Int64" if len(present) < len(values) else "int64")
    if present and all(isinstance(value, (int, float)) for value in present):
        return pd.Series(values, dtype="float64")
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")
