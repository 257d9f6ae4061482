"""A variant against golden and against a baseline, over replicates.

A problem makes named inputs from a seed; a variant rounds them and returns named outputs; golden is another such callable.
What is compared is whatever tensors both return under the same name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor

from numdev.errors import BadInput
from numdev.machine import available_bytes
from numdev.measurement.deviation.metrics import DIRECTED, METRICS, Course, compare
from numdev.measurement.deviation.sample import Sample
from numdev.measurement.operation import Measurable, Operation, Outputs, Random, Reproducible
from numdev.measurement.protocol import Context, Findings, configuration
from numdev.results.record import Column, Use

Kept = TypeVar("Kept")

KIND = "deviation"
COMPARISON = (
    Column("seed", "", "the replicate: what the inputs were drawn with, or the place of a head among captured ones", Use.PLACE),
    Column(
        "cluster",
        "",
        "of replicates that are alike: the layer of a captured head; empty where replicates are independent",
        Use.PLACE,
    ),
    Column(
        "subject",
        "",
        "`variant` or `baseline`; a baseline stands once per scenario and problem, under its first point, "
        "whose `variant.*` columns stand beside it",
        Use.PLACE,
    ),
    Column("output", "", "which result is compared, by its name in the operation", Use.PLACE),
    Column("primary", "", "whether it is the operation's primary output", Use.NOTE),
    Column(
        "reference",
        "",
        "what it is compared with: `golden`, the exact result of the unrounded inputs (total error); `golden_same_inputs`, "
        "that of the subject's rounded inputs (arithmetic error); `baseline`, the plain implementation in the same format",
        Use.PLACE,
    ),
)
"""The columns that identify a comparison of a point, in the tables of every kind that compares."""

_CHIEF = ("max_difference", "rmse", "wasserstein", "max_ulp", "agreement_bits")
COLUMNS = (
    *COMPARISON,
    *(Column(name, *said, Use.CHIEF if name in _CHIEF else Use.FIGURE) for name, said in METRICS.items()),
    Column("max_index", "", "where |D| is largest, as indices into the output", Use.NOTE),
)
DIRECTIONS = tuple(Column(name, *said) for name, said in DIRECTED.items())
"""Further columns, of an operation with directed outputs; empty for its other outputs."""
SEED = Column("seed", "", COMPARISON[0].meaning, Use.PLACE)
COUNTERS = "counters"
"""The table of events that the variant's runs counted, a row per seed."""


