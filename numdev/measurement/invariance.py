"""Whether the bits of a row depend on what is computed beside it: alone, in other batches, at other places, and in repeats."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.errors import BadInput, Unsupported
from numdev.measurement.deviation import COMPARISON, check_memory, of_replicate
from numdev.measurement.metrics import Sample, Scaled, compare
from numdev.measurement.operation import Measurable, Operation
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.results.record import Column, Use

KIND = "invariance"
_ALONE, _REPEATS, _FEW = 8, 3, 16  # rows that are computed alone, calls that are repeated, and last places of each row
_BUSY = 4096, 16  # the side of a matrix, and how often it is multiplied beside a call
_FURTHER = 1 << 20  # seeds of other rows and of further random orders, which no replicate has


class Surroundings(StrEnum):
    """What differs between two computations of the same rows."""

    REPEAT = "repeat"
    ALONE = "alone"
    HALF = "half"
    MOVED = "moved"
    OTHERS = "others"
    DECODE = "decode"
    FEW = "few"
    BUSY = "busy"
    BASELINE = "baseline"


COLUMNS = (
    *(column for column in COMPARISON if column.name in ("seed", "cluster", "output", "primary")),
    Column(
        "surroundings",
        "",
        f"what differs from one call on all rows: `repeat`, {_REPEATS} more such calls, with random orders drawn anew; `alone`, "
        f"a call for each of {_ALONE} rows; `half`, the first half of the rows; `moved`, all rows in reverse order; `others`, "
        "the first half of the rows beside other ones; `decode`, the last query of each row alone, as in decoding; "
        f"`few`, its last {_FEW} queries, both where the variant has such a call; `busy`, matrices are multiplied in another "
        "stream of the GPU meanwhile; `baseline`, the baseline in place of the variant",
        Use.PLACE,
    ),
    Column("equal_share", "relative", "share of elements that are equal", Use.CHIEF),
    Column("max_ulp", "ulp", "largest difference, in the format of the output", Use.CHIEF),
    Column("rms_ulp", "ulp", "root mean square of the differences in ulp"),
    Column("over_error", "relative", "RMS of the differences over the RMSE of all rows from golden on the same inputs"),
    Column("compared", "count", "elements that are finite on both sides"),
)


@dataclass(frozen=True)
class Invariances(Kind):
    """How a variant's results for the same rows differ between surroundings. The operation says what its rows are."""

    operation: Operation
    name: ClassVar[str] = KIND
    seeds: ClassVar[int] = 3
    columns: ClassVar[dict[str, tuple[Column, ...]]] = {KIND: COLUMNS}

    def run(self, point: Point, context: Context) -> Findings:
        """Raises BadInput for an operation without rows, a problem with one row, and one larger than the free memory."""
        if not self.operation.rows:
            raise BadInput("operation", self.operation.name, "it does not say along which dimension its rows lie: Operation.rows")
        check_memory(point.problem, context.device, self.operation.smaller)
        rows, kernels = list[dict[str, Any]](), dict[str, None]()
        for seed in context.replicates():
            run = _Replicate(self.operation, point.problem, point.variant, seed, context.device)
            place = {"seed": seed, "cluster": point.problem.cluster(seed)}
            for surroundings, tensors, index, along in [*run.surrounded(), *run.of(point.baseline)]:
                head = place | {"surroundings": surroundings.value}
                rows += (
                    {name: (head | row)[name] for name in (column.name for column in COLUMNS)}
                    for row in run.compared(tensors, index, along)
                )
            kernels[run.kernel] = None
        return Findings({KIND: rows}, "; ".join(kernels))


# Results, to which places of the call on all rows they belong, and along which dimension of each these lie
Compared = tuple[Surroundings, dict[str, Tensor], Tensor, Mapping[str, int]]


