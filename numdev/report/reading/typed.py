"""Nested dictionaries as tables: dotted names, columns in a fixed order, each of one type."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from types import NoneType
from typing import Any

import numpy as np
import pandas as pd

from numdev.report.reading.lean import Run, texts


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
_MANY = 1 << 16  # different texts of a column that rows share; of more the dictionary would take more than it saves


class _Growing:
    """A column that grows. Values of one type are packed, equal texts are one object, and a chunk of one value is one value."""

    def __init__(self, absent: int) -> None:
        self.packed: list[Any] = []  # runs, and lists of mixed values
        self.last: list[Any] = []
        self.texts: dict[str, str] = {}
        self.length = 0
        self.pad(absent)

    def extend(self, values: Sequence[Any]) -> None:
        """Append values."""
        for start in range(0, len(values), _CHUNK):
            own = values[start : start + _CHUNK]
            self.last += map(self._shared, own) if str in set(map(type, own)) else own
            if len(self.last) >= _CHUNK:
                self._pack()
        self.length += len(values)

    def pad(self, length: int) -> None:
        """Append None up to this length."""
        if length > self.length:
            self.extend([None] * (length - self.length))

    def _shared(self, value: Any) -> Any:
        """A value, as the text that rows share where it is one."""
        if type(value) is not str:
            return value
        return self.texts.setdefault(value, value) if len(self.texts) < _MANY else self.texts.get(value, value)

    def series(self) -> pd.Series[Any]:
        """The whole column, of the type that all of its values allow."""
        self._pack()
        if len(self.packed) == 1 and isinstance(self.packed[0], Run):
            whole = self.packed.pop().whole()
            if whole.dtype == object:
                return texts(whole)
            return pd.Series(whole, dtype="boolean" if whole.dtype == np.bool_ else whole.dtype, copy=False)
        return column_of_values(
            [value for part in self.packed for value in (part if isinstance(part, list) else part.whole().tolist())]
        )

    def _pack(self) -> None:
        kinds = set(map(type, self.last))
        if kinds == {int} and not all(-(2**63) <= value < 2**63 for value in self.last):
            kinds = {object}
        dtype = next((dtype for dtype, of in _PACKED.items() if kinds <= of), None)
        if dtype is None:
            self.packed.append(self.last)
        elif self.last:
            if not self.packed or isinstance(self.packed[-1], list) or self.packed[-1].dtype != dtype:
                self.packed.append(Run(dtype))
            self.packed[-1].add(np.array(self.last, dtype))
        self.last = []


_PACKED: dict[np.dtype[Any], set[type]] = {
    np.dtype(np.float64): {float},
    np.dtype(np.int64): {int},
    np.dtype(np.bool_): {bool},
    np.dtype(np.object_): {str, NoneType},
}
"""How values of some types are packed."""


class Growing:
    """A table that grows by rows: of a million of them, dictionaries take gigabytes."""

    def __init__(self) -> None:
        self._columns: dict[str, _Growing] = {}
        self._length = 0

    def add(self, row: Mapping[str, Any]) -> None:
        """Append a row; a column that it lacks is empty there."""
        self._add({name: [value] for name, value in row.items()}, 1)

    def extend(self, rows: Sequence[Mapping[str, Any]], **head: Any) -> None:
        """Append rows with `head` in front of each. A list in a cell becomes the text of its items."""
        alike = rows if all(row.keys() == rows[0].keys() for row in rows) else rows[:1]
        if alike:
            columns = {name: [value] * len(alike) for name, value in head.items()}
            self._add(columns | {name: _plain([row[name] for row in alike]) for name in alike[0]}, len(alike))
        for row in rows[len(alike) :]:
            self.extend([row], **head)

    def _add(self, columns: Mapping[str, list[Any]], count: int) -> None:
        for name, values in columns.items():
            column = self._columns.get(name)
            if column is None:
                column = self._columns[name] = _Growing(self._length)
            column.pad(self._length)
            column.extend(values)
        self._length += count

    def typed(self, columns: list[str]) -> pd.DataFrame:
        """Makes the table, which is then empty. It has at least these columns, and they come first; each has one type."""
        made: dict[str, pd.Series[Any]] = {}
        for name in _ordered(list(dict.fromkeys([*columns, *self._columns]))):
            column = self._columns.pop(name, None) or _Growing(self._length)
            column.pad(self._length)
            made[name] = column.series()
        self._length = 0
        return pd.DataFrame(made, copy=False)


def _plain(values: list[Any]) -> list[Any]:
    if list not in set(map(type, values)):
        return values
    return [" ".join(map(str, value)) if type(value) is list else value for value in values]


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
    return texts(np.array([None if value is None else str(value) for value in values], dtype=object))
