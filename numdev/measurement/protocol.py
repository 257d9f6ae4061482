"""The protocols of a kind of measurement, which creates measurements of points, and of a measurement."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar, runtime_checkable

import torch
from cachetools import LRUCache

from numdev.measurement.operation import Operation
from numdev.results.record import Column, Told, Within, describe
from numdev.user_code import foreign

Value = TypeVar("Value")


@dataclass(frozen=True)
class Findings:
    """The result of a measurement.

    Attributes:
        tables: rows by the table's name; each table of `Measurement.columns`, in that order.
        kernel: the kernel that really ran; empty for tensor operations.
        nonfinite: which results hold NaN or Inf, and how many; empty if none do.
        zero: which results of the variant are 0 everywhere, where golden's are not; empty if none are.
    """

    tables: dict[str, list[dict[str, Any]]]
    kernel: str = ""
    nonfinite: str = ""
    zero: str = ""


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
    """Where a measurement runs.

    Attributes:
        device: where everything runs.
        seeds: the number of replicates.
        kept: what measurements on this device share, such as golden results.
        folder: a folder of the measurement's own, for what an interruption would lose; it is kept until the record is stored.
            The measurement creates it. None if nothing is stored.
        told: called with the number of replicates that are done.
        within: called with the progress within a long replicate.
        shared: a permanent folder for what several points share and takes long, such as a training run. The measurement creates
            it, and ensures that two processes do not write the same files. None if nothing is stored.
    """

    device: torch.device
    seeds: int
    kept: Kept
    folder: Path | None = None
    told: Told | None = None
    within: Within | None = None
    shared: Path | None = None

    def replicates(self) -> Iterator[int]:
        """The seeds; calls `told` after each."""
        for seed in range(self.seeds):
            yield seed
            if self.told is not None:
                self.told(seed + 1, self.seeds)


def configuration(**parts: Any) -> dict[str, Any]:
    """The canonical description of the parts of a point, with the source code of classes that are not part of numdev.

    Raises:
        BadInput: where the file of such a class has changed since it was imported.
    """
    return {name: describe(part) for name, part in parts.items()} | foreign(*parts.values())


@runtime_checkable
class Measurement(Protocol):
    """One point, measured in one way.

    `config` is its canonical description (`numdev.results.record.describe`); `columns` has the columns of each table, the
    primary table first. `run` raises `Unsupported` or `BadInput`, naming the field, if the point cannot be measured.
    """

    @property
    def kind(self) -> str: ...
    @property
    def operation(self) -> Operation: ...
    @property
    def seeds(self) -> int: ...
    @property
    def config(self) -> dict[str, Any]: ...
    @property
    def columns(self) -> dict[str, tuple[Column, ...]]: ...
    def run(self, context: Context) -> Findings: ...


@runtime_checkable
class MeasurementKind(Protocol):
    """A kind of measurement, which creates the measurement of a point.

    `seeds` is the default number of replicates; `columns` has the columns of each table of its measurements, the primary table
    first.
    """

    @property
    def name(self) -> str: ...
    @property
    def operation(self) -> Operation: ...
    @property
    def seeds(self) -> int: ...
    @property
    def columns(self) -> dict[str, tuple[Column, ...]]: ...
    def of(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> Measurement: ...


@runtime_checkable
class LooksAhead(Protocol):
    """A kind that does some work for several points together, and therefore must know which points will follow."""

    def announce(self, points: Iterable[tuple[Any, Any]]) -> None:
        """Problem and variant of each point that will be measured, in this order."""
        ...
