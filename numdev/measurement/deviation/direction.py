"""Rank and direction of an error that is a matrix for each head: a small error that keeps its direction adds up over steps."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, fields
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.errors import BadInput
from numdev.measurement.deviation.sample import Sample
from numdev.measurement.deviation.scaled import shifted


def _figure(text: str) -> Any:
    return field(default=math.nan, metadata={"unit": "relative", "text": text})


@dataclass(frozen=True)
class Directedness:
    """Figures of an error `D`, one matrix `[tokens, dim]` for each head; NaN where they are not defined.

    Heads without an error have neither rank nor direction and are left out of means. An error that is not finite has neither
    in any head; NaN and Inf are counted separately.
    """

    stable_rank: float = _figure(
        "||D||_F^2 / ||D||_2^2 of the error of one head, the mean over heads: 1 if all rows of D are multiples of one vector"
    )
    top_share: float = _figure(
        "sigma_1^2 / ||D||_F^2, the share of the error's energy that lies in its top singular vector, the mean over heads"
    )
    step_cosine: float = _figure(
        "cosine of the error of all heads, as one vector, with that of the seed before: far from 0 if the error does not depend "
        "on the inputs; empty for the first seed"
    )
    step_alignment: float = _figure(
        "|cosine| of the top right singular vector of D, a direction among the dim columns, with that of the seed before, the "
        "mean over heads: 1 if the direction stays, about 0.8 / sqrt(dim) by chance; empty for the first seed"
    )

    def figures(self) -> dict[str, float]:
        """Every figure by name."""
        return {name: getattr(self, name) for name in DIRECTED}


DIRECTED: dict[str, tuple[str, str]] = {f.name: (f.metadata["unit"], f.metadata["text"]) for f in fields(Directedness)}
UNDIRECTED = Directedness()
"""The figures of an output that is not a matrix for each head."""


@dataclass(frozen=True)
class Direction:
    """What is kept of the error of one replicate, to compare that of the next with it.

    Attributes:
        error: the error of all heads as one unit vector; None if the error is 0 or not finite.
        vectors: the top right singular vector of each head, up to its sign; 0 for a head without an error.
        energy: `||D||_F^2` of each head, in a unit of its own.
        top: `||D||_2^2` of each head, in the same unit.
    """

    error: Float[Tensor, " elements"] | None
    vectors: Float[Tensor, "heads dim"]
    energy: Float[Tensor, " heads"]
    top: Float[Tensor, " heads"]

    @staticmethod
    def of(sample: Sample, reference: Sample) -> Direction:
        """The direction of `D = x - r`, whose last two dimensions are tokens and dim.

        The singular values are square roots of eigenvalues of the Gram matrix `D^T D`, or of `D D^T` if that is smaller, in
        FP64: the largest is accurate to about `tokens * dim * 2^-53`; the small ones are not accurate, and are not used.

        Raises:
            BadInput: for a tensor of fewer dimensions.
        """
        if len(sample.shape) < 2:
            raise BadInput("outputs", tuple(sample.shape), "an output with `directed` has the dimensions [..., tokens, dim]")
        matrices = (sample.values - reference.values).reshape(-1, *sample.shape[-2:])
        largest = float(matrices.abs().amax())
        if not 0 < largest < math.inf:
            nothing = matrices.new_zeros(len(matrices))
            return Direction(None, matrices.new_zeros(len(matrices), sample.shape[-1]), nothing, nothing)
        matrices = shifted(matrices, -math.frexp(largest)[1])  # now no square overflows, and only negligible ones underflow
        energy = matrices.square().sum((-2, -1))
        top, vectors = _top(matrices)
        return Direction((matrices / math.sqrt(float(energy.sum()))).reshape(-1), vectors, energy, top)

    def after(self, before: Direction | None) -> Directedness:
        """The figures, given the direction of the seed before; None if there is none."""
        erring = self.energy > 0
        if self.error is None or not bool(erring.any()):
            return UNDIRECTED
        share = (self.top[erring] / self.energy[erring]).clamp(max=1.0)
        rank, top = float((1 / share).mean()), float(share.mean())
        if before is None or before.error is None or before.error.shape != self.error.shape:
            return Directedness(rank, top)
        both = erring & (before.energy > 0)
        aligned = (self.vectors * before.vectors).sum(-1).abs()[both]
        alignment = float(aligned.clamp(max=1.0).mean()) if bool(both.any()) else math.nan
        return Directedness(rank, top, max(-1.0, min(1.0, float(self.error.dot(before.error)))), alignment)


def _top(matrices: Float[Tensor, "heads tokens dim"]) -> tuple[Tensor, Tensor]:
    """The square of the largest singular value of each matrix, and its right singular vector."""
    wide = matrices.shape[-1] > matrices.shape[-2]
    gram = matrices @ matrices.mT if wide else matrices.mT @ matrices
    values, vectors = torch.linalg.eigh(gram)
    top = vectors[..., -1]
    if wide:  # v = D^T u / sigma
        top = torch.nn.functional.normalize((matrices.mT @ top[..., None]).squeeze(-1), dim=-1)
    return values[..., -1].clamp(min=0.0), top


class Course:
    """The direction of every error in the replicate before, for one point.

    Attributes:
        outputs: the outputs whose errors have a direction.
    """

    def __init__(self, outputs: Iterable[str]) -> None:
        self.outputs = frozenset(outputs)
        self._before: dict[tuple[str, ...], Direction] = {}

    def figures(self, place: tuple[str, ...], sample: Sample, reference: Sample) -> dict[str, float]:
        """The figures of one comparison of this replicate, identified by `place`, whose last part is the output."""
        if place[-1] not in self.outputs:
            return UNDIRECTED.figures()
        found = Direction.of(sample, reference)
        before, self._before[place] = self._before.get(place), found
        return found.after(before).figures()
