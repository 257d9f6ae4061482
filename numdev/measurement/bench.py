"""One measurement: a variant against golden and against a baseline, over replicates.

Nothing here knows attention. A problem makes named inputs from a seed; a variant rounds them and returns named outputs; golden is
another such callable. What is compared is whatever tensors both return under the same name.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Hashable, Iterator, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.cache import LeastRecentlyUsed
from numdev.errors import BadInput, Unsupported
from numdev.measurement.deviation import Sample, compare
from numdev.memory import available_bytes
from numdev.results.environment import environment, resolve_device
from numdev.results.record import Record, Status, describe, key_of
from numdev.usersource import foreign


@runtime_checkable
class Outputs(Protocol):
    """Named tensors, and events that the run counted."""

    @property
    def counters(self) -> dict[str, float]: ...
    def tensors(self) -> dict[str, Tensor]: ...


@runtime_checkable
class Measurable(Protocol):
    """An implementation of the operation under study.

    `formats` has the format of each output that it can return, by name, the primary one first.
    """

    @property
    def formats(self) -> Mapping[str, Format]: ...
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


@runtime_checkable
class Random(Protocol):
    """An implementation that draws random numbers: in each replicate others."""

    def replicate(self, seed: int) -> Measurable: ...


def _of_replicate(subject: Measurable, seed: int) -> Measurable:
    return subject.replicate(seed) if isinstance(subject, Random) else subject


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

    def key(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> str:
        """The key under which `measure` files its record."""
        return key_of(self.config(problem, variant, baseline, seeds), self.environment())

    def config(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> dict[str, Any]:
        """The canonical configuration of a point, with the sources of what is no class of numdev's own.

        Raises:
            BadInput: where the file of such a class has changed since it was imported.
        """
        parts = {"problem": problem, "variant": variant, "baseline": baseline, "seeds": seeds}
        return {name: describe(part) for name, part in parts.items()} | foreign(problem, variant, baseline)

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
                subjects = _of_replicate(variant, seed), None if baseline is None else _of_replicate(baseline, seed)
                found, counted, kernel = self._replicate(problem, *subjects, seed)
                rows += found
                kernels[kernel] = None
                counters.append({"seed": seed} | counted)
            if reason := nonfinite(rows):
                status = Status.NONFINITE
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
        output = variant(*self._rounded(problem, variant, seed), **problem.arguments())
        samples, references = _samples(output), self._golden(problem, variant, seed)
        rows, others = [], dict[str, Sample]()
        if baseline is not None:
            others = self._baseline(problem, baseline, seed)
            references = references | {"baseline": others}
            rows = self._baseline_rows(problem, baseline, samples, seed)
        place = {"seed": seed, "cluster": problem.cluster(seed)}
        found = list(_rows("variant", samples, references, others, variant.formats, place))
        return found + rows, output.counters, getattr(output, "kernel", "")

    def _baseline_rows(
        self, problem: Reproducible, baseline: Measurable, variant: dict[str, Sample], seed: int
    ) -> list[dict[str, Any]]:
        """The same for every variant of finite results, and so kept for them."""

        def made() -> list[dict[str, Any]]:
            samples, references = self._baseline(problem, baseline, seed), self._golden(problem, baseline, seed)
            place = {"seed": seed, "cluster": problem.cluster(seed)}
            return list(_rows("baseline", samples, references, variant, baseline.formats, place))

        if all(sample.is_finite for sample in variant.values()):
            return self._kept.get(("baseline rows", problem, baseline, seed), made)
        return made()

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
    others: dict[str, Sample],
    formats: Mapping[str, Format],
    place: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    """Each output of a subject against each reference, in ulp and u of the output's own format.

    `others` are the outputs of the other one of variant and baseline. Where one of these is not finite, the subject is not
    compared either: figures of variant and baseline that stand side by side are taken over the same elements.
    """
    for reference, expected in references.items():
        for output, sample in samples.items():
            if output in expected:
                other = others.get(output)
                leave_out = None if other is None or other.is_finite else ~other.values.isfinite()
                deviation = compare(sample, expected[output], formats[output], leave_out)
                head = place | {"subject": subject, "output": output, "reference": reference}
                yield head | deviation.metrics() | {"max_index": list(deviation.max_index)}


def nonfinite(rows: list[dict[str, Any]]) -> str:
    """Whose results hold NaN, or Inf where another has none, and in how many places of all outputs and seeds; or nothing.

    Variant and baseline are told by the comparison with golden. Golden's own are told by that with the variant.
    """
    found = {}
    for subject in ("variant", "baseline"):
        own = [row for row in rows if (row["subject"], row["reference"]) == (subject, "golden")]
        found[subject] = _total(own, ("nan_count", "both_nan_count"), ("inf_count",))
        if subject == "variant":
            found["golden"] = _total(own, ("reference_nan_count", "both_nan_count"), ("reference_inf_count",))
    told = [f"{who} {nan} NaN and {inf} Inf" for who, (nan, inf) in found.items() if nan or inf]
    return f"NaN, or Inf where the other side has none: {', '.join(told)}" if told else ""


def _total(rows: list[dict[str, Any]], nan: tuple[str, ...], inf: tuple[str, ...]) -> tuple[int, int]:
    return sum(row[name] for row in rows for name in nan), sum(row[name] for row in rows for name in inf)


def failure(error: Exception) -> tuple[Status, str]:
    """How an unexpected error ends a point, and what a record says of it."""
    text = str(error).strip().splitlines()
    reason = f"{type(error).__name__}: {text[0] if text else ''}"
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)) or "can't allocate memory" in str(error):
        return Status.OUT_OF_MEMORY, f"{reason}; use fewer queries, keys, heads or a smaller tiling.bc"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return Status.ERROR, f"{reason} (in {frame.name}, line {frame.lineno})"
