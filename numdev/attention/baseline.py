"""Baselines: what a variant is compared with besides golden, where that follows from the variant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.base import Attention, Backward
from numdev.attention.base import ForwardPass as ForwardVariant
from numdev.attention.differentiable import WithGradients
from numdev.attention.emulation import emulation_of, gradients_emulation_of
from numdev.attention.naive import Naive, NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Problem
from numdev.attention.softmax import Normalise
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order
from numdev.errors import BadInput, NotHonoured
from numdev.settings import setting

Policy = TypeVar("Policy", Precision, BackwardPrecision)


def baseline_for(fmt: Format) -> Naive:
    """The usual baseline of a variant whose output is in `fmt`: matmul, softmax, matmul as tensor operations in that format.

    A format narrower than 16 bits has no such operations in torch; its baseline is in FP32.
    """
    return Naive(Precision.eager(_of_torch(fmt)))


def _of_torch(fmt: Format) -> Format:
    return fmt if fmt.bits >= 16 else FP32


@dataclass(frozen=True)
class NaiveBaseline:
    """Naive attention, in the variant's output format unless a preset is named."""

    precision: str | None = setting(
        None, "preset of the baseline; uniform: every step in the variant's output format; null: tensor operations in it"
    )
    normalise: Normalise = setting(Normalise.EACH, "when the baseline divides by l: each, before the product with V, or end")

    def of(self, variant: Attention | Backward, problem: Problem) -> Naive | NaiveBackward:
        """The baseline of a variant on a problem, which returns what the variant does.

        Raises:
            BadInput: naming the setting.
        """
        if next(iter(variant.formats)) == ATTENTION_BACKWARD.primary:
            return self._backward(variant.format)
        if self.precision is None:
            return replace(baseline_for(variant.format), normalise=self.normalise)
        if self.precision == "uniform":
            return Naive(Precision.uniform(variant.format), self.normalise)
        return Naive(self._named(Precision.parse, self.precision), self.normalise)

    def _backward(self, fmt: Format) -> NaiveBackward:
        """Of a variant whose gradients are in `fmt`; both passes have the preset that is named."""
        if self.normalise is not Normalise.EACH:
            raise BadInput(
                "baseline.normalise", self.normalise.value, "with gradients, P is stored after the division; leave it out"
            )
        if self.precision is None:
            return NaiveBackward.eager(_of_torch(fmt))
        if self.precision == "uniform":
            return NaiveBackward(BackwardPrecision.uniform(fmt), Precision.uniform(fmt))
        return NaiveBackward(self._named(BackwardPrecision.parse, self.precision), Precision.parse(self.precision))

    def _named(self, parse: Callable[[str], Policy], name: str) -> Policy:
        try:
            return parse(name)
        except BadInput as error:
            raise BadInput("baseline.precision", name, f"{error.mend}; or uniform, null; for none, baseline=none") from None


class ForwardPass(Enum):
    """Where an emulation of gradients takes O and LSE from."""

    EMULATED = "emulated"
    OWN = "own"


@dataclass(frozen=True)
class EmulationBaseline:
    """The emulation of a kernel: its own tile and order where they are known, else those that are set."""

    br: int | None
    bc: int | None
    order: Order | None
    splits: int | None
    forward: ForwardPass = setting(
        ForwardPass.EMULATED,
        "of gradients, from which O and LSE the emulation makes them: emulated, those that it predicts of the variant's forward "
        "pass, or own, those that the variant leaves itself, so that the backward pass alone is emulated",
    )
    query_order: Order | None = setting(
        None,
        "of gradients, in which order the emulation adds the tiles of queries to dK and dV; null is what is known of a kernel",
    )

    def of(self, variant: Attention | Backward, problem: Problem) -> Tiled | TiledBackward:
        """The emulation of a variant on a problem.

        Raises:
            BadInput: for what is neither known nor set.
            NotHonoured: for a variant that does not say how it walks over the keys, and for what only gradients have.
        """
        if isinstance(variant, WithGradients):
            return self._of_gradients(variant, problem)
        if not isinstance(variant, ForwardVariant):
            mend = f"{type(variant).__name__} has no emulation; give baseline=eager, uniform or none"
            raise NotHonoured("baseline", "emulation", mend)
        for name, value in (("forward", self.forward), ("query_order", self.query_order)):
            if value not in (ForwardPass.EMULATED, None):
                raise NotHonoured(f"baseline.{name}", value.value, "only operation=attention_backward has it; leave it out")
        return emulation_of(variant, problem.shape, problem.mask, self.bc, self.order, self.splits or 1)

    def _of_gradients(self, variant: WithGradients, problem: Problem) -> TiledBackward:
        tiles = (self.br, self.bc, self.order, self.query_order)
        forward = variant.forward_pass if self.forward is ForwardPass.OWN else None
        try:
            return gradients_emulation_of(variant, problem.shape, problem.mask, *tiles, forward)
        except BadInput as error:
            if error.field != "forward":
                raise
            mend = f"the forward pass has no emulation ({error}); give own"
            raise BadInput("baseline.forward", self.forward.value, mend) from None
