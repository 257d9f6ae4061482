"""Baselines that follow from a variant: naive attention in its format, and its emulation.

An emulation predicts a kernel's result: tiled attention with the kernel's formats, recurrence, tiles and orders.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeVar

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.base import Attention
from numdev.attention.differentiable import Backward
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive, NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.softmax import Normalise
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput, NotHonoured
from numdev.settings import setting

Policy = TypeVar("Policy", Precision, BackwardPrecision)
_NO_MASK = Mask()


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
        fmt, name = variant.format, self.precision
        if "out" in variant.formats:
            if name is None:
                return replace(baseline_for(fmt), normalise=self.normalise)
            return Naive(Precision.uniform(fmt) if name == "uniform" else _named(Precision.parse, name), self.normalise)
        if self.normalise is not Normalise.EACH:
            mend = "with gradients, P is stored after the division; leave it out"
            raise BadInput("baseline.normalise", self.normalise.value, mend)
        if name is None:
            return NaiveBackward.eager(_of_torch(fmt))
        if name == "uniform":
            return NaiveBackward(BackwardPrecision.uniform(fmt), Precision.uniform(fmt))
        return NaiveBackward(_named(BackwardPrecision.parse, name), Precision.parse(name))


def _named(parse: Callable[[str], Policy], name: str) -> Policy:
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
        if isinstance(variant, Backward):
            tiles = (self.br, self.bc, self.order, self.query_order)
            forward = variant.forward_pass if self.forward is ForwardPass.OWN else None
            try:
                return gradients_emulation_of(variant, problem.shape, problem.mask, *tiles, forward)
            except BadInput as error:
                if error.field != "forward":
                    raise
                mend = f"the forward pass has no emulation ({error}); give own"
                raise BadInput("baseline.forward", self.forward.value, mend) from None
        if not isinstance(variant, Attention):
            mend = f"{type(variant).__name__} has no emulation; give baseline=eager, uniform or none"
            raise NotHonoured("baseline", "emulation", mend)
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
        bc, order = bc or known.bc, order or known.order
        if bc is None or order is None:
            raise _unknown(variant, known.why, {"tiling.bc": bc, "tiling.order": order})
        tiling = Tiling(bc=bc, order=order, splits=known.splits or splits)
    return Tiled(known.precision, tiling, known.softmax, count=False)


def gradients_emulation_of(
    variant: Backward,
    shape: Shape,
    mask: Mask,
    br: int | None = None,
    bc: int | None = None,
    order: Order | None = None,
    query_order: Order | None = None,
    forward: Attention | None = None,
) -> TiledBackward:
    """`TiledBackward` with the formats, tiles and orders that the kernel `variant` declares; see `KernelArithmetic`.

    `br`, `bc`, `order` and `query_order` replace the kernel's own. The emulation takes O and LSE from `forward`; None is the
    emulation of the variant's own forward pass. With `variant.forward_pass` only the backward pass is emulated.

    Raises:
        BadInput: if something about the kernel is neither known nor given.
    """
    known = variant.arithmetic(shape, mask)
    tiling, rows_in = known.tiling, known.query_order
    if tiling is None:
        br, bc = br or known.br, bc or known.bc
        order, rows_in = order or known.order, query_order or known.query_order
        if br is None or bc is None or order is None or rows_in is None:
            needed = {"tiling.br": br, "tiling.bc": bc, "tiling.order": order, "baseline.query_order": rows_in}
            raise _unknown(variant, known.why, needed)
        tiling = Tiling(br, bc, order)
    if forward is None:
        own = variant.forward if isinstance(variant.forward, Attention) else variant.primal
        try:
            forward = emulation_of(own, shape, mask)
        except BadInput as error:
            mend = f"its emulation needs more settings: {error}; or give the forward pass"
            raise BadInput("forward", type(own).__name__.lower(), mend) from None
    return TiledBackward(forward, known.precision, tiling, known.recompute, rows_in, count=False, turns=known.turns)


def _unknown(variant: object, why: str, needed: Mapping[str, object]) -> BadInput:
    mend = f"{why}, for {type(variant).__name__.lower()}; state what the emulation should use"
    return BadInput(next(name for name, value in needed.items() if value is None), None, mend)
