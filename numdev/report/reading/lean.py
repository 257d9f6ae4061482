"""Large tables in little memory: equal texts are one object, and a column with one value in every row takes the memory of one.

Such columns are read only: whoever wants to set single cells takes `DataFrame.copy`, which makes them columns as any other.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

TEXT = pd.StringDtype("python", na_value=np.nan)
"""Text as pandas' `str`, but a row is a pointer of eight bytes to a text that rows share."""


def texts(values: NDArray[np.object_]) -> pd.Series[Any]:
    """A column of text. None and NaN are missing values; those of an array that one value fills are not copied."""
    first = _the_one(values)
    if first is not None:
        one = first[0] if isinstance(first[0], str) else np.nan
        values = np.broadcast_to(np.array([one], dtype=object), values.shape)
        return pd.Series(pd.arrays.StringArray(values, dtype=TEXT), copy=False)  # type: ignore[call-arg]  # stubs lack it
    return pd.Series(pd.array(values, dtype=TEXT, copy=False), copy=False)


class Run:
    """Values of one type, to the end of which others are added; as long as all are the same, bit for bit, one of them is kept."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        self.dtype = dtype
        self._values = np.empty(0, dtype)
        self._length = 0

    def add(self, values: NDArray[Any]) -> None:
        """Add at least one value."""
        start, end = self._length, self._length + len(values)
        if start == 0:
            self._values = values[:1].copy()
        if len(self._values) == 1 and _are(values, self._values):
            self._length = end
            return
        if len(self._values) == 1:
            self._values = self._values.repeat(max(start, 1))  # `full` would cut a NUL off the end of a text
        if end > len(self._values):  # grows in place: chunks that are joined at the end leave holes as large as the table
            self._values.resize(max(end, end + (end >> _ROOM)), refcheck=False)
        self._values[start:end] = values
        self._length = end

    def whole(self) -> NDArray[Any]:
        """All of them, after which nothing is added."""
        if len(self._values) == 1:
            return np.broadcast_to(self._values, self._length)
        self._values.resize(self._length, refcheck=False)
        return self._values


_ROOM = 3  # an eighth


def _are(values: NDArray[Any], first: NDArray[Any]) -> bool:
    """Whether values are all the same as the first, bit for bit: -0.0 is not 0.0, NaN is NaN, and a text may end in NUL."""
    if values.dtype == np.float64:
        values, first = values.view(np.int64), first.view(np.int64)
    return bool((values == first).all())


_FEW = 1 << 12  # rows; claims and figures ask for many small parts, which pandas makes ten times as fast


def repeated(column: pd.Series[Any], places: NDArray[np.integer[Any]]) -> pd.Series[Any]:
    """The values of a column at some places, in their order, by a new index."""
    values = _values(column)
    if values is None:
        return column.take(places).reset_index(drop=True)  # type: ignore[arg-type]  # of numbers with gaps
    first = _the_one(values)
    found = values.take(places) if first is None else np.broadcast_to(first, len(places))
    return texts(found) if pd.api.types.is_string_dtype(column.dtype) else pd.Series(found, copy=False)


def part(rows: pd.DataFrame, chosen: NDArray[np.bool_] | pd.Series[bool]) -> pd.DataFrame:
    """The rows that are chosen, with their index, as `rows[chosen]`. Of many, a column of one value stays one value."""
    places = np.flatnonzero(np.asarray(chosen))
    if len(places) == len(rows):
        return rows
    if len(places) <= _FEW:
        return rows.take(places)  # type: ignore[arg-type]  # stubs know lists only
    index = rows.index.take(places)
    found = {name: repeated(rows[name], places).set_axis(index) for name in rows.columns}
    made = pd.DataFrame(found, index=index, columns=rows.columns, copy=False)
    made.attrs = rows.attrs
    return made


def numbered(columns: Iterable[pd.Series[Any]], count: int) -> NDArray[np.int64]:
    """A number for each of `count` rows: rows that agree in every column have the same, counted from 0 in order of appearance.

    pandas' `groupby` has a column of codes for each column at a time, this one has two.
    """
    found = np.zeros(count, dtype=np.int64)
    for column in columns:
        values = _values(column)
        if values is not None and _the_one(values) is not None:
            continue
        codes, known = pd.factorize(column, use_na_sentinel=False)
        found *= len(known)
        found += codes
        found = pd.factorize(found)[0]
    return found


def _values(column: pd.Series[Any]) -> NDArray[Any] | None:
    """The array in which a column keeps its values; None for one that has no such array, as numbers with gaps."""
    if pd.api.types.is_string_dtype(column.dtype) and column.dtype != TEXT:
        return column.to_numpy(dtype=object)
    return column.array.to_numpy() if isinstance(column.array, pd.arrays.NumpyExtensionArray) else None


def _the_one(values: NDArray[Any]) -> NDArray[Any] | None:
    """The value that fills an array by its making, as an array of one; None where there is no such value."""
    return values[:1] if len(values) and (values.strides == (0,) or len(values) == 1) else None