class _Replicate:
    """One replicate: the call on all rows, and the others."""

    def __init__(self, operation: Operation, problem: Any, variant: Any, seed: int, device: torch.device) -> None:
        self.operation, self.problem, self.variant, self.seed = operation, problem, variant, seed
        self.names = [name for inputs in operation.inputs for name in inputs.names]
        self.drawn = operation.draw(problem, seed, device)
        self.inputs = of_replicate(variant, seed).round_inputs(*self.drawn)
        self.others = of_replicate(variant, seed).round_inputs(*operation.draw(problem, seed + _FURTHER, device))
        output = of_replicate(variant, seed)(*self.inputs, **problem.arguments())
        self.kernel, self.whole = output.kernel, output.tensors()
        exact = operation.exact(*self.inputs, **problem.arguments()).tensors()
        self.formats = of_replicate(variant, seed).formats
        self.errors = {
            name: compare(Sample(x), Sample(exact[name]), self.formats[name]).rmse
            for name, x in self.whole.items()
            if name in exact
        }
        first = next(name for name in self.names if name in operation.rows)
        self.all = torch.arange(self.inputs[self.names.index(first)].shape[operation.rows[first]], device=device)
        if len(self.all) < 2:
            raise BadInput("problem", "1 row", "rows alone and among others need at least 2")

    def surrounded(self) -> Iterator[Compared]:
        """The variant's results in each of its surroundings."""
        half, rows, suffix = self.all[: len(self.all) // 2], self.operation.rows, self.operation.suffix
        for further in range(1, _REPEATS + 1):
            again = of_replicate(self.variant, self.seed + further * _FURTHER)
            yield Surroundings.REPEAT, self._call(self.inputs, again), self.all, rows
        for i in torch.linspace(0, len(self.all) - 1, min(_ALONE, len(self.all))).round().long().to(self.all.device).split(1):
            yield Surroundings.ALONE, self._call(self._taken(self.inputs, i)), i, rows
        yield Surroundings.HALF, self._call(self._taken(self.inputs, half)), half, rows
        yield Surroundings.MOVED, self._call(self._taken(self.inputs, self.all.flip(0))), self.all.flip(0), rows
        own, other = self._taken(self.inputs, half), self._taken(self.others, self.all[len(half) :])
        mixed = tuple(
            torch.cat(pair, rows[name]) if name in rows else pair[0] for name, *pair in zip(self.names, own, other, strict=True)
        )
        outputs = self._call(mixed)
        yield Surroundings.OTHERS, {name: x.narrow(rows[name], 0, len(half)) for name, x in outputs.items()}, half, rows
        places = next((x.shape[suffix[name]] for name, x in zip(self.names, self.inputs, strict=True) if name in suffix), 1)
        for surroundings, count in ((Surroundings.DECODE, 1), (Surroundings.FEW, _FEW)):
            last = torch.arange(max(places - count, 0), places, device=self.all.device)
            with suppress(Unsupported):  # a variant may have a causal limit for as many queries as keys alone
                if count < places:
                    outputs = self._call(self._taken(self.inputs, last, suffix))
                    yield surroundings, {name: x for name, x in outputs.items() if name in suffix}, last, suffix
        if self.all.is_cuda:
            with torch.cuda.stream(torch.cuda.Stream()):
                x = torch.zeros(_BUSY[0], _BUSY[0], device=self.all.device)
                for _ in range(_BUSY[1]):
                    x = x @ x
            yield Surroundings.BUSY, self._call(self.inputs), self.all, rows

    def of(self, baseline: Any) -> Iterator[Compared]:
        """The baseline's results on all rows, if there is one."""
        if baseline is not None:
            inputs = self.inputs if baseline.input_key == self.variant.input_key else baseline.round_inputs(*self.drawn)
            yield Surroundings.BASELINE, self._call(inputs, of_replicate(baseline, self.seed)), self.all, self.operation.rows

    def compared(self, tensors: dict[str, Tensor], index: Tensor, along: Mapping[str, int]) -> Iterator[dict[str, Any]]:
        """The figures of each output that has rows."""
        for name, x in tensors.items():
            if name in self.whole:
                reference = self.whole[name].index_select(along[name], index)
                figures = _spread(x, reference, self.errors[name], self.formats[name])
                yield {"output": name, "primary": name == self.operation.primary, **figures}

    def _call(self, inputs: tuple[Tensor, ...], variant: Measurable | None = None) -> dict[str, Tensor]:
        variant = variant or of_replicate(self.variant, self.seed)
        outputs = variant(*inputs, **self.problem.arguments()).tensors()
        return {name: x for name, x in outputs.items() if name in self.operation.rows}

    def _taken(self, inputs: tuple[Tensor, ...], index: Tensor, along: Mapping[str, int] | None = None) -> tuple[Tensor, ...]:
        """The inputs with these rows, or places of a row, alone; those without, such as weights, are whole."""
        along = self.operation.rows if along is None else along
        taken = zip(self.names, inputs, strict=True)
        return tuple(x.index_select(along[name], index).contiguous() if name in along else x for name, x in taken)


def _spread(x: Tensor, reference: Tensor, error: float, fmt: Format) -> dict[str, float]:
    """How far the results of the same rows are apart; `error` is the RMSE of all rows from golden."""
    sample, other = Sample(x), Sample(reference)
    apart = compare(sample, other, fmt)
    in_ulp = (sample.values - other.values).div(fmt.ulp(other.values))
    in_ulp = in_ulp[in_ulp.isfinite()]
    return {
        "equal_share": apart.equal_share,
        "max_ulp": apart.max_ulp,
        "rms_ulp": math.sqrt(float(in_ulp.square().mean())) if in_ulp.numel() else 0.0,
        "over_error": Scaled(apart.rmse).over(Scaled(error)),
        "compared": apart.compared,
    }
