"""What a variant is compared with, besides golden, where that follows from the variant."""

from __future__ import annotations

from dataclasses import dataclass, replace

from numdev.attention.base import Attention
from numdev.attention.baseline import baseline_for
from numdev.attention.emulation import emulation_of
from numdev.attention.honours import Declares
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem
from numdev.attention.softmax import Normalise
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order
from numdev.errors import BadInput
from numdev.settings import setting


@dataclass(frozen=True)
class NaiveBaseline:
    """Naive attention, in the variant's output format unless a preset is named."""

    precision: str | None = setting(
        None, "preset of the baseline; uniform: every step in the variant's output format; null: tensor operations in it"
    )
    normalise: Normalise = setting(Normalise.EACH, "when the baseline divides by l: each, before the product with V, or end")

    def of(self, variant: Attention, problem: Problem) -> Naive:
        """The baseline of a variant on a problem."""
        if self.precision is None:
            return replace(baseline_for(variant.format), normalise=self.normalise)
        if self.precision == "uniform":
            return Naive(Precision.uniform(variant.format), self.normalise)
        try:
            return Naive(Precision.parse(self.precision), self.normalise)
        except BadInput as error:
            raise BadInput(
                "baseline.precision", self.precision, f"{error.mend}; or uniform, null; baseline=none is none"
            ) from None


@dataclass(frozen=True)
class EmulationBaseline:
    """The emulation of a kernel: its own tile and order where they are known, else those that are set."""

    bc: int | None
    order: Order | None
    splits: int | None

    def of(self, variant: Declares, problem: Problem) -> Tiled:
        """The emulation of a variant on a problem."""
        return emulation_of(variant, problem.shape, problem.mask, self.bc, self.order, self.splits or 1)
