"""Baselines that follow from a variant: naive attention in its format, and its emulation.

An emulation predicts a kernel's result: tiled attention with the kernel's formats, recurrence, tiles and orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.base import Attention, Backward, Implementation, KernelArithmetic
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive, NaiveBackward
from numdev.attention.precision import BackwardPrecision, Policy, Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import Normalise
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput, NotHonoured
from numdev.settings import setting

_NO_MASK = Mask()
AnyPolicy = TypeVar("AnyPolicy", bound=Policy)


def baseline_for(fmt: Format) -> Naive:
    """The usual baseline of a variant whose output is in `fmt`: matmul, softmax, matmul as tensor operations in that format.

    A format narrower than 16 bits has no such operations in torch; its baseline is in FP32.
    """
    return Naive(_eager(Precision, fmt))


def _eager(kind: type[AnyPolicy], fmt: Format) -> AnyPolicy:
    return kind.eager(fmt if fmt.bits >= 16 else FP32)


@dataclass(frozen=True)
class NaiveBaseline:
    """Naive attention, in the variant's output format unless a preset is named."""

    precision: str | None = setting(
        None, "preset of the baseline; uniform: every step in the variant's output format; null: tensor operations in it"
    )
    normalise: Normalise = setting(Normalise.EACH, "when the baseline divides by l: each, before the product with V, or end")

    def of(self, variant: Attention | Backward, problem: Problem) -> Naive | NaiveBackward:
        """The baseline of a variant on a problem, which returns what the variant does."""
        if "out" in variant.formats:
            return Naive(self._policy(Precision, variant.format), self.normalise)
        if self.normalise is not Normalise.EACH:
            hint = "with gradients, P is stored after the division; leave it out"
            raise BadInput("baseline.normalise", self.normalise.value, hint)
        return NaiveBackward(self._policy(BackwardPrecision, variant.format), self._policy(Precision, variant.format))

    def _policy(self, kind: type[AnyPolicy], fmt: Format) -> AnyPolicy:
        if self.precision is None:
            return _eager(kind, fmt)
        if self.precision == "uniform":
            return kind.uniform(fmt)
        try:
            return kind.parse(self.precision)
        except BadInput as error:
            hint = f"{error.hint}; or uniform, null; for none, baseline=none"
            raise BadInput("baseline.precision", self.precision, hint) from None


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
        """The emulation of a variant on a problem; what is neither known nor set, or not honoured, is refused by name."""
        if isinstance(variant, Backward):
            tiles = {"br": self.br, "bc": self.bc, "order": self.order, "query_order": self.query_order}
            forward = variant.forward_pass if self.forward is ForwardPass.OWN else None
            try:
                return gradients_emulation_of(variant, problem.shape, problem.mask, forward=forward, **tiles)
            except BadInput as error:
                if error.field != "forward":
                    raise
                hint = f"the forward pass has no emulation ({error}); give own"
                raise BadInput("baseline.forward", self.forward.value, hint) from None
        if not isinstance(variant, Attention):
            hint = f"{type(variant).__name__} has no emulation; give baseline=eager, uniform or none"
            raise NotHonoured("baseline", "emulation", hint)
        for name, value in (("forward", self.forward), ("query_order", self.query_order)):
            if value not in (ForwardPass.EMULATED, None):
                raise NotHonoured(f"baseline.{name}", value.value, "only operation=attention_backward has it; leave it out")
        return emulation_of(variant, problem.shape, problem.mask, self.bc, self.order, self.splits or 1)


def emulation_of(
    variant: Attention, shape: Shape, mask: Mask = _NO_MASK, bc: int | None = None, order: Order | None = None, splits: int = 1
) -> Tiled:
    """`Tiled` with the formats, recurrence, order and tile that the kernel `variant` declares; see `KernelArithmetic`.

    On the problem's shape and mask depend the tiles of PyTorch's kernels. `bc` and `order` replace the kernel's own; `splits` are
    those of a kernel that does not say its own.

    Raises:
        BadInput: where something is not known and not given, and for `Kernel.AUTO`, which is one of two kernels.
    """
    known = variant.arithmetic(shape, mask)
    tiling = known.tiling
    if tiling is None:
        chosen = _chosen(variant, known, bc=bc, order=order)
        tiling = Tiling(**chosen, splits=known.splits or splits, split_size=known.split_size)
    return Tiled(known.precision, tiling, known.softmax, count=False)


def gradients_emulation_of(
    variant: Backward, shape: Shape, mask: Mask, *, forward: Attention | None = None, **tiles: Any
) -> TiledBackward:
    """`TiledBackward` with the formats, tiles and orders that the kernel `variant` declares; see `KernelArithmetic`.

    `br`, `bc`, `order` and `query_order` replace the kernel's own; what is neither known nor set is refused. O and LSE are those
    of `forward`, or of the emulation of the variant's own forward pass. With `variant.forward_pass` only the backward pass is
    emulated.
    """
    known = variant.arithmetic(shape, mask)
    tiling, query_order = known.tiling, known.query_order
    if tiling is None:
        own = _chosen(variant, known, **dict.fromkeys(("br", "bc", "order", "query_order")) | tiles)
        query_order = own.pop("query_order")
        tiling = Tiling(**own)
    if forward is None:
        attends = variant.forward if isinstance(variant.forward, Attention) else variant.primal
        try:
            forward = emulation_of(attends, shape, mask)
        except BadInput as error:
            hint = f"its emulation needs more settings: {error}; or give the forward pass"
            raise BadInput("forward", type(attends).__name__.lower(), hint) from None
    return TiledBackward(forward, known.precision, tiling, known.recompute, query_order, count=False, turns=known.turns)


def _chosen(variant: Implementation, known: KernelArithmetic[Any], **tiles: Any) -> dict[str, Any]:
    """Tiles and orders as they are set, else as the kernel has them."""
    chosen = {name: value or getattr(known, name) for name, value in tiles.items()}
    for name, value in chosen.items():
        if value is None:
            hint = f"{known.why}, for {type(variant).__name__.lower()}; state what the emulation should use"
            raise BadInput(f"{'baseline' if name == 'query_order' else 'tiling'}.{name}", None, hint)
    return chosen
