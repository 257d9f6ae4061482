"""Nested dictionaries as tables: dotted names, columns in a fixed order, each of one type."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
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


_CHUNK = 4096  # values that are packed together


class _Growing:
    """A column that grows. Numbers of one type are packed, eight bytes each, and equal texts are one object."""

    def __init__(self, absent: int) -> None:
        self.packed: list[Any] = []
        self.last: list[Any] = [None] * absent
        self.texts: dict[str, str] = {}
        self.length = absent

    def append(self, value: Any) -> None:
        self.last.append(self.texts.setdefault(value, value) if type(value) is str else value)
        self.length += 1
        if len(self.last) >= _CHUNK:
            self._pack()

    def pad(self, length: int) -> None:
        """Append None up to this length."""
        while self.length < length:
            self.append(None)

    def series(self) -> pd.Series[Any]:
        """The whole column, of the type that all of its values allow."""
        self._pack()
        kinds = {chunk.dtype if isinstance(chunk, np.ndarray) else None for chunk in self.packed}
        if len(kinds) == 1 and None not in kinds:
            return pd.Series(np.concatenate(self.packed))
        return column_of_values(
            [value for chunk in self.packed for value in (chunk if isinstance(chunk, list) else chunk.tolist())]
        )

    def _pack(self) -> None:
        kinds = set(map(type, self.last))
        if kinds == {float}:
            self.packed.append(np.array(self.last, dtype=np.float64))
        elif kinds == {int} and all(-(2**63) <= value < 2**63 for value in self.last):
            self.packed.append(np.array(self.last, dtype=np.int64))
        elif self.last:
            self.packed.append(self.last)
        self.last = []


class Growing:
    """A table that grows by rows: of a million of them, dictionaries take gigabytes."""

    def __init__(self) -> None:
        self._columns: dict[str, _Growing] = {}
        self._length = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; a column that it lacks is empty there."""
        for name, value in row.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Growing(self._length)
            column.pad(self._length)
            column.append(value)
        self._length += 1

    def typed(self, columns: list[str]) -> pd.DataFrame:
        """Makes the table, which is then empty. It has at least these columns, and they come first; each has one type."""
        made = {}
        for name in _ordered(list(dict.fromkeys([*columns, *self._columns]))):
            column = self._columns.pop(name, None) or _Growing(self._length)
            column.pad(self._length)
            made[name] = column.series()
        self._length = 0
        return pd.DataFrame(made)


def typed(records: list[dict[str, Any]], columns: list[str]) -> pd.DataFrame:
    """Makes a table of dictionaries. It has at least these columns, and they come first; each column has one type."""
    table = Growing()
    for record in records:
        table.add(record)
    return table.typed(columns)


def _ordered(names: list[str]) -> list[str]:
    """Sorts column names by kind: place, labels, roles, configuration, counters; within a kind by first appearance."""
    kinds = ("label.", "role.", "problem.", "variant.", "baseline.", "seeds", "counter.", "seconds")
    place = {name: next((i for i, kind in enumerate(kinds, 1) if name.startswith(kind)), 0) for name in names}
    place |= {name: 1 for name in ("attention", "kernel", "format", "policy", "tiling.area", "pairing") if name in place}
    return sorted(names, key=lambda name: place[name])


def column_of_values(values: list[Any]) -> pd.Series[Any]:
    """Makes a column: numbers stay numbers, integers with gaps become nullable integers, mixed values become text."""
    present = [value for value in values if value is not None]
    if present and all(isinstance(value, bool) for value in present):
        return pd.Series(values, dtype="boolean")
    if present and all(isinstance(value, int) for value in present):
        return pd.Series(values, dtype="Int64" if len(present) < len(values) else "int64")
    if present and all(isinstance(value, (int, float)) for value in present):
        return pd.Series(values, dtype="float64")
    return pd.Series([None if value is None else str(value) for value in values], dtype="str")
