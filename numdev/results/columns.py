"""What a column of a measurement's table says: its unit and meaning stand in every record, so that no reader guesses."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from functools import lru_cache


class Use(Enum):
    """What a column is for."""

    PLACE = "place"  # tells rows apart: which replicate, output, reference
    CHIEF = "chief"  # a figure that the shortest table shows
    FIGURE = "figure"
    NOTE = "note"  # neither a figure nor a place, such as an index or a reason


@dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
        name: of the column.
        unit: of its figures; empty where it has none.
        meaning: one sentence.
        use: see `Use`.
    """

    name: str
    unit: str = ""
    meaning: str = ""
    use: Use = Use.FIGURE

    def stated(self) -> list[str]:
        """As a record keeps it."""
        return [self.name, self.unit, self.meaning, self.use.value]


@lru_cache(maxsize=4096)
def column_of(name: str, unit: str, meaning: str, use: str) -> Column:
    """What `Column.stated` says; records of one kind share their columns.

    Raises:
        ValueError: for a use that does not exist.
    """
    return Column(name, unit, meaning, Use(use))
