"""What is computed of the replicates of a problem before they are compared: several in one call where an implementation can."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from numdev.measurement.deviation.sample import Sample
from numdev.measurement.operation import Measurable, Operation, Outputs, Random, Reproducible, outputs_of
from numdev.measurement.protocol import Context

_TOGETHER = 1 << 26  # bytes of the replicates that are held at once; one that is larger is held alone
Samples = dict[str, Sample]
References = dict[str, Samples]


@dataclass(frozen=True)
class Computed:
    """All that one replicate's comparisons need.

    Attributes:
        seed: the replicate.
        variant, baseline: the implementations of this replicate.
        output: of the variant.
        samples, others: the outputs of variant and baseline; no `others` without a baseline.
        golden, golden_of_baseline: golden on the unrounded inputs, and on those that the variant, or the baseline, sees.
    """

    seed: int
    variant: Measurable
    baseline: Measurable | None
    output: Outputs
    samples: Samples
    golden: References
    others: Samples
    golden_of_baseline: References


@dataclass(frozen=True)
class Replicates:
    """Some replicates of a problem. What other points need too is kept for them, for each replicate by itself."""

    operation: Operation
    problem: Reproducible
    context: Context
    seeds: Sequence[int]

    def computed(self, variant: Measurable, baseline: Measurable | None) -> Iterator[Computed]:
        """Every replicate, with the outputs of the implementations and of golden."""
        variants = [of_replicate(variant, seed) for seed in self.seeds]
        outputs = self._run(variants, self._rounded(variants))
        golden = self._golden(variants)
        baselines: list[Measurable | None] = [None for _ in self.seeds]
        others, golden_of_baseline = [Samples() for _ in self.seeds], golden
        if baseline is not None:
            drawn = [of_replicate(baseline, seed) for seed in self.seeds]
            others, golden_of_baseline = self._baseline(drawn), self._golden(drawn)
            baselines = [*drawn]
        samples = map(samples_of, outputs)
        yield from map(Computed, self.seeds, variants, baselines, outputs, samples, golden, others, golden_of_baseline)

    def _run(self, subjects: Sequence[Measurable], inputs: Sequence[tuple[Tensor, ...]]) -> Sequence[Outputs]:
        return outputs_of(subjects, inputs, self.problem.arguments())

    def _inputs(self) -> list[tuple[Tensor, ...]]:
        operation, problem, device = self.operation, self.problem, self.context.device
        return self._kept("inputs", lambda at: [operation.draw(problem, self.seeds[i], device) for i in at])

    def _rounded(self, subjects: Sequence[Measurable]) -> list[tuple[Tensor, ...]]:
        """One by one, since numbers that share a scale may be all of a tensor."""
        inputs = self._inputs()
        return self._kept("rounded", lambda at: [subjects[i].round_inputs(*inputs[i]) for i in at], _input_keys(subjects))

    def _golden(self, subjects: Sequence[Measurable]) -> list[References]:
        """Golden on the unrounded inputs, and on those that each subject sees."""
        unrounded = self._exact(self._inputs())
        same = self._exact(self._rounded(subjects), _input_keys(subjects))
        return [{"golden": total, "golden_same_inputs": own} for total, own in zip(unrounded, same, strict=True)]

    def _exact(self, inputs: Sequence[tuple[Tensor, ...]], *of: Sequence[object]) -> list[Samples]:
        def make(at: list[int]) -> list[Samples]:
            return [*map(samples_of, self._run([self.operation.exact for _ in at], [inputs[i] for i in at]))]

        return self._kept("golden", make, *of)

    def _baseline(self, subjects: Sequence[Measurable]) -> list[Samples]:
        inputs = self._rounded(subjects)

        def make(at: list[int]) -> list[Samples]:
            return [*map(samples_of, self._run([subjects[i] for i in at], [inputs[i] for i in at]))]

        return self._kept("baseline", make, subjects)

    def _kept(self, what: str, make: Callable[[list[int]], list[Any]], *of: Sequence[object]) -> list[Any]:
        """What each replicate has kept; `make` computes it for those, by their places, that have nothing."""
        keys = [(what, self.problem, *(each[i] for each in of), seed) for i, seed in enumerate(self.seeds)]
        return self.context.kept.get_all(keys, make)


def in_parts(seeds: Sequence[int], problem: Reproducible) -> Iterator[Sequence[int]]:
    """The replicates that are computed together; all that fit into little memory."""
    size = max(1, _TOGETHER // max(1, problem.bytes))
    for first in range(0, len(seeds), size):
        yield seeds[first : first + size]


def of_replicate(subject: Measurable, seed: int) -> Measurable:
    """The implementation for one replicate: one that draws random numbers draws different ones in each."""
    return subject.replicate(seed) if isinstance(subject, Random) else subject


def samples_of(output: Outputs) -> Samples:
    """The outputs by name, as comparisons take them."""
    return {name: Sample(tensor) for name, tensor in output.tensors().items()}


def _input_keys(subjects: Sequence[Measurable]) -> list[object]:
    return [subject.input_key for subject in subjects]
