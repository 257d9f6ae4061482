"""What a measurement of speed needs of an implementation of the backward pass: both passes, alone and together, and its cost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from numdev.attention.backward.base import Backward, FromSaved, Gradients, Saved, leaving, saved_of
from numdev.attention.backward.cost import BackwardCostModel
from numdev.attention.backward.recompute import OutputForDelta
from numdev.attention.base import AsRounded, Attention, Held, Output, Timed
from numdev.attention.mask import Mask
from numdev.attention.ran import Ran


@dataclass(frozen=True)
class Passes:
    """The calls that are timed, on the same inputs; each can be repeated.

    Attributes:
        forward: the forward pass, which saves what a backward pass needs.
        backward: the backward pass alone, from what an earlier forward pass saved.
        both: a forward pass, and the backward pass from what it saved.
    """

    forward: Callable[[], Output]
    backward: Callable[[], Gradients]
    both: Callable[[], Gradients]


@runtime_checkable
class TimedBackward(Backward, Held, Protocol):
    """An implementation whose speed is measured."""

    @property
    def forward_pass(self) -> Attention:
        """The forward pass that `Passes.forward` makes."""
        ...

    def cost_model(self, ran: Ran) -> BackwardCostModel | None:
        """What the cost model must know of a call that ran as `ran` says; None where no model counts its traffic."""
        ...

    def passes(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Passes:
        """The calls on rounded inputs, after one forward pass."""
        ...


class TimedFromSaved(AsRounded):
    """Implements `TimedBackward` where the backward pass takes the O and the LSE of the field `forward`."""

    forward: Attention

    @property
    def reads(self) -> OutputForDelta:
        """See `FromSaved`."""
        raise NotImplementedError

    @property
    def forward_pass(self) -> Attention:
        """See `TimedBackward`."""
        return leaving(self.forward, self.reads)

    def cost_model(self, ran: Ran) -> BackwardCostModel | None:
        """See `TimedBackward`; None unless an implementation overrides it."""
        return None

    def passes(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Passes:
        """See `TimedBackward`."""
        assert isinstance(self, FromSaved)
        return passes_from_saved(self, self.forward_pass, (q, k, v, do), mask, scale)


def passes_from_saved(
    variant: FromSaved,
    forward: Attention,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor],
    mask: Mask,
    scale: float | None,
) -> Passes:
    """The passes where the backward pass takes O and LSE; the forward pass has its inputs rounded and stored beforehand."""
    attend = bare_call(forward, inputs[:3], mask, scale)

    def left() -> Saved:
        return saved_of(attend(), forward)

    saved = left()
    return Passes(
        attend,
        lambda: variant.backward(*inputs, saved, mask, scale),
        lambda: variant.backward(*inputs, left(), mask, scale),
    )


def bare_call(forward: Attention, inputs: tuple[Tensor, Tensor, Tensor], mask: Mask, scale: float | None) -> Callable[[], Output]:
    """A forward pass with its inputs rounded by its own policy and stored in its own dtype beforehand."""
    given = forward.round_inputs(*inputs)
    if not isinstance(forward, Timed):
        return lambda: forward(*given, mask, scale)
    q, k, v = (x if forward.storage is None else x.to(forward.storage) for x in given)
    return lambda: forward.bare(q, k, v, mask, scale)
