"""One measurement: a variant against golden and against a baseline, over replicates.

Nothing here knows attention. A problem makes named inputs from a seed; a variant rounds them and returns named outputs; golden is
another such callable. What is compared is whatever tensors both return under the same name.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Hashable
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from numdev.deviation import Sample, compare
from numdev.environment import environment, resolve_device
from numdev.errors import BadInput, Unsupported
from numdev.formats import Format
from numdev.memory import LeastRecentlyUsed, available_bytes
from numdev.record import Record, Status, describe, key_of


@runtime_checkable
class Outputs(Protocol):
    """Named tensors, and events that the run counted."""

    @property
    def counters(self) -> dict[str, float]: ...
    def tensors(self) -> dict[str, Tensor]: ...


@runtime_checkable
class Measurable(Protocol):
    """An implementation of the operation under study."""

    @property
    def format(self) -> Format: ...
    @property
    def input_key(self) -> Hashable: ...
    def round_inputs(self, *inputs: Any, **named: Any) -> tuple[Tensor, ...]: ...
    def __call__(self, *inputs: Any, **arguments: Any) -> Outputs: ...


@runtime_checkable
class Reproducible(Protocol):
    """A problem: named inputs from a seed, the arguments that go with them, which replicates are alike, and its memory."""

    def inputs(self, seed: int, device: torch.device) -> dict[str, Tensor]: ...
    def arguments(self) -> dict[str, Any]: ...
    def cluster(self, seed: int) -> str: ...
    @property
    def bytes(self) -> int: ...


class Bench:
    """A device, and what has been computed on it for a problem: inputs, golden results, baselines.

    Golden and inputs are computed once per problem and seed, not once per point; the least recently used go first.

    Attributes:
        device: where everything runs.
        golden: the exact implementation.
    """

    def __init__(self, golden: Measurable, device: str = "auto", cache_bytes: int = 2 << 30) -> None:
        self.device = resolve_device(device)
        self.golden = golden
        self._kept = LeastRecentlyUsed(cache_bytes)

    def environment(self) -> dict[str, str]:
        return environment(self.device)

    def key(self, problem: Reproducible, variant: Measurable, baseline: Measurable | None, seeds: int) -> str:
        """The key under which `measure` files its record."""
        return key_of(self.config(problem, variant, baseline, seeds), self.environment())

    def config(self, problem: Reproducible, variant: Measurable, baseline: Measurable | None, seeds: int) -> dict[str, Any]:
        """The canonical configuration of a point."""
        parts = {"problem": problem, "variant": variant, "baseline": baseline, "seeds": seeds}
        return {name: describe(part) for name, part in parts.items()}

    def measure(self, problem: Reproducible, variant: Measurable, baseline: Measurable | None = None, seeds: int = 10) -> Record:
        """Measure a point; see `Record` for what comes back.

        Raises:
            BadInput: for a request that cannot be measured at all. Every other failure is a status of the record.
        """
        if seeds < 1:
            raise BadInput("seeds", seeds, "give the number of replicates, at least 1")
        self._check_memory(problem)
        config = self.config(problem, variant, baseline, seeds)
        key = key_of(config, self.environment())
        start, rows, counters = time.perf_counter(), [], []
        kernels: dict[str, None] = {}
        status, reason = Status.OK, ""
        try:
            for seed in range(seeds):
                found, counted, kernel = self._replicate(problem, variant, baseline, seed)
                rows += found
                kernels[kernel] = None
                counters.append({"seed": seed} | counted)
            kinds = ("variant", "golden")  # against one reference, so that a value is counted once
            wrong = sum(row["nan_count"] + row["inf_count"] for row in rows if (row["subject"], row["reference"]) == kinds)
            if wrong:
                status, reason = Status.NONFINITE, f"NaN or Inf in the variant or in golden alone, in {wrong} places in all"
        except Unsupported as error:
            status, reason = Status.UNSUPPORTED, str(error)
        except BadInput:
            raise
        except Exception as error:
            status, reason = failure(error)
        if status not in (Status.OK, Status.NONFINITE):
            rows, counters = [], []
        seconds = time.perf_counter() - start
        return Record(key, config, self.environment(), status, reason, rows, counters, seconds, "; ".join(kernels))

    def _replicate(
        self, problem: Reproducible, variant: Measurable, baseline: Measurable | None, seed: int
    ) -> tuple[list[dict[str, Any]], dict[str, float], str]:
        arguments = problem.arguments()
        output = variant(*self._rounded(problem, variant, seed), **arguments)
        samples = {name: Sample(tensor) for name, tensor in output.tensors().items()}
        references = self._golden(problem, variant, seed)
        place = {"seed": seed, "cluster": problem.cluster(seed)}
        rows = []
        if baseline is not None:
            references = references | {"baseline": self._baseline(problem, baseline, seed)}
            rows = self._kept.get(
                ("baseline rows", problem, baseline, seed),
                lambda: _rows(
                    "baseline",
                    self._baseline(problem, baseline, seed),
                    self._golden(problem, baseline, seed),
                    baseline.format,
                    place,
                ),
            )
        own = _rows("variant", samples, references, variant.format, place)
        return own + rows, output.counters, getattr(output, "kernel", "")

    def _inputs(self, problem: Reproducible, seed: int) -> tuple[Tensor, ...]:
        return self._kept.get(("inputs", problem, seed), lambda: tuple(problem.inputs(seed, self.device).values()))

    def _rounded(self, problem: Reproducible, variant: Measurable, seed: int) -> tuple[Tensor, ...]:
        return self._kept.get(
            ("rounded", problem, variant.input_key, seed), lambda: variant.round_inputs(*self._inputs(problem, seed))
        )

    def _golden(self, problem: Reproducible, variant: Measurable, seed: int) -> dict[str, dict[str, Sample]]:
        """Golden on the unrounded inputs, and on those that the variant sees."""

        def run(inputs: tuple[Tensor, ...]) -> dict[str, Sample]:
            return _samples(self.golden(*inputs, **problem.arguments()))

        unrounded = self._kept.get(("golden", problem, seed), lambda: run(self._inputs(problem, seed)))
        same = self._kept.get(("golden", problem, variant.input_key, seed), lambda: run(self._rounded(problem, variant, seed)))
        return {"golden": unrounded, "golden_same_inputs": same}

    def _baseline(self, problem: Reproducible, baseline: Measurable, seed: int) -> dict[str, Sample]:
        return self._kept.get(
            ("baseline", problem, baseline, seed),
            lambda: _samples(baseline(*self._rounded(problem, baseline, seed), **problem.arguments())),
        )

    def _check_memory(self, problem: Reproducible) -> None:
        free = available_bytes(self.device)
        if problem.bytes > free:
            gib = 2.0**30
            mend = f"{free / gib:.1f} GiB are free on {self.device.type}; use fewer queries, keys, heads or batch entries"
            raise BadInput("problem", f"about {problem.bytes / gib:.1f} GiB", mend)


def _samples(output: Outputs) -> dict[str, Sample]:
    return {name: Sample(tensor) for name, tensor in output.tensors().items()}


def _rows(
    subject: str,
    samples: dict[str, Sample],
    references: dict[str, dict[str, Sample]],
    fmt: Format,
    place: dict[str, Any],
) -> list[dict[str, Any]]:
    rows = []
    for reference, expected in references.items():
        for output, sample in samples.items():
            if output in expected:
                deviation = compare(sample, expected[output], fmt)
                head = place | {"subject": subject, "output": output, "reference": reference}
                rows.append(head | deviation.metrics() | {"max_index": list(deviation.max_index)})
    return rows


def failure(error: Exception) -> tuple[Status, str]:
    """How an unexpected error ends a point, and what a record says of it."""
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else ''}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return Status.OUT_OF_MEMORY, f"{reason}; use fewer queries, keys, heads or a smaller tiling.bc"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Status.ERROR, f"{reason} (in {frame.name}, line {frame.lineno})"
