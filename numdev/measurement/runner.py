"""Runs any kind of measurement: its key, its replicates, and the status for every failure."""

from __future__ import annotations

import errno
import time
import traceback
from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Unpack

import torch

from numdev.errors import BadInput, BadOutput, StoreError, Unsupported
from numdev.measurement.protocol import Context, Kept, LooksAhead, Measurement, MeasurementKind
from numdev.results.environment import environment, resolve_device
from numdev.results.record import Column, Record, Status, Where, key_of

CACHE_BYTES = 2 << 30


class Runner:
    """Measures points in one way on one device.

    Inputs and golden results are computed once per problem and seed, not once per point, and evicted least recently used first.

    Attributes:
        kind: makes the measurement of a point.
        device: where everything runs.
    """

    def __init__(self, kind: MeasurementKind, device: str = "auto", cache_bytes: int = CACHE_BYTES) -> None:
        self.kind = kind
        self.device = resolve_device(device)
        self._kept = Kept(cache_bytes)

    @property
    def kind_name(self) -> str:
        return self.kind.name

    @property
    def settings(self) -> tuple[Column, ...]:
        """Meanings of the settings of a point, as its operation declares them."""
        return self.kind.operation.settings()

    def environment(self) -> dict[str, str]:
        """Everything that may change a bit of a result: that of torch and the processor, and what the operation names."""
        return environment(self.device) | self.kind.operation.environment(self.device)

    def config(self, problem: Any, variant: Any, baseline: Any = None, seeds: int | None = None) -> dict[str, Any]:
        """The canonical configuration of a point.

        Raises:
            BadInput: for what this kind does not measure, and where the file of a class of the user's has changed since it was
                imported.
        """
        return self._of(problem, variant, baseline, seeds).config

    def key(self, problem: Any, variant: Any, baseline: Any = None, seeds: int | None = None) -> str:
        """The key under which `measure` files its record."""
        measurement = self._of(problem, variant, baseline, seeds)
        return _key(measurement, measurement.config, self.environment())

    def announce(self, points: Iterable[tuple[Any, Any]]) -> None:
        """Problem and variant of the points that will be measured, in this order."""
        if isinstance(self.kind, LooksAhead):
            self.kind.announce(points)

    def measure(
        self,
        problem: Any,
        variant: Any,
        baseline: Any = None,
        seeds: int | None = None,
        **where: Unpack[Where],
    ) -> Record:
        """Measure a point; see `Record` for what comes back, `Context` for `folder`, `shared`, `told` and `within`.

        Raises:
            BadInput: for a request that cannot be measured at all.
            StoreError: where the disk is full. Every other failure is a status of the record.
        """
        return self.run(self._of(problem, variant, baseline, seeds), **where)

    def run(self, measurement: Measurement, **where: Unpack[Where]) -> Record:
        """Run a measurement that is at hand."""
        if measurement.seeds < 1:
            raise BadInput("seeds", measurement.seeds, "give the number of replicates, at least 1")
        unmeasured, start = self._unmeasured(measurement), time.perf_counter()
        tables, kernel, reason = unmeasured.tables, "", ""
        try:
            findings = measurement.run(Context(self.device, measurement.seeds, self._kept, **where))
            tables, kernel = findings.tables, findings.kernel
            reason = "; ".join(filter(None, (findings.nonfinite, findings.zero)))
            status = Status.NONFINITE if findings.nonfinite else Status.ZERO if findings.zero else Status.OK
        except Unsupported as error:
            status, reason = Status.UNSUPPORTED, str(error)
        except BadOutput as error:
            status, reason = Status.INVALID, str(error)
        except (BadInput, StoreError):
            raise
        except Exception as error:
            if isinstance(error, OSError) and error.errno == errno.ENOSPC:
                raise StoreError(f"results: {error}; free some space, then run again") from error
            status, reason = failure(error, measurement.operation.smaller)
        seconds = time.perf_counter() - start
        return replace(unmeasured, status=status, reason=reason, tables=tables, seconds=seconds, kernel=kernel)

    def without_figures(self, point: Point, status: Status, reason: str) -> Record:
        """The record of a point, problem, variant, baseline and seeds, that is not measured, and why."""
        return replace(self._unmeasured(self._of(*point)), status=status, reason=reason)

    def _of(self, problem: Any, variant: Any, baseline: Any, seeds: int | None) -> Measurement:
        return self.kind.of(problem, variant, baseline, self.kind.seeds if seeds is None else seeds)

    def _unmeasured(self, measurement: Measurement) -> Record:
        """Everything that a record states before there are figures."""
        config, facts, operation = measurement.config, self.environment(), measurement.operation
        return Record(
            key=_key(measurement, config, facts),
            kind=measurement.kind,
            operation=operation.name,
            outputs=operation.output_names,
            columns=measurement.columns,
            config=config,
            environment=facts,
            status=Status.OK,
            tables={name: [] for name in measurement.columns},
        )


Point = tuple[Any, Any, Any, int]


def _key(measurement: Measurement, config: dict[str, Any], facts: dict[str, str]) -> str:
    return key_of({"kind": measurement.kind, "operation": measurement.operation.name} | config, facts)


def failure(error: Exception, smaller: str) -> tuple[Status, str]:
    """How an unexpected error ends a point, and what a record says of it; `smaller` is what to use where memory ends."""
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else ''}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return Status.OUT_OF_MEMORY, f"{reason}; use {smaller}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Status.ERROR, f"{reason} (in {frame.name}, line {frame.lineno})"
