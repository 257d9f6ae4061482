"""How far the weights of two runs are apart: what each metric can see, and what it cannot.

Of weights W of a run, W0 of the reference and I, the initial ones of each:

- `max_difference = max |W - W0|`: the paper's. It sees one weight; it says nothing of the others.
- `wasserstein = W1(values of W, values of W0)`: the paper's. It compares the distributions of values and is blind to which weight
  has which value: two runs whose weights are a permutation of each other have distance 0, and two initialisations by the same
  rule are near each other however different they are.
- `relative_frobenius = ||W - W0||_F / ||W0||_F`: sees every weight, the large ones most.
- `cosine` of W and W0: blind to a common factor; near 1 while both still resemble a common start.
- `change_cosine` of `W - I` and `W0 - I0`: whether both learnt in the same direction; undefined (NaN) before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.errors import BadInput
from numdev.measurement.deviation.wasserstein import wasserstein

MODEL = "model"
"""The name of all weights together."""


def _metric(unit: str, text: str) -> Any:
    return field(metadata={"unit": unit, "text": text})


@dataclass(frozen=True)
class WeightDeviation:
    """Metrics of weights W against those of a reference, W0, from the initial I and I0. See the module for what each sees.

    All are NaN where a weight is not finite.
    """

    max_difference: float = _metric("absolute", "max |W - W0|, the paper's max_difference (section V)")
    wasserstein: float = _metric("absolute", "Wasserstein-1 distance of the distributions of the values of W and W0 (section V)")
    relative_frobenius: float = _metric("relative", "||W - W0||_F / ||W0||_F")
    cosine: float = _metric("relative", "cosine of the angle between W and W0")
    change_cosine: float = _metric("relative", "cosine of the angle between the changes of W and W0 since initialisation")

    @staticmethod
    def between(
        weights: Float[Tensor, "*shape"],
        reference: Float[Tensor, "*shape"],
        start: Float[Tensor, "*shape"],
        reference_start: Float[Tensor, "*shape"],
    ) -> WeightDeviation:
        """Compare two tensors on their device, in FP64.

        Raises:
            BadInput: for a tensor without elements.
        """
        if weights.numel() == 0:
            raise BadInput("weights", tuple(weights.shape), "give a tensor that holds something")
        w, w0, i, i0 = (x.detach().reshape(-1).double() for x in (weights, reference, start, reference_start))
        if not bool((w.isfinite() & w0.isfinite()).all()):
            return WeightDeviation(*[math.nan] * len(METRICS))
        difference = w - w0
        return WeightDeviation(
            max_difference=float(difference.abs().max()),
            wasserstein=wasserstein(weights.reshape(-1), reference.reshape(-1)),
            relative_frobenius=_ratio(float(difference.norm()), float(w0.norm())),
            cosine=_cosine(w, w0),
            change_cosine=_cosine(w - i, w0 - i0),
        )

    def metrics(self) -> dict[str, float]:
        """Every metric by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


METRICS: dict[str, tuple[str, str]] = {f.name: (f.metadata["unit"], f.metadata["text"]) for f in fields(WeightDeviation)}
"""Unit and meaning of each metric."""


@dataclass(frozen=True)
class Weights:
    """The weights of a run after some step and before the first, by name."""

    now: Mapping[str, Tensor]
    start: Mapping[str, Tensor]


def deviations(run: Weights, reference: Weights, device: torch.device) -> dict[str, WeightDeviation]:
    """Every tensor's deviation by its name, and under `model` that of all weights together.

    On a GPU ten million values are sorted in milliseconds; the metrics are the CPU's but for the order of FP64 sums.

    Raises:
        BadInput: where names or shapes differ.
    """
    parts = [run.now, reference.now, run.start, reference.start]
    shapes = [{name: x.shape for name, x in part.items()} for part in parts]
    if any(each != shapes[0] for each in shapes) or not shapes[0]:
        raise BadInput("weights", "weights of different models", "compare runs of the same task")
    held = [{name: part[name].detach().to(device) for name in sorted(part)} for part in parts]  # files have no order
    whole = [torch.cat([part[name].reshape(-1) for name in held[0]]) for part in held]
    found = {MODEL: WeightDeviation.between(*whole)}
    for name in held[0]:
        found[name] = WeightDeviation.between(*(part[name] for part in held))
    return found


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def _cosine(x: Tensor, y: Tensor) -> float:
    """In [-1, 1]; exactly 1 for equal tensors, NaN where one of them is 0."""
    size = float(x.norm()) * float(y.norm())
    if size == 0:
        return math.nan
    return 1.0 if bool((x == y).all()) else max(-1.0, min(1.0, float(x.dot(y)) / size))
