"""One measured point as plain data: its key, what was measured, where, how it ended, and every figure with unit and meaning."""

from __future__ import annotations

import errno
import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, fields, is_dataclass, replace
from enum import Enum, StrEnum
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any, TypedDict

from numdev.errors import StoreError


class Use(Enum):
    """Purpose of a column."""

    PLACE = "place"  # tells rows apart: which replicate, output, reference
    CHIEF = "chief"  # a figure that the shortest table shows
    FIGURE = "figure"
    NOTE = "note"  # neither a figure nor a place, such as an index or a reason


@dataclass(frozen=True)
class Column:
    """A column of a table: the unit of its figures, its meaning in one sentence, and its use. Every record states its own."""

    name: str
    unit: str = ""
    meaning: str = ""
    use: Use = Use.FIGURE


def describe(value: object) -> Any:
    """A value object as plain data, in one canonical form, which a key hashes.

    The result of an object's `describe()` counts; else a dataclass becomes its class name and its fields, with the `digest` of
    the file that it stands for, and an Enum its value.

    Raises:
        TypeError: for a value without such a form.
    """
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if not isinstance(value, type):
        if callable(own := getattr(value, "describe", None)):
            return describe(own())
        if isinstance(value, Enum):
            return value.value
        if is_dataclass(value):
            known = {"type": type(value).__name__}
            for each in fields(value):  # 4 and 4.0 are equal, and so are objects that hold them
                item = getattr(value, each.name)
                known[each.name] = describe(float(item) if isinstance(item, int) and "float" in str(each.type) else item)
            return known | ({"digest": value.digest} if hasattr(value, "digest") else {})
    if isinstance(value, (tuple, list)):
        return [describe(item) for item in value]
    if isinstance(value, Mapping):
        return {str(key): describe(item) for key, item in value.items()}
    raise TypeError(f"{type(value).__name__} has no canonical form")


def plain(value: object) -> dict[str, Any]:
    """The fields of a scenario or claim, as a manifest keeps them."""
    described: dict[str, Any] = describe(value)
    return {name: value for name, value in described.items() if name != "type"}


