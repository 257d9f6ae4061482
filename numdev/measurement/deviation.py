"""A variant against golden and against a baseline, over replicates, and one head of an output beside what it is compared with.

A problem makes named inputs from a seed; a variant rounds them and returns named outputs; golden is another such callable.
What is compared is whatever tensors both return under the same name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar, TypeVar

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput
from numdev.measurement.metrics import DIRECTED, METRICS, Direction, Sample, compare
from numdev.measurement.operation import Measurable, Operation, Outputs, Random, Reproducible
from numdev.measurement.runner import Context, Findings, Kept, Kind, Point
from numdev.results.environment import available_bytes
from numdev.results.record import Column, Reference, Use

Value = TypeVar("Value")
Samples = dict[str, Sample]

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


class Subject(StrEnum):
    """Whose error it is."""

    VARIANT = "variant"
    BASELINE = "baseline"


@dataclass(frozen=True)
class Deviations(Kind):
    """How far a variant, and a baseline beside it, deviates from golden on a problem."""

    operation: Operation
    name: ClassVar[str] = KIND

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        compared = (*COLUMNS, *DIRECTIONS) if self.operation.directed else COLUMNS
        return {KIND: compared, COUNTERS: (SEED, *self.operation.counters)}

    @property
    def figures(self) -> list[str]:
        """Each as `output.figure`."""
        names = super().figures
        return [f"{output}.{name}" for output in self.operation.output_names for name in names]

    def run(self, point: Point, context: Context) -> Findings:
        """Raises BadInput, naming the problem, if it is larger than the free memory."""
        check_memory(point.problem, context.device, self.operation.smaller)
        kernels, before = dict[str, None](), dict[tuple[str, ...], Direction]()
        rows, counters = list[dict[str, Any]](), list[dict[str, Any]]()
        for seed in context.replicates():
            replicate = _Replicate(self.operation, point.problem, seed, context.device, context.kept)
            variant = of_replicate(point.variant, seed)
            output = replicate.outputs(variant)
            own, others = _samples(output), Samples()
            references = replicate.golden(variant)
            if point.baseline is not None:
                baseline = of_replicate(point.baseline, seed)
                others, of_baseline = replicate.baseline(baseline), replicate.golden(baseline)
                references[Reference.BASELINE] = others
            rows += replicate.compared(Subject.VARIANT, variant, own, references, others, before)
            if point.baseline is not None:
                rows += replicate.compared(Subject.BASELINE, baseline, others, of_baseline, own, before)
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
    """One replicate of a problem: its inputs, the outputs of implementations, and their comparisons.

    What other points of the problem need too, all but the outputs of a variant, is kept for them.
    """

    operation: Operation
    problem: Reproducible
    seed: int
    device: torch.device
    kept: Kept

    def inputs(self) -> tuple[Tensor, ...]:
        return self._kept("inputs", lambda: self.operation.draw(self.problem, self.seed, self.device))

    def rounded(self, subject: Measurable) -> tuple[Tensor, ...]:
        return self._kept("rounded", lambda: subject.round_inputs(*self.inputs()), subject.input_key)

    def outputs(self, subject: Measurable) -> Outputs:
        return subject(*self.rounded(subject), **self.problem.arguments())

    def baseline(self, subject: Measurable) -> Samples:
        return self._kept("baseline", lambda: _samples(self.outputs(subject)), subject)

    def golden(self, subject: Measurable) -> dict[Reference, Samples]:
        """Golden on the unrounded inputs, and on those that the subject sees."""
        same = self._kept("golden", lambda: self._exact(self.rounded(subject)), subject.input_key)
        return {Reference.GOLDEN: self._kept("golden", lambda: self._exact(self.inputs())), Reference.GOLDEN_SAME_INPUTS: same}

    def _exact(self, inputs: tuple[Tensor, ...]) -> Samples:
        return _samples(self.operation.exact(*inputs, **self.problem.arguments()))

    def _kept(self, what: str, make: Callable[[], Value], *of: object) -> Value:
        return self.kept.get((what, self.problem, *of, self.seed), make)

    def compared(
        self,
        name: Subject,
        subject: Measurable,
        samples: Samples,
        references: Mapping[Reference, Samples],
        others: Samples,
        before: dict[tuple[str, ...], Direction],
    ) -> Iterator[dict[str, Any]]:
        """Each output of a subject against each reference, in ulp and u of the output's own format.

        `others` are the outputs of the baseline if the subject is the variant, and vice versa. Elements that are not finite
        there are not compared here either, so that the figures of variant and baseline are taken over the same elements.
        `before` has the directions of the errors in the replicate before, and gets those of this one.
        """
        place = {"seed": self.seed, "cluster": self.problem.cluster(self.seed), "subject": name.value}
        for reference, expected in references.items():
            for output, sample in samples.items():
                if output in expected:
                    other = others.get(output)
                    leave_out = None if other is None or other.is_finite else ~other.values.isfinite()
                    deviation = compare(sample, expected[output], subject.formats[output], leave_out)
                    head = {"output": output, "primary": output == self.operation.primary, "reference": reference.value}
                    row = place | head | deviation.metrics() | {"max_index": list(deviation.max_index)}
                    yield row | self._directed((name, reference, output), sample, expected[output], before)

    def _directed(
        self, place: tuple[str, ...], sample: Sample, reference: Sample, before: dict[tuple[str, ...], Direction]
    ) -> dict[str, float]:
        """The figures of `DIRECTED` of one comparison, whose place ends with its output."""
        if place[-1] not in self.operation.directed:
            return dict.fromkeys(DIRECTED, math.nan) if self.operation.directed else {}
        direction, earlier = Direction.of(sample, reference), before.get(place)
        before[place] = direction
        return direction.after(earlier)


def _samples(output: Outputs) -> Samples:
    """The outputs by name, as comparisons take them."""
    return {name: Sample(tensor) for name, tensor in output.tensors().items()}


@dataclass(frozen=True)
class Place:
    """Which head of which output, and what it is compared with."""

    output: str = ""  # the name of an output; empty for the operation's primary one
    head: int = 0  # number of the head; the heads of further batch entries follow those of the first
    seed: int = 0  # the replicate
    subject: Subject = Subject.VARIANT  # whose head it is
    reference: Reference = Reference.GOLDEN  # what it is compared with

    def __post_init__(self) -> None:
        for name in ("head", "seed"):
            if getattr(self, name) < 0:
                raise BadInput(name, getattr(self, name), "give a whole number from 0")
        if self.subject is Subject.BASELINE and self.reference is Reference.BASELINE:
            hint = "subject=baseline would be compared with itself; leave one of them out"
            raise BadInput("reference", self.reference.value, hint)

    @property
    def needs_baseline(self) -> bool:
        return Subject.BASELINE in (self.subject, self.reference)


@dataclass(frozen=True)
class Head:
    """One head `x` of an output, its reference, the format and the name of the output, and how many heads that has."""

    x: Float[Tensor, "rows columns"]
    reference: Float[Tensor, "rows columns"]
    fmt: Format
    output: str
    heads: int


def head_of(
    operation: Operation,
    problem: Reproducible,
    variant: Measurable,
    place: Place,
    device: torch.device,
    baseline: Measurable | None = None,
) -> Head:
    """One head of an output in one replicate, and that of its reference.

    Raises:
        BadInput: for an output, a head or a replicate that does not exist, a baseline that is missing, and a problem that is
            larger than the free memory.
        Unsupported: if an implementation cannot honour the request.
    """
    if place.needs_baseline and baseline is None:
        raise BadInput("baseline", "none", "no baseline was measured; choose one, such as baseline=eager")
    check_memory(problem, device, operation.smaller)
    replicate, name = _Replicate(operation, problem, place.seed, device, Kept(1 << 62)), place.output or operation.primary
    try:
        dims = replicate.inputs()[0].ndim - 2
    except BadInput as error:  # a source names what it counts
        raise BadInput("seed", place.seed, error.hint) if error.field == "seeds" else error from None
    chosen = {Subject.VARIANT: variant, Subject.BASELINE: baseline}
    subject = of_replicate(chosen[place.subject] or variant, place.seed)
    samples = _samples(replicate.outputs(subject))
    if place.reference is Reference.BASELINE and baseline is not None:
        expected = replicate.baseline(of_replicate(baseline, place.seed))
    else:
        expected = replicate.golden(subject)[place.reference]
    for whose, outputs in ((f"the {place.subject}", samples), (f"reference={place.reference}", expected)):
        if name not in outputs:
            raise BadInput("output", name, f"{whose} returns {', '.join(outputs)}; choose one of these")
    matrices, references = _heads(samples[name], dims), _heads(expected[name], dims)
    if place.head >= len(matrices):
        last = len(matrices) - 1
        raise BadInput("head", place.head, f"{name} has {len(matrices)}; give 0{f' to {last}' if last else ''}")
    return Head(matrices[place.head], references[place.head], subject.formats[name], name, len(matrices))


def _heads(sample: Sample, dims: int) -> Float[Tensor, "heads rows columns"]:
    """The matrices of an output whose first `dims` dimensions count heads; a vector is one column."""
    shape = (*sample.shape[max(dims, 0) :], 1, 1)
    return sample.values.reshape(-1, shape[0], math.prod(shape[1:])).cpu()


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
