"""A table in Parquet, made in parts: the whole file in memory would take as much as the table again."""

from __future__ import annotations

import io
from collections.abc import Iterator
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from numdev.report.reading.rows import Rows

GROUP = 1 << 16  # rows of a row group; a row of deviations has about 70 columns, so a group takes some 40 MB


def parquet_of(table: pd.DataFrame | Rows, chosen: NDArray[np.bool_] | None = None) -> Iterator[bytes]:
    """A table, or those of its rows that are chosen, as a Parquet file in parts; numbers in full, the index left out.

    Each part is a row group of at most `GROUP` rows. Types and metadata are those of the whole table, so a column whose values
    are all missing in one group has the type that it has in the others: a reader gets what `DataFrame.to_parquet` would give.
    """
    import pyarrow as pa  # imported late: only who asks for Parquet needs it
    from pyarrow import parquet

    rows = Rows.of(table)
    places = np.arange(len(rows)) if chosen is None else np.flatnonzero(chosen)
    schema, sink = pa.Schema.from_pandas(rows.frame(places[:1]), preserve_index=False), _Sink()
    with parquet.ParquetWriter(sink, schema) as writer:
        for start in range(0, len(places), GROUP):
            own = rows.frame(places[start : start + GROUP])
            writer.write_table(pa.Table.from_pandas(own, schema=schema, preserve_index=False))
            yield sink.taken()
    yield sink.taken()  # what ends the file


class _Sink(io.RawIOBase):
    """A file that keeps what is written to it until that is taken."""

    def __init__(self) -> None:
        super().__init__()
        self._written = bytearray()
        self._before = 0

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._written += data
        return len(data)

    def tell(self) -> int:
        return self._before + len(self._written)

    def taken(self) -> bytes:
        """What was written since the last call."""
        found = bytes(self._written)
        self._before += len(found)
        self._written.clear()
        return found
