"""One measured point as plain data: what was measured, where, how it ended, and every figure."""

from __future__ import annotations

import html
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from enum import Enum
from typing import Any

from numdev.errors import NumdevError
from numdev.results.columns import Column, Use, column_of


class Status(Enum):
    """How a measurement ended."""

    OK = "ok"
    NONFINITE = "nonfinite"  # measured, but variant, baseline or golden holds NaN, or Inf where another has none
    ZERO = "zero"  # measured, but an output of the variant is 0 everywhere and golden's is not
    INVALID = "invalid"  # what the variant returned is no result: another shape, dtype or device
    UNSUPPORTED = "unsupported"  # the variant said that it cannot do this
    OUT_OF_MEMORY = "out_of_memory"
    ERROR = "error"


BAD_OUTPUT = (Status.NONFINITE, Status.ZERO, Status.INVALID)
"""How a measurement ends whose variant did not return what golden does; figures of such a point judge nothing."""


class OldResults(NumdevError):
    """Results of a numdev whose records did not state what they hold."""


Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Record:
    """One point.

    Attributes:
        key: see `numdev.results.canonical.key_of`.
        kind: of measurement, such as `deviation` or `speed`.
        operation: what was measured is an implementation of it.
        outputs: the names of the operation's outputs, the primary one first.
        columns: those of each table.
        config: canonical description of what was measured, such as problem, variant, baseline and seeds.
        environment: see `numdev.results.environment.environment`.
        status: how it ended; `reason` says why where it is not `ok`.
        tables: rows of figures by the table's name, the kind's primary table first; none where nothing was measured.
        seconds: wall time of the measurement.
        kernel: what really ran, as the variant says.
    """

    key: str
    kind: str
    operation: str
    outputs: tuple[str, ...]
    columns: dict[str, tuple[Column, ...]]
    config: dict[str, Any]
    environment: dict[str, str]
    status: Status
    reason: str = ""
    tables: dict[str, Rows] = field(default_factory=dict)
    seconds: float = 0.0
    kernel: str = ""

    @property
    def rows(self) -> Rows:
        """Those of the primary table."""
        return next(iter(self.tables.values()), [])

    def table(self, name: str) -> Rows:
        """Those of a table; none where nothing was measured."""
        return self.tables.get(name, [])

    @property
    def primary(self) -> tuple[Column, ...]:
        """The columns of the primary table."""
        return next(iter(self.columns.values()), ())

    def to_json(self, apart: Mapping[str, Any] | None = None) -> bytes:
        """The whole record, except that `apart` replaces tables that are stored separately."""
        columns = {name: [column.stated() for column in table] for name, table in self.columns.items()}
        stated = vars(self) | {"status": self.status.value, "columns": columns, "tables": {**self.tables, **(apart or {})}}
        return json.dumps(stated, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes, fetch: Callable[[Any], Rows] | None = None) -> Record:
        """Read what `to_json` wrote; `fetch` gets the rows of a table from what is said of it where it is kept apart.

        Raises:
            OldResults: for the record of an older numdev.
            ValueError: if the data are damaged or not a record.
        """
        try:
            loaded = json.loads(data)
            if "rows" in loaded and "kind" not in loaded:
                raise OldResults("results: a record does not state its kind, as those of an older numdev; measure it again")
            columns = {name: tuple(column_of(*each) for each in table) for name, table in loaded["columns"].items()}
            tables = {name: _rows(table, fetch) for name, table in loaded["tables"].items()}
            changed = {"status": Status(loaded["status"]), "outputs": tuple(loaded["outputs"])}
            return Record(**(loaded | changed | {"columns": columns, "tables": tables}))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a record: {error}") from None

    def summaries(self, metric: str = "max_difference") -> list[dict[str, Any]]:
        """Mean, 95 % confidence interval and range of a metric over seeds, for each place of the primary table."""
        groups: dict[tuple[Any, ...], list[float]] = {}
        names = [column.name for column in self.primary if column.use is Use.PLACE and column.name not in _REPLICATE]
        for row in self.rows:
            groups.setdefault(tuple(row[name] for name in names), []).append(float(row[metric]))
        return [dict(zip(names, group, strict=True)) | summary(values).as_dict() for group, values in groups.items()]

    def _cells(self) -> Iterator[tuple[str, ...]]:
        chief = [column.name for column in self.primary if column.use is Use.CHIEF]
        if not chief:  # as many figures as fit no line: one line each, a column per replicate
            shown = [column.name for column in self.primary if column.use is Use.FIGURE or column.name == "seed"]
            for name in shown:
                yield name, *(_text(row[name]) for row in self.rows)
            return
        by_metric = [self.summaries(name) for name in chief]
        places = [name for name in by_metric[0][0] if name not in _SUMMARY]
        yield *places, *(name.replace("_", " ") for name in chief)
        for together in zip(*by_metric, strict=True):
            yield *(str(together[0][name]) for name in places), *(f"{one['mean']:.3g}" for one in together)

    def __repr__(self) -> str:
        seeds = len({row["seed"] for row in self.rows})
        reason = f": {self.reason};" if self.reason else ","
        head = f"Record({self.status.value}{reason} {seeds} seeds, {self.seconds:.2f} s)"
        lines = list(self._cells()) if self.rows else []
        widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))] if lines else []
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([head, *table])

    def _repr_html_(self) -> str:
        header, *body = list(self._cells()) if self.rows else [("status",), (self.status.value,)]
        rows = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in line) + "</tr>" for line in body)
        reason = f": {html.escape(self.reason)};" if self.reason else ","
        caption = f"{self.status.value}{reason} {self.seconds:.2f} s"
        head = "".join(f"<th>{cell}</th>" for cell in header)
        return f"<table><caption>{caption}</caption><tr>{head}</tr>{rows}</table>"


_REPLICATE = ("seed", "cluster")  # places that a summary is taken over


def _rows(table: Any, fetch: Callable[[Any], Rows] | None) -> Rows:
    if isinstance(table, list):
        return table
    if fetch is None:
        raise ValueError("not a whole record: a table of it is kept apart")
    return fetch(table)


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


@dataclass(frozen=True)
class Summary:
    """Mean, 95 % confidence interval of the mean (Student's t) and range of some replicates."""

    mean: float
    low: float
    high: float
    least: float
    most: float
    count: int

    def as_dict(self) -> dict[str, float]:
        return asdict(self)


_SUMMARY = tuple(Summary.__dataclass_fields__)


def summary(values: list[float], confidence: float = 0.95) -> Summary:
    """Summarise replicates. One value alone has an infinitely wide interval; NaN anywhere makes every figure NaN."""
    count = len(values)
    if any(map(math.isnan, values)):
        return Summary(math.nan, math.nan, math.nan, math.nan, math.nan, count)
    mean = math.fsum(values) / count if all(map(math.isfinite, values)) else math.nan
    half = math.inf
    if count > 1:
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        half = student_quantile(confidence, count - 1) * math.sqrt(variance / count)
    return Summary(mean, mean - half, mean + half, min(values), max(values), count)


def student_quantile(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t."""
    from scipy.special import stdtrit  # imported late: scipy costs more than the rest of numdev's import

    quantile: Callable[[int, float], Any] = stdtrit
    return float(quantile(freedom, 0.5 + confidence / 2))