def key_of(config: Mapping[str, Any], environment: Mapping[str, str]) -> str:
    """The point's key: a hash of its canonical configuration, of the sources that computed it and of the environment.

    The environment holds the digest of numdev's sources (`numdev.sources`), the configuration that of a user's function and of a
    captured file. `revision` is information for the reader: neither a commit nor documentation gives another key.
    """
    facts = {name: value for name, value in environment.items() if name != "revision"}
    text = json.dumps({"config": config, "environment": facts}, sort_keys=True, allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()[:32]


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
DONE = (Status.OK, *BAD_OUTPUT, Status.UNSUPPORTED)
"""How a measurement ends that a resumed study does not repeat."""


class Reference(StrEnum):
    """The other side of a comparison; `numdev.measurement.deviation.COMPARISON` explains each."""

    GOLDEN = "golden"
    GOLDEN_SAME_INPUTS = "golden_same_inputs"
    BASELINE = "baseline"


OnReplicate = Callable[[int, int], None]  # replicates of a point done, replicates in all
Within = Callable[[int, int, str], None]  # steps of the replicate at hand that are done, in all, and what it does
Rows = list[dict[str, Any]]


class Where(TypedDict, total=False):
    """Arguments of a measurement beside its point: folders for what it keeps, and listeners to its progress.

    See `numdev.measurement.runner.Context`.
    """

    folder: Path | None
    shared: Path | None
    on_replicate: OnReplicate | None
    within: Within | None


@dataclass(frozen=True)
class Record:
    """One point."""

    key: str  # see `key_of`
    kind: str  # of measurement, such as `deviation` or `speed`
    operation: str  # what was measured is an implementation of it
    outputs: tuple[str, ...]  # the names of the operation's outputs, the primary one first
    columns: dict[str, tuple[Column, ...]]  # those of each table
    config: dict[str, Any]  # canonical description of what was measured, such as problem, variant, baseline and seeds
    environment: dict[str, str]  # see `numdev.results.environment.environment`
    status: Status  # how it ended
    reason: str = ""  # why, where it is not `ok`
    tables: dict[str, Rows] = field(default_factory=dict)  # rows by the table's name, the primary one first
    seconds: float = 0.0  # wall time of the measurement
    kernel: str = ""  # what really ran, as the variant says
    facts: dict[str, Any] = field(default_factory=dict)  # what follows from `config`, as the operation declares

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
        columns = {name: [[c.name, c.unit, c.meaning, c.use.value] for c in table] for name, table in self.columns.items()}
        plain = vars(self) | {"status": self.status.value, "columns": columns, "tables": {**self.tables, **(apart or {})}}
        return json.dumps(plain, separators=(",", ":")).encode()

    @staticmethod
    def from_json(data: bytes, fetch: Callable[[Any], Rows] | None = None) -> Record:
        """Read what `to_json` wrote; `fetch` gets the rows of a table from what is said of it where it is kept apart.

        Raises:
            ValueError: if the data are damaged or not a record.
        """
        try:
            loaded = json.loads(data)
            columns = {name: tuple(_column(*each) for each in table) for name, table in loaded["columns"].items()}
            apart = {name: table for name, table in loaded["tables"].items() if not isinstance(table, list)}
            if apart and fetch is None:
                raise ValueError("not a whole record: a table of it is kept apart")
            tables = loaded["tables"] | {name: fetch(table) for name, table in apart.items() if fetch is not None}
            changed = {"status": Status(loaded["status"]), "outputs": tuple(loaded["outputs"]), "facts": loaded["facts"]}
            return Record(**(loaded | changed | {"columns": columns, "tables": tables}))
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a record: {error}") from None

    @staticmethod
    def joined(records: Sequence[Record]) -> Record:
        """Records of single replicates as one of all, with the key of the first, and the first status that is not `ok`."""
        first = records[0]
        if len(records) == 1:
            return first
        status = next((one.status for one in records if one.status is not Status.OK), Status.OK)
        return replace(
            first,
            status=status,
            reason="; ".join(dict.fromkeys(one.reason for one in records if one.reason)),
            tables={name: [row for one in records for row in one.table(name)] for name in first.columns},
            config=first.config | {"seeds": sum(one.config["seeds"] for one in records)},
            seconds=math.fsum(one.seconds for one in records),
        )

    def summaries(self, metric: str = "max_difference") -> list[dict[str, Any]]:
        """Mean, 95 % confidence interval and range of a metric over seeds, for each place of the primary table."""
        groups: dict[tuple[Any, ...], list[float]] = {}
        names = [column.name for column in self.primary if column.use is Use.PLACE and column.name not in ("seed", "cluster")]
        for row in self.rows:
            groups.setdefault(tuple(row[name] for name in names), []).append(float(row[metric]))
        return [dict(zip(names, group, strict=True)) | asdict(summary(values)) for group, values in groups.items()]

    def _cells(self) -> Iterator[tuple[str, ...]]:
        """A line for each place, with the means of the chief figures."""
        figures = [own for own in self.primary if own.use is Use.FIGURE and isinstance(self.rows[0].get(own.name), (int, float))]
        chief = [own.name for own in [own for own in self.primary if own.use is Use.CHIEF] or figures[:5]]
        by_metric = [self.summaries(name) for name in chief]
        places = [name for name in by_metric[0][0] if name not in Summary.__dataclass_fields__]
        yield *places, *(name.replace("_", " ") for name in chief)
        for of_place in zip(*by_metric, strict=True):
            yield *(str(of_place[0][name]) for name in places), *(f"{one['mean']:.3g}" for one in of_place)

    def __repr__(self) -> str:
        seeds = len({row["seed"] for row in self.rows})
        lines, reason = list(self._cells()) if self.rows else [], f": {self.reason};" if self.reason else ","
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        table = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
        return "\n".join([f"Record({self.status.value}{reason} {seeds} seeds, {self.seconds:.2f} s)", *table])


@lru_cache(maxsize=4096)  # records of one kind share their columns: those of a large study would not fit into memory
def _column(name: str, unit: str, meaning: str, use: str) -> Column:
    return Column(name, unit, meaning, Use(use))


@dataclass(frozen=True)
class Summary:
    """Mean, 95 % confidence interval of the mean (Student's t) and range of some replicates."""

    mean: float
    low: float
    high: float
    least: float
    most: float
    count: int


def summary(values: list[float]) -> Summary:
    """Summarise replicates. One value alone has an infinitely wide interval; NaN anywhere makes every figure NaN."""
    count = len(values)
    if any(map(math.isnan, values)):
        return Summary(math.nan, math.nan, math.nan, math.nan, math.nan, count)
    mean = math.fsum(values) / count if all(map(math.isfinite, values)) else math.nan
    half = math.inf
    if count > 1:
        variance = sum((value - mean) ** 2 for value in values) / (count - 1)
        half = student_quantile(0.95, count - 1) * math.sqrt(variance / count)
    return Summary(mean, mean - half, mean + half, min(values), max(values), count)


def student_quantile(confidence: float, freedom: int) -> float:
    """The two-sided quantile of Student's t."""
    from scipy.special import stdtrit  # imported late: scipy costs more than the rest of numdev's import

    quantile: Callable[[int, float], Any] = stdtrit
    return float(quantile(freedom, 0.5 + confidence / 2))


WINDOW, FACTOR = 40, 7.0
_NORMAL = 1.4826  # 1 / 0.6745, the upper quartile of the standard normal distribution


def spike_limit(ordinary: Sequence[float]) -> float:
    """The loss above which a step spikes after ordinary ones; infinite before there are `WINDOW` of these.

    `FACTOR` standard deviations above the median of the last `WINDOW`, by the median absolute deviation.
    """
    if len(ordinary) < WINDOW:
        return math.inf
    middle = median(ordinary[-WINDOW:])
    return middle + FACTOR * _NORMAL * median(abs(value - middle) for value in ordinary[-WINDOW:])


def write_atomically(path: Path, data: bytes) -> None:
    """Write `data` to `path` or nothing: temporary file, fsync, rename, fsync of the folder.

    Two writers of one path each leave a whole file; the last rename stands.

    Raises:
        StoreError: if the disk is full or the folder cannot be written; the temporary file is removed.
    """
    temporary = ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.umask(mask := os.umask(0))
        os.chmod(temporary, 0o666 & ~mask)
        os.replace(temporary, path)
    except OSError as error:
        hint = "free some space" if error.errno == errno.ENOSPC else "check that the folder exists and may be written"
        raise StoreError(f"results: {path} could not be written ({error.strerror}); {hint}, then run again") from error
    finally:
        if os.path.exists(temporary):
            os.unlink(temporary)
    with suppress(OSError):  # not every file system lets a folder be opened
        descriptor = os.open(path.parent, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
