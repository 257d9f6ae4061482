"""Runs any kind of measurement: the base of a kind, and the key, replicates and status for every failure that each gets."""

from __future__ import annotations

import errno
import math
import time
import traceback
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, TypeVar, Unpack

import torch
from cachetools import LRUCache

from numdev.errors import BadInput, BadOutput, StoreError, Unsupported
from numdev.measurement.operation import Operation
from numdev.results.environment import environment, resolve_device
from numdev.results.record import Column, OnReplicate, Record, Status, Use, Where, Within, describe, key_of
from numdev.sources import foreign

CACHE_BYTES = 2 << 30
Value = TypeVar("Value")


class Point(NamedTuple):
    """A point to measure: the problem and the implementations of an operation, and the number of replicates."""

    problem: Any
    variant: Any
    baseline: Any
    seeds: int


@dataclass(frozen=True)
class Findings:
    """The result of a measurement."""

    tables: dict[str, list[dict[str, Any]]]  # rows by the table's name; each table of the point's columns, in that order
    kernel: str = ""  # the kernel that really ran; empty for tensor operations
    nonfinite: str = ""  # which results hold NaN or Inf, and how many; empty if none do
    zero: str = ""  # which results of the variant are 0 everywhere, where golden's are not; empty if none are


class Kept:
    """Values by key that several points need, such as golden results; evicts the least recently used beyond a number of bytes.

    `numdev measure study=fig4 seeds=2` takes 2.1 times as long without.
    """

    def __init__(self, limit: int) -> None:
        # LRUCache refuses a value larger than its limit; counted as the whole limit, the value evicts all others.
        self._entries = LRUCache[Hashable, Any](limit, getsizeof=lambda value: min(_bytes(value), limit))

    def get(self, key: Hashable, make: Callable[[], Value]) -> Value:
        """The value of a key; `make` computes it where none is kept."""
        if key not in self._entries:
            self._entries[key] = make()
        value: Value = self._entries[key]
        return value


def _bytes(value: Any) -> int:
    """Bytes of a value: those that it states, as a tensor does, or the sum of its parts'."""
    if isinstance(value, (dict, tuple, list)):
        return sum(map(_bytes, value.values() if isinstance(value, dict) else value))
    return int(getattr(value, "nbytes", 64))


@dataclass(frozen=True)
class Context:
    """Where a measurement runs."""

    device: torch.device  # where everything runs
    seeds: int  # the number of replicates
    kept: Kept  # what measurements on this device share, such as golden results
    # For what an interruption would lose; it stays until the record is stored. None if nothing is stored.
    folder: Path | None = None
    on_replicate: OnReplicate | None = None  # called with the number of replicates that are done
    within: Within | None = None  # called with the progress within a long replicate
    # A permanent folder for what several points share and takes long, such as a training run. The measurement ensures that two
    # processes do not write the same files. None if nothing is stored.
    shared: Path | None = None

    def replicates(self) -> Iterator[int]:
        """The seeds; calls `on_replicate` after each."""
        for seed in range(self.seeds):
            yield seed
            if self.on_replicate is not None:
                self.on_replicate(seed + 1, self.seeds)


class Kind(ABC):
    """Base of a kind of measurement, a frozen dataclass with an `operation`."""

    name: ClassVar[str]  # by which records state it
    seeds: ClassVar[int] = 10  # replicates unless a number is given
    operation: Operation

    @property
    @abstractmethod
    def columns(self) -> dict[str, tuple[Column, ...]]:
        """The columns of each table, the primary table first."""

    @property
    def figures(self) -> list[str]:
        """The figures of the primary table, one of which a sweeper may minimise."""
        columns = next(iter(self.columns.values()))
        return [column.name for column in columns if column.use in (Use.CHIEF, Use.FIGURE) and column.unit]

    @property
    def comparable(self) -> list[str]:
        """The columns that the claims and the plot of a study may name."""
        return self.figures

    def figure(self, name: str, record: Record) -> float | None:
        """The mean over seeds of one of `figures`, of the variant from golden; None where a point has none, or is not sound.

        The figure of the elements that are left of an output with NaN would win a search.
        """
        output, _, column = name.rpartition(".")
        own = ("variant", "golden", output or record.outputs[0])
        rows = [row for row in record.rows if (row["subject"], row["reference"], row["output"]) == own]
        if not rows or record.status is not Status.OK:
            return None
        return math.fsum(self.completed(row)[column] for row in rows) / len(rows)

    def completed(self, row: Mapping[str, Any]) -> Mapping[str, Any]:
        """A row with the figures that are computed from it and not stored."""
        return row

    def columns_of(self, point: Point) -> dict[str, tuple[Column, ...]]:
        """Those of one point, where they depend on it."""
        return self.columns

    def config(self, point: Point) -> dict[str, Any]:
        """The canonical description of a point, with the source code of classes that are not part of numdev.

        Raises:
            BadInput: for what this kind does not measure, and where the file of such a class has changed since it was imported.
        """
        return {name: describe(part) for name, part in point._asdict().items()} | foreign(*point)

    def needed_bytes(self, problem: Any, variant: Any) -> int:
        """Memory that a point needs at least; 0 where the problem does not say."""
        return int(getattr(problem, "bytes", 0))

    @abstractmethod
    def run(self, point: Point, context: Context) -> Findings:
        """Measure a point.

        Raises:
            Unsupported: naming the setting, for what cannot be measured.
            BadInput: naming the setting, for what cannot be used.
        """


