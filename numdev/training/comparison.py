"""One call's results against golden and against one another, head by head."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, FP32, FP64, Format
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.measurement.deviation.metrics import compare
from numdev.measurement.deviation.sample import Sample

Heads = Mapping[str, list[Sample]]
Inputs = tuple[Tensor, ...]

_MODEL = {fmt.dtype: fmt for fmt in (FP64, FP32, FP16, BF16)}


def heads(results: Mapping[str, Tensor]) -> Heads:
    """The values of each head of each result, `[batch, heads, tokens, dim]`, over all batch entries."""
    return {name: [Sample(x[:, head]) for head in range(x.shape[1])] for name, x in results.items()}


class Golden:
    """The exact results of one call: O of q, k and v; with dO as well, the gradients."""

    def __init__(self, inputs: Inputs, mask: Mask, scale: float | None) -> None:
        self._inputs, self._asked = inputs, (mask, scale)
        self.unrounded = self._exact(inputs)

    def of(self, rounded: Inputs) -> Heads:
        """Of the inputs as a subject rounds them; computed anew only where rounding changes any of them."""
        same = all(torch.equal(a.double(), b) for a, b in zip(rounded, self._inputs, strict=True))
        return self.unrounded if same else self._exact(rounded)

    def _exact(self, inputs: Inputs) -> Heads:
        if len(inputs) == 3:
            q, k, v = inputs
            return heads({"out": Exact()(q, k, v, *self._asked).out})
        q, k, v, do = inputs
        found = ExactBackward()(q, k, v, do, *self._asked)
        return heads({"dq": found.dq, "dk": found.dk, "dv": found.dv})


@dataclass(frozen=True)
class Subject:
    """What is compared.

    Attributes:
        name: as rows give it.
        results: by output.
        formats: of each output, in whose ulp and u it is measured.
    """

    name: str
    results: Heads
    formats: Mapping[str, Format]

    def rows(self, against: Mapping[str, Heads]) -> Iterator[dict[str, Any]]:
        """A row for each reference, output and head."""
        for reference, expected in against.items():
            for output, found in self.results.items():
                for head, (sample, other) in enumerate(zip(found, expected[output], strict=True)):
                    place = {"output": output, "head": head, "subject": self.name, "reference": reference}
                    yield place | compare(sample, other, self.formats[output]).metrics()


def held_in(formats: Mapping[str, Format], dtype: torch.dtype) -> dict[str, Format]:
    """Formats of results that are kept in a model's dtype: the coarser of the two."""
    model = _MODEL[dtype]
    return {name: max(fmt, model, key=lambda one: one.u) for name, fmt in formats.items()}
