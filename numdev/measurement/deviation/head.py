"""One head of one output beside what it is compared with, element by element."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput, one_of
from numdev.measurement.deviation.measurement import check_memory, of_replicate
from numdev.measurement.operation import Measurable, Operation, Reproducible


class Subject(StrEnum):
    """Whose error is wanted."""

    VARIANT = "variant"
    BASELINE = "baseline"


class Reference(StrEnum):
    """The other side of a comparison, as in the rows of a record."""

    GOLDEN = "golden"
    GOLDEN_SAME_INPUTS = "golden_same_inputs"
    BASELINE = "baseline"


@dataclass(frozen=True)
class Place:
    """Which head of which output, and what it is compared with.

    Attributes:
        output: the name of an output; empty for the operation's primary one.
        head: number of the head; the heads of further batch entries follow those of the first.
        seed: the replicate.
        subject: see `Subject`.
        reference: see `Reference`.
    """

    output: str = ""
    head: int = 0
    seed: int = 0
    subject: Subject = Subject.VARIANT
    reference: Reference = Reference.GOLDEN

    def __post_init__(self) -> None:
        for name in ("head", "seed"):
            if getattr(self, name) < 0:
                raise BadInput(name, getattr(self, name), "give a whole number from 0")
        if self.subject is Subject.BASELINE and self.reference is Reference.BASELINE:
            raise BadInput(
                "reference", self.reference.value, "subject=baseline would be compared with itself; leave one of them out"
            )

    @property
    def needs_baseline(self) -> bool:
        return Subject.BASELINE in (self.subject, self.reference)


@dataclass(frozen=True)
class Head:
    """One head of an output and its reference.

    Attributes:
        x: what was measured.
        reference: what it is compared with.
        fmt: the format of the output.
        output: its name.
        heads: how many heads the output has.
    """

    x: Float[Tensor, "rows columns"]
    reference: Float[Tensor, "rows columns"]
    fmt: Format
    output: str
    heads: int


@dataclass(frozen=True)
class Compared:
    """An operation's implementations on a problem, for a comparison of single heads."""

    operation: Operation
    problem: Reproducible
    variant: Measurable
    baseline: Measurable | None = None

    def head(self, place: Place, device: torch.device) -> Head:
        """One head, and that of its reference.

        Raises:
            BadInput: for an output, a head or a replicate that does not exist, a baseline that is missing, and a problem that is
                larger than the free memory.
            Unsupported: if an implementation cannot honour the request.
        """
        operation = self.operation
        name = place.output or operation.primary
        if name not in operation.output_names:
            raise BadInput("output", name, one_of(name, operation.output_names))
        check_memory(self.problem, device, operation.smaller)
        try:
            inputs = operation.draw(self.problem, place.seed, device)
        except BadInput as error:  # a source names what it counts
            raise BadInput("seed", place.seed, error.mend) if error.field == "seeds" else error from None
        subject = of_replicate(self._subject(place.subject), place.seed)
        rounded = subject.round_inputs(*inputs)
        outputs = self._outputs(subject, rounded)
        if name not in outputs:
            raise BadInput("output", name, f"the {place.subject} returns {', '.join(outputs)}; choose one of these")
        expected = self._reference(place, inputs, rounded)
        if name not in expected:
            raise BadInput("output", name, f"reference={place.reference} returns {', '.join(expected)}; choose one of these")
        x, heads = _head(outputs[name], inputs[0].ndim - 2, place.head, name)
        reference, _ = _head(expected[name], inputs[0].ndim - 2, place.head, name)
        return Head(x.double().cpu(), reference.double().cpu(), subject.formats[name], name, heads)

    def _subject(self, which: str) -> Measurable:
        if which == Subject.VARIANT:
            return self.variant
        if self.baseline is None:
            raise BadInput("baseline", "none", "no baseline was measured; choose one, such as baseline=eager")
        return self.baseline

    def _reference(self, place: Place, inputs: tuple[Tensor, ...], rounded: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        if place.reference is Reference.BASELINE:
            baseline = of_replicate(self._subject(Subject.BASELINE), place.seed)
            return self._outputs(baseline, baseline.round_inputs(*inputs))
        same = place.reference is Reference.GOLDEN_SAME_INPUTS
        return self._outputs(self.operation.exact, rounded if same else inputs)

    def _outputs(self, implementation: Measurable, inputs: tuple[Tensor, ...]) -> Mapping[str, Tensor]:
        arguments: dict[str, Any] = self.problem.arguments()
        return implementation(*inputs, **arguments).tensors()


def _head(tensor: Tensor, leading: int, number: int, name: str) -> tuple[Tensor, int]:
    """One matrix of an output whose first `leading` dimensions count heads, and how many there are; a vector is one column."""
    heads = tensor.reshape(-1, *tensor.shape[max(leading, 0) :])
    if number >= len(heads):
        raise BadInput("head", number, f"{name} has {len(heads)}; give 0{f' to {len(heads) - 1}' if len(heads) > 1 else ''}")
    rows = heads.shape[1] if heads.ndim > 1 else 1
    return heads[number].reshape(rows, -1), len(heads)
