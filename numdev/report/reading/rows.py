"""The rows of a large study in little memory: what rows have alike is kept once, and tables are made of the part that is wanted.

A row consists of what its record says of it and of columns of its point. Kept are the points, the rows of the records without
columns of points, and of each row two numbers: that of its point, and that of what its record says. So a baseline, which stands
under every point of its problem with the same figures, is kept once.
"""

from __future__ import annotations

import hashlib
import marshal
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.report.reading.lean import numbered, repeated
from numdev.report.reading.typed import Growing

_SUBJECT = "subject"
_WITHOUT_REFERENCES = 2  # version of marshal: later ones write the same values differently, by who else holds them


@dataclass(frozen=True)
class Rows:
    """Rows of the records of some points, as a table that is not made as a whole.

    Attributes:
        points: the columns of the points that stand in front of their rows.
        own: what the records say, each different row once.
        point: for each row, the place of its point in `points`.
        place: for each row, the place of what its record says in `own`; None where that is the row's own number.
    """

    points: pd.DataFrame
    own: pd.DataFrame
    point: NDArray[np.int32]
    place: NDArray[np.int32] | None = None

    @classmethod
    def of(cls, table: pd.DataFrame | Rows) -> Rows:
        """Rows of a table, which is not copied."""
        if isinstance(table, Rows):
            return table
        return cls(pd.DataFrame(index=[0]), table, np.broadcast_to(np.zeros(1, dtype=np.int32), len(table)))

    def __len__(self) -> int:
        return len(self.point)

    def __contains__(self, name: object) -> bool:
        return name in self.points or name in self.own

    @property
    def columns(self) -> list[str]:
        """The names of the columns, those of the points first."""
        return list(dict.fromkeys(map(str, [*self.points.columns, *self.own.columns])))

    def column(self, name: str, at: NDArray[np.integer[Any]] | None = None) -> pd.Series[Any]:
        """One column, of the rows whose numbers are given, which are all unless given, by a new index.

        Of a name that points and records have, it is what the records say.
        """
        if name not in self.own:
            return repeated(self.points[name], self.point if at is None else self.point[at])
        if at is None:
            return self.own[name].reset_index(drop=True) if self.place is None else repeated(self.own[name], self.place)
        return repeated(self.own[name], self.places(at))

    def frame(self, at: NDArray[np.integer[Any]] | None = None, names: Sequence[str] | None = None) -> pd.DataFrame:
        """A table of rows and columns, which are all unless given; its index has the numbers of the rows."""
        index = pd.RangeIndex(len(self)) if at is None else pd.Index(at, dtype="int64")
        wanted = self.columns if names is None else names
        found = {name: self.column(name, at).set_axis(index) for name in wanted}
        made = pd.DataFrame(found, index=index, columns=list(wanted), copy=False)
        made.attrs = self.own.attrs
        return made

    def places(self, at: NDArray[np.integer[Any]]) -> NDArray[np.integer[Any]]:
        """The places in `own` of the rows whose numbers are given."""
        return at if self.place is None else self.place[at]

    def numbered(self, names: Iterable[str], at: NDArray[np.integer[Any]]) -> NDArray[np.int64]:
        """`numbered` of some columns, of the rows whose numbers are given; points are far fewer than rows and go first."""
        wanted = list(names)
        points = numbered((self.points[name] for name in wanted if name not in self.own), len(self.points))[self.point[at]]
        own = (self.column(name, at) for name in wanted if name in self.own)
        return numbered(chain([pd.Series(points)], own), len(at))

    def where(self, own: NDArray[np.bool_] | None = None, points: NDArray[np.bool_] | None = None) -> NDArray[np.int64]:
        """The numbers of the rows whose `own` row and whose point is chosen, in their order; without a choice every one is."""
        found = np.ones(len(self), dtype=np.bool_) if points is None else points[self.point]
        if own is not None:
            found &= own if self.place is None else own[self.place]
        return np.flatnonzero(found)


class Reading:
    """Rows while they are read. Those of one subject of a record are kept once, however many records have the same."""

    def __init__(self) -> None:
        self._own = Growing()
        self._length = 0
        self._known: dict[bytes, tuple[int, tuple[int, ...]]] = {}
        self._alike: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._places = array("i")
        self._counts = array("i")

    def add(self, rows: Sequence[dict[str, Any]]) -> None:
        """The rows of the next point."""
        blocks: dict[Any, list[int]] = {}
        for number, row in enumerate(rows):
            blocks.setdefault(row.get(_SUBJECT), []).append(number)
        digests = {subject: _digest([rows[number] for number in block]) for subject, block in blocks.items()}
        fresh = [subject for subject, digest in digests.items() if digest not in self._known]
        added = sorted(number for subject in fresh for number in blocks[subject])
        place = {number: i for i, number in enumerate(added)}
        for subject in fresh:
            places = tuple(place[number] for number in blocks[subject])
            self._known[digests[subject]] = self._length, self._alike.setdefault(places, places)
        self._own.extend([rows[number] for number in added])
        self._length += len(added)
        found = [0] * len(rows)
        for subject, block in blocks.items():
            start, places = self._known[digests[subject]]
            for number, own in zip(block, places, strict=True):
                found[number] = start + own
        self._places.extend(found)
        self._counts.append(len(rows))

    def typed(self, columns: list[str], points: pd.DataFrame) -> Rows:
        """All of them, after which nothing is added: with at least these columns, and those of `points` in front."""
        place = np.frombuffer(self._places, dtype=np.int32) if self._places else np.empty(0, dtype=np.int32)
        counts = np.array(self._counts, dtype=np.int64)
        point = np.repeat(np.arange(len(counts), dtype=np.int32), counts)
        is_plain = len(place) == self._length  # then no row was there twice, and rows were added in their order
        return Rows(points, self._own.typed(columns), point, None if is_plain else place)


def _digest(rows: list[dict[str, Any]]) -> bytes:
    """Of names and values, bit for bit: -0.0 is not 0.0, and 1 is not True."""
    return hashlib.blake2b(marshal.dumps(rows, _WITHOUT_REFERENCES), digest_size=16).digest()
