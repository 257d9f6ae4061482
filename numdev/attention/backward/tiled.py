"""The tiled backward pass in pure tensors, every step in a format of its own.

FlashAttention-2's (Dao 2023, Algorithm 2), without the split of the work over processors: P is recomputed tile by tile from S
and the LSE that the forward pass saved.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from numdev.attention.backward.base import Gradients, Saved, UnderBackwardPolicy, check_backward_shapes, saved_by
from numdev.attention.backward.cost import BackwardCostModel
from numdev.attention.backward.counters import BackwardCounters
from numdev.attention.backward.function import BySaved
from numdev.attention.backward.honours import TILED, backward_ineffective, idle_recompute
from numdev.attention.backward.meetings import Meeting, Sizes, Turns, in_order
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.recompute import OutputForDelta, Recompute
from numdev.attention.backward.recurrence import Run
from numdev.attention.backward.steps import END, BackwardSteps
from numdev.attention.backward.timed import TimedFromSaved
from numdev.attention.backward.walk import BackwardWalk
from numdev.attention.base import Attention, UnderPolicy, group_heads, softmax_scale
from numdev.attention.commonsteps import NEVER
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.fused.backward_rule import backward_obstacle
from numdev.attention.fused.rule import FUSED
from numdev.attention.honours import Honours
from numdev.attention.mask import Mask
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput, NotHonoured
from numdev.settings import setting


@dataclass(frozen=True)
class TiledBackward(BySaved, TimedFromSaved, UnderBackwardPolicy):
    """A forward pass, then the tiled backward pass under a precision policy.

    dQ of a row is summed over the KV tiles in the tiling's order. dK and dV of a KV tile are summed over the heads of the
    group and, within a head, over the query tiles in `query_order`. So `br`, `bc` and both orders change bits. A kernel that
    adds to dQ by atomics has no fixed order: `Order.RANDOM` with a seed draws one for dQ; `query_order` is that of dK and dV.

    Attributes:
        forward: the forward pass, which saves O and LSE.
        precision: the format of each step.
        tiling: which tiles, in which order; one split.
        recompute: how P and delta are recomputed.
        query_order: order of the query tiles; None is the tiling's.
        count: whether to fill `Gradients.counters`; counting changes no result.
        turns: a walk in which each tile of keys has an order of query tiles of its own, in place of `query_order`.
    """

    honours: ClassVar[Honours] = Honours(TILED | {"backward.query_order", "backward.count"})

    forward: Attention
    precision: BackwardPrecision
    tiling: Tiling = Tiling()
    recompute: Recompute = Recompute()
    query_order: Order | None = setting(
        None,
        "in which order a tile of keys meets the tiles of queries, which are added to dK and dV: forward, reverse, ...; null is "
        "tiling.order",
    )
    count: bool = setting(True, "whether the variant counts flushed P, flushed dS, ...; it changes no result")
    turns: Turns | None = None

    def __post_init__(self) -> None:
        if self.tiling.splits != 1:
            raise BadInput("tiling.splits", self.tiling.splits, "gradients of ranges of keys cannot be combined; give 1")
        if self.turns is not None:
            self.turns.check(self.tiling)
            if self.query_order is not None:
                raise BadInput("backward.query_order", self.query_order.value, "the walk has an order of its own; give null")

    @property
    def idle(self) -> dict[str, str]:
        """Settings that have no effect, and the setting under which each would."""
        orders = (self.tiling.order, self.query_order)
        tiles = [replace(self.tiling, order=order).idle for order in orders if order is not None]
        unread = {name: reader for name, reader in tiles[0].items() if all(name in others for others in tiles)}
        return unread | idle_recompute(self.recompute)

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """See `numdev.attention.honours.OnShape`."""
        return backward_ineffective(self.forward, self.precision, self.tiling, self.recompute, shape)

    @property
    def reads(self) -> OutputForDelta:
        """See `FromSaved`."""
        return self.recompute.output if self.recompute.reads_output else OutputForDelta.ROUNDED

    def cost_model(self, ran: Ran) -> BackwardCostModel:
        """See `numdev.attention.backward.timed.TimedBackward`."""
        return BackwardCostModel(CostModel(Algorithm.TILED, Width.of(self.format, self.format), self.tiling.br), self.tiling.bc)

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """See `numdev.attention.backward.emulation.EmulatedBackward`."""
        return BackwardWalk(self.precision, self.recompute, self.tiling, query_order=self.query_order, turns=self.turns)

    def replicate(self, seed: int) -> TiledBackward:
        """The implementation of one replicate; see `Policy.replicate`."""
        forward: Attention = self.forward
        if isinstance(forward, UnderPolicy):
            forward = forward.replicate(seed)  # type: ignore[assignment]
        precision = self.precision.replicate(seed)
        same = forward is self.forward and precision is self.precision
        return self if same else replace(self, forward=forward, precision=precision)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """Takes rounded inputs and returns tensors in the carrier. Shapes as in `Gradients`."""
        check_backward_shapes(q, k, v, do, mask)
        return self.backward(q, k, v, do, saved_by(self.forward, self.reads, (q, k, v), mask, scale), mask, scale)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone. Its carrier holds the saved O and LSE: an FP32 one rounds those in FP64 to nearest."""
        check_backward_shapes(q, k, v, do, mask)
        saved.check(q, v)
        carrier, kv_heads = self.precision.carrier, k.shape[1]
        k, v = (mask.without_padding(x.to(carrier))[:, :, None] for x in (k, v))
        q, do, out = (group_heads(x.to(carrier), kv_heads) for x in (q, do, saved.out))
        lse = group_heads(saved.lse.to(carrier)[..., None], kv_heads)
        steps = BackwardSteps.of(self.precision, max(q.shape[-2], k.shape[-2]))
        steps.at(END, -1, 0)
        hidden, scaled = lse == NEVER, steps.lse(lse, self.recompute.exponential)
        run = Run(steps, self.recompute, q, k, v, do, scaled, mask, softmax_scale(q, scale), self._meetings(q, k, mask))
        delta = steps.delta_of_output(do, out) if self.recompute.reads_output else run.delta()
        delta.masked_fill_(hidden, 0.0)
        counters = BackwardCounters(q.device) if self.count else None
        ran = Ran(FUSED) if backward_obstacle(run) is None else Ran()
        dq, dk, dv = self._fused(run, delta, counters) if ran.name else run.gradients(delta, counters)
        steps.at(END, 0, 0)
        dq, dk = steps.scale_dq(dq, run.factor), steps.scale_dk(dk, run.factor)
        dq, dk, dv = (steps.output(gradient) for gradient in (dq, dk, dv))
        counted = {} if counters is None else counters.summary()
        return Gradients(dq.flatten(1, 2), dk, dv, delta.squeeze(-1).flatten(1, 2), counted, ran)

    def _fused(self, run: Run, delta: Tensor, counters: BackwardCounters | None) -> tuple[Tensor, Tensor, Tensor]:
        """The same bits by compiled passes."""
        from numdev.attention.fused.backward_walk import gradients  # here, since numba takes as long to import as all of numdev

        return gradients(run, delta, counters)

    def _meetings(self, q: Tensor, k: Tensor, mask: Mask) -> list[Meeting]:
        """Of query tiles and KV tiles of grouped heads, in their order."""
        group, queries, keys = q.shape[2], q.shape[-2], k.shape[-2]
        sizes = Sizes(group, mask.query_range(queries, keys, 0, keys)[0], queries, keys)
        if self.turns is not None:
            return self.turns.meetings(self.tiling, sizes)
        order = self.tiling.order if self.query_order is None else self.query_order
        return in_order(self.tiling, order, sizes)
