"""The backward pass of naive, untiled attention under a policy: autograd of matmul, softmax, matmul, which stores P."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.attention.backward.base import Gradients, UnderBackwardPolicy, check_backward_shapes
from numdev.attention.backward.cost import BackwardCostModel
from numdev.attention.backward.function import Pair, applied, whole
from numdev.attention.backward.honours import STEPS
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.backward.steps import END, TILES, BackwardSteps
from numdev.attention.backward.timed import Passes, bare_call
from numdev.attention.backward.walk import BackwardWalk
from numdev.attention.base import AsRounded, group_heads, softmax_scale
from numdev.attention.commonsteps import NEVER
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.honours import Honours
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.steps import Steps

_STORED = ("preset", "scores", "exponential", "row_sum", "probabilities")  # the steps that compute P


@dataclass(frozen=True)
class NaiveBackward(AsRounded, UnderBackwardPolicy):
    """`P = softmax(scale Q K^T)` as the forward pass stores it, then the gradient of each of its operations in turn.

    `dV = P^T dO`, `dP = dO V^T`, `dS = P * (dP - rowsum(dP * P))`, `dS <- scale dS`, `dQ = dS K`, `dK = dS^T Q`. Differences
    from `TiledBackward` with one tile as large as the problem: P is `exp(S - m) / l`, stored, and used in all three; delta is
    always computed from P; dS is rounded by `ds`, then scaled and rounded by `ds` again, as torch does.

    Attributes:
        precision: the policy of the backward pass. `scores` and `exponential` are not used: nothing is recomputed.
        forward: the policy of the forward pass, which computes P.
    """

    honours: ClassVar[Honours] = Honours(
        (STEPS - {"precision.scores", "precision.exponential"}) | {f"forward_precision.{name}" for name in _STORED}
    )

    precision: BackwardPrecision
    forward: Precision

    @staticmethod
    def eager(fmt: Format) -> NaiveBackward:
        """Both passes as three tensor operations in `fmt`."""
        return NaiveBackward(BackwardPrecision.eager(fmt), Precision.eager(fmt))

    @property
    def idle(self) -> dict[str, str]:
        """See `TiledBackward`; nothing here depends on a setting."""
        return {}

    @property
    def forward_pass(self) -> Naive:
        """See `numdev.attention.backward.timed.TimedBackward`."""
        return Naive(self.forward)

    @property
    def primal(self) -> Naive:
        """See `numdev.attention.backward.base.Differentiable`."""
        return Naive(self.forward)

    @property
    def pair(self) -> Pair:
        """See `numdev.attention.backward.function.Paired`. P is computed again: the forward pass returns O alone."""
        return whole(self.primal, self)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Tensor:
        """See `numdev.attention.backward.base.Differentiable`."""
        return applied(q, k, v, self.pair, mask, scale)

    def cost_model(self, ran: Ran) -> BackwardCostModel:
        """The cost model of the operations that it emulates."""
        width = Width.of(self.format, self.format)
        return BackwardCostModel(CostModel(Algorithm.VANILLA, width, holds_scores=True))

    def walk(self, shape: Shape, mask: Mask) -> BackwardWalk:
        """See `numdev.attention.backward.walk`."""
        return BackwardWalk(self.precision, why="it has no tiles")

    def replicate(self, seed: int) -> NaiveBackward:
        """The implementation of one replicate; see `Policy.replicate`."""
        precision, forward = self.precision.replicate(seed), self.forward.replicate(seed)
        same = precision is self.precision and forward is self.forward
        return self if same else replace(self, precision=precision, forward=forward)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """Takes rounded inputs and returns tensors in the carrier. Shapes as in `Gradients`; S and P are held in memory whole."""
        return self._prepared(q, k, v, do, mask, scale)()

    def passes(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Passes:
        """See `TimedBackward`. Autograd keeps P of the forward pass, whereas `Naive` returns O alone."""
        attend, backward = bare_call(self.forward_pass, (q, k, v), mask, scale), self._prepared(q, k, v, do, mask, scale)

        def both() -> Gradients:
            attend()
            return backward()

        return Passes(attend, backward, both)

    def _prepared(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None) -> Callable[[], Gradients]:
        """The backward pass as a call; P is computed and stored before."""
        check_backward_shapes(q, k, v, do, mask)
        (queries, keys), kv_heads, factor = (q.shape[-2], k.shape[-2]), k.shape[1], softmax_scale(q, scale)
        k, v = (mask.without_padding(x)[:, :, None] for x in (k, v))
        q, do = group_heads(q, kv_heads), group_heads(do, kv_heads)
        visible = mask.visible(queries, keys, (0, queries), (0, keys), q.device)
        visible = None if visible is None else visible[:, :, None]
        p = self._stored(q, k, visible, factor).to(self.precision.carrier)
        q, k, v, do = (x.to(self.precision.carrier) for x in (q, k, v, do))
        return lambda: self._gradients((q, k, v, do), p, visible, factor)

    def _gradients(
        self, inputs: tuple[Tensor, Tensor, Tensor, Tensor], p: Tensor, visible: Tensor | None, factor: float
    ) -> Gradients:
        """The gradient of each operation in turn, from the stored P."""
        q, k, v, do = inputs
        queries, keys = q.shape[-2], k.shape[-2]
        steps = BackwardSteps.of(self.precision, max(queries, keys))
        steps.at(TILES, 0, 0)
        dp = steps.dp(do, v)
        if visible is not None:
            dp.masked_fill_(~visible, 0.0)
        delta = steps.delta_of_stored(dp, p)
        ds = steps.ds_of_stored(dp, p, delta, factor)
        if visible is not None:
            ds.masked_fill_(~visible, 0.0)
            delta.masked_fill_(~visible.any(-1, keepdim=True), 0.0)
        p = steps.probabilities(p)
        dq = steps.add_dq(torch.zeros_like(q), steps.dq(ds, k, visible))
        dk, dv = torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0])
        for head in range(q.shape[2]):
            seen = None if visible is None else visible[:, :, 0]
            steps.add_dk(dk, steps.dk(ds[:, :, head], q[:, :, head], seen))
            steps.add_dv(dv, steps.dv(p[:, :, head], do[:, :, head], seen))
        steps.at(END, 0, 0)
        dq, dk, dv = (steps.output(gradient) for gradient in (dq, dk, dv))
        return Gradients(dq.flatten(1, 2), dk, dv, delta.squeeze(-1).flatten(1, 2))

    def _stored(self, q: Tensor, k: Tensor, visible: Tensor | None, factor: float) -> Tensor:
        """P as the forward pass stores it, 0 where a row does not see a key; what `Naive` multiplies with V."""
        steps = Steps.of(self.forward, q.shape[-2])
        steps.at(0, 0, 0)
        s = steps.scores(q.to(steps.carrier), k.to(steps.carrier).mT, factor)
        if visible is not None:
            s.masked_fill_(~visible, NEVER)
        p = steps.exponential(s, s.amax(-1, keepdim=True), torch.exp_)
        p = steps.share(p, steps.row_sum(p))
        return p if visible is None else p.masked_fill_(~visible, 0.0)