class Runner:
    """Measures points in one way on one device.

    Inputs and golden results are computed once per problem and seed, not once per point, and evicted least recently used first.
    """

    def __init__(self, kind: Kind, device: str = "auto", cache_bytes: int = CACHE_BYTES) -> None:
        self.kind = kind
        self.device = resolve_device(device)
        self._kept = Kept(cache_bytes)

    def environment(self) -> dict[str, str]:
        """Everything that may change a bit of a result: that of torch and the processor, and what the operation names."""
        return environment(self.device) | self.kind.operation.environment(self.device)

    def config(self, problem: Any, variant: Any, baseline: Any = None, seeds: int | None = None) -> dict[str, Any]:
        """The canonical configuration of a point; raises what `Kind.config` does."""
        return self.kind.config(self._point(problem, variant, baseline, seeds))

    def key(self, problem: Any, variant: Any, baseline: Any = None, seeds: int | None = None) -> str:
        """The key under which `measure` files its record."""
        return self._key(self.config(problem, variant, baseline, seeds), self.environment())

    def measure(
        self, problem: Any, variant: Any, baseline: Any = None, seeds: int | None = None, **where: Unpack[Where]
    ) -> Record:
        """Measure a point; see `Record` for what comes back, `Context` for `folder`, `shared`, `on_replicate` and `within`.

        Raises:
            BadInput: for a request that cannot be measured at all.
            StoreError: where the disk is full. Every other failure is a status of the record.
        """
        point = self._point(problem, variant, baseline, seeds)
        if point.seeds < 1:
            raise BadInput("seeds", point.seeds, "give the number of replicates, at least 1")
        unmeasured, start = self.unmeasured(point), time.perf_counter()
        findings, reason = Findings(unmeasured.tables), ""
        try:
            findings = self.kind.run(point, Context(self.device, point.seeds, self._kept, **where))
            reason = "; ".join(filter(None, (findings.nonfinite, findings.zero)))
            status = Status.NONFINITE if findings.nonfinite else Status.ZERO if findings.zero else Status.OK
        except Unsupported as error:
            status, reason = Status.UNSUPPORTED, str(error)
        except BadOutput as error:
            status, reason = Status.INVALID, str(error)
        except (BadInput, StoreError):
            raise
        except (Exception, SystemExit) as error:
            if isinstance(error, SystemExit) and type(error) is not SystemExit:  # the command ends this process
                raise
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise StoreError(f"results: {error}; free some space, then run again") from error
            status, reason = failure(error, self.kind.operation.smaller)
        seconds, tables = time.perf_counter() - start, findings.tables
        return replace(unmeasured, status=status, reason=reason, tables=tables, seconds=seconds, kernel=findings.kernel)

    def _point(self, problem: Any, variant: Any, baseline: Any, seeds: int | None) -> Point:
        return Point(problem, variant, baseline, self.kind.seeds if seeds is None else seeds)

    def _key(self, config: dict[str, Any], facts: dict[str, str]) -> str:
        return key_of({"kind": self.kind.name, "operation": self.kind.operation.name} | config, facts)

    def unmeasured(self, parts: tuple[Any, Any, Any, int], status: Status = Status.OK, reason: str = "") -> Record:
        """Everything that a record states before there are figures, or of a point that has none, and why."""
        point = Point(*parts)
        config, facts, columns = self.kind.config(point), self.environment(), self.kind.columns_of(point)
        return Record(
            key=self._key(config, facts),
            kind=self.kind.name,
            operation=self.kind.operation.name,
            outputs=self.kind.operation.output_names,
            columns=columns,
            config=config,
            environment=facts,
            status=status,
            reason=reason,
            tables={name: [] for name in columns},
            facts=self.kind.operation.facts(config),
        )


def failure(error: Exception | SystemExit, smaller: str) -> tuple[Status, str]:
    """How an unexpected error ends a point, and what a record says of it; `smaller` is what to use where memory ends."""
    text = f"it called sys.exit({error.code!r})" if isinstance(error, SystemExit) else str(error)
    reason = f"{type(error).__name__}: {''.join(text.strip().splitlines()[:1])}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return Status.OUT_OF_MEMORY, f"{reason}; use {smaller}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Status.ERROR, f"{reason} (in {frame.name} of {Path(frame.filename).name}, line {frame.lineno})"
