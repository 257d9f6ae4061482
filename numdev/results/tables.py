"""Long tables of a record as Parquet, beside its JSON."""

from __future__ import annotations

import io
from typing import Any

LONG = 1000  # rows from which a table is kept apart


def pack(name: str, rows: list[dict[str, Any]]) -> bytes:
    """A table in Parquet, every number in full.

    Raises:
        ValueError: if its rows differ in their columns, or a column holds what is of no one type.
    """
    import pyarrow as pa  # imported late: only long tables need it
    from pyarrow import parquet

    columns = list(rows[0])
    if any(list(row) != columns for row in rows):
        raise ValueError(f"table {name}: every row of a long table needs the same columns, {', '.join(columns)}")
    buffer = io.BytesIO()
    parquet.write_table(pa.table({column: [row[column] for row in rows] for column in columns}), buffer, compression="zstd")
    return buffer.getvalue()


def unpack(data: bytes) -> list[dict[str, Any]]:
    """The rows that `pack` wrote.

    Raises:
        ValueError: if the data are no Parquet.
    """
    from pyarrow import parquet

    rows: list[dict[str, Any]] = parquet.read_table(io.BytesIO(data)).to_pylist()
    return rows