@dataclass(frozen=True)
class Deviations:
    """The kind `deviation` of measurement of an operation."""

    operation: Operation
    name: ClassVar[str] = KIND
    seeds: ClassVar[int] = 10

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        compared = (*COLUMNS, *DIRECTIONS) if self.operation.directed else COLUMNS
        return {KIND: compared, COUNTERS: (SEED, *self.operation.counters)}

    def of(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> DeviationPoint:
        return DeviationPoint(self.operation, problem, variant, baseline, seeds)


Samples = dict[str, Sample]
References = dict[str, Samples]


@dataclass(frozen=True)
class DeviationPoint:
    """How far a variant, and a baseline beside it, deviates from golden on a problem."""

    operation: Operation
    problem: Reproducible
    variant: Any  # a Measurable wherever it runs; what a study refuses has a key too
    baseline: Measurable | None
    seeds: int
    kind: ClassVar[str] = KIND

    @property
    def config(self) -> dict[str, Any]:
        return configuration(problem=self.problem, variant=self.variant, baseline=self.baseline, seeds=self.seeds)

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        return Deviations(self.operation).columns

    def run(self, context: Context) -> Findings:
        """Raises BadInput, naming the problem, if it is larger than the free memory."""
        check_memory(self.problem, context.device, self.operation.smaller)
        kernels, course = dict[str, None](), Course(self.operation.directed)
        rows: list[dict[str, Any]] = []
        counters: list[dict[str, Any]] = []
        for seed in context.replicates():
            own, output = _Replicate(self.operation, self.problem, context, seed, course).rows(self.variant, self.baseline)
            rows += own
            kernels[output.kernel] = None
            counters.append({"seed": seed} | output.counters)
        return Findings({KIND: rows, COUNTERS: counters}, "; ".join(kernels), nonfinite(rows), zero(rows))


def check_memory(problem: Reproducible, device: torch.device, smaller: str) -> None:
    """Raise BadInput for a problem that is larger than the free memory."""
    free = available_bytes(device)
    if problem.bytes > free:
        gib = 2.0**30
        hint = f"{free / gib:.1f} GiB are free on {device.type}; use {smaller}"
        raise BadInput("problem", f"about {problem.bytes / gib:.1f} GiB", hint)


def of_replicate(subject: Measurable, seed: int) -> Measurable:
    """The implementation for one replicate: one that draws random numbers draws different ones in each."""
    return subject.replicate(seed) if isinstance(subject, Random) else subject


@dataclass(frozen=True)
class _Replicate:
    """One replicate of a problem: its inputs, the outputs of golden, variant and baseline, and their comparisons.

    What other points of the problem need too is kept for them. `course` has the directions of the errors in the replicate before.
    """

    operation: Operation
    problem: Reproducible
    context: Context
    seed: int
    course: Course

    def rows(self, variant: Measurable, baseline: Measurable | None) -> tuple[list[dict[str, Any]], Outputs]:
        """Every comparison, and the variant's outputs."""
        variant = of_replicate(variant, self.seed)
        output = variant(*self._rounded(variant), **self.problem.arguments())
        samples, golden = _samples(output), self._golden(variant)
        if baseline is None:
            return self._directed(list(self._compared("variant", samples, golden, {}, variant)), samples, golden), output
        baseline = of_replicate(baseline, self.seed)
        others, golden_of_baseline = self._baseline(baseline), self._golden(baseline)
        references = golden | {"baseline": others}
        own = list(self._compared("variant", samples, references, others, variant))
        beside = self._compared("baseline", others, golden_of_baseline, samples, baseline)
        return self._directed(own, samples, references) + self._directed(list(beside), others, golden_of_baseline), output

    def _inputs(self) -> tuple[Tensor, ...]:
        return self._kept("inputs", lambda: self.operation.draw(self.problem, self.seed, self.context.device))

    def _rounded(self, subject: Measurable) -> tuple[Tensor, ...]:
        return self._kept("rounded", lambda: subject.round_inputs(*self._inputs()), subject.input_key)

    def _golden(self, subject: Measurable) -> References:
        """Golden on the unrounded inputs, and on those that the subject sees."""

        def exact(inputs: tuple[Tensor, ...]) -> Samples:
            return _samples(self.operation.exact(*inputs, **self.problem.arguments()))

        same = self._kept("golden", lambda: exact(self._rounded(subject)), subject.input_key)
        return {"golden": self._kept("golden", lambda: exact(self._inputs())), "golden_same_inputs": same}

    def _baseline(self, subject: Measurable) -> Samples:
        return self._kept("baseline", lambda: _samples(subject(*self._rounded(subject), **self.problem.arguments())), subject)

    def _kept(self, what: str, make: Callable[[], Kept], *of: object) -> Kept:
        return self.context.kept.get((what, self.problem, *of, self.seed), make)

    def _directed(self, rows: list[dict[str, Any]], samples: Samples, references: References) -> list[dict[str, Any]]:
        """The comparisons of one subject with rank and direction of their errors, where the operation has them."""
        if not self.course.outputs:
            return rows
        directed = []
        for row in rows:
            reference, output = row["reference"], row["output"]
            place = (row["subject"], reference, output)
            directed.append(row | self.course.figures(place, samples[output], references[reference][output]))
        return directed

    def _compared(
        self, name: str, samples: Samples, references: References, others: Samples, subject: Measurable
    ) -> Iterator[dict[str, Any]]:
        """Each output of a subject against each reference, in ulp and u of the output's own format.

        `others` are the outputs of the baseline if the subject is the variant, and vice versa. Elements that are not finite
        there are not compared here either, so that the figures of variant and baseline are taken over the same elements.
        """
        place = {"seed": self.seed, "cluster": self.problem.cluster(self.seed), "subject": name}
        for reference, expected in references.items():
            for output, sample in samples.items():
                if output in expected:
                    other = others.get(output)
                    leave_out = None if other is None or other.is_finite else ~other.values.isfinite()
                    deviation = compare(sample, expected[output], subject.formats[output], leave_out)
                    head = {"output": output, "primary": output == self.operation.primary, "reference": reference}
                    yield place | head | deviation.metrics() | {"max_index": list(deviation.max_index)}


def _samples(output: Outputs) -> Samples:
    """The outputs by name, as comparisons take them."""
    return {name: Sample(tensor) for name, tensor in output.tensors().items()}


def nonfinite(rows: list[dict[str, Any]]) -> str:
    """How many elements of which result are NaN, or Inf where golden has none, over all seeds; empty if none are.

    Those of variant and baseline come from the comparison with golden, golden's own from that with the variant.
    """
    own, of_golden = (("nan_count",), ("inf_count",)), (("reference_nan_count", "both_nan_count"), ("reference_inf_count",))
    parts = [
        *_counted(rows, "variant", "of the variant's {} {} not finite where golden is", *own),
        *_counted(rows, "baseline", "of the baseline's {} {} not finite where golden is", *own),
        *_counted(rows, "variant", "of golden's {} {} not finite", *of_golden),
    ]
    return ", ".join(parts)


def zero(rows: list[dict[str, Any]]) -> str:
    """Which results of the variant are 0 at every compared element, where golden's are not; empty if none are.

    Only x = 0 has x.r = 0 and ||x - r|| = ||r|| at once, as ||x - r||^2 = ||x||^2 - 2 x.r + ||r||^2.
    """
    own = [row for row in rows if (row["subject"], row["reference"]) == ("variant", "golden")]
    lost = [row["output"] for row in own if row["cosine_similarity"] == 0 and row["relative_frobenius"] == 1]
    return ", ".join(
        f"every element of the variant's {output} is 0 and golden's are not ({lost.count(output)} of "
        f"{sum(row['output'] == output for row in own)} replicates)"
        for output in dict.fromkeys(lost)
    )


def _counted(rows: list[dict[str, Any]], subject: str, text: str, nan: tuple[str, ...], inf: tuple[str, ...]) -> Iterator[str]:
    """The number of elements and the text for each output that the columns of counts have any of."""
    own = [row for row in rows if (row["subject"], row["reference"]) == (subject, "golden")]
    for output in dict.fromkeys(row["output"] for row in own):
        nans, infs = (sum(row[name] for row in own if row["output"] == output for name in names) for names in (nan, inf))
        if total := nans + infs:
            counts = ", ".join(f"{count} {word}" for count, word in ((nans, "NaN"), (infs, "Inf")) if count)
            noun, verb = ("element", "is") if total == 1 else ("elements", "are")
            yield f"{total} {noun} {text.format(output, verb)} ({counts})"
