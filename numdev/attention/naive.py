"""Naive, untiled attention under a precision policy: the paper's baseline, and autograd of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.formats import Format
from numdev.arithmetic.products import whole_blocks
from numdev.arithmetic.quantise import Quantised
from numdev.attention.base import (
    Attention,
    Backward,
    Gradients,
    Output,
    Passes,
    Saved,
    bare_call,
    check_backward_shapes,
    check_shapes,
    group_heads,
    softmax_scale,
)
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.groups import BACKWARD_STEPS, PRESET, STEPS, AcceptedSettings
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Normalise
from numdev.attention.steps import END, NEVER, TILES, BackwardSteps, Steps, slope
from numdev.attention.tiling import KernelLaunch
from numdev.errors import BadInput
from numdev.settings import setting

_WORKSPACE = {"cpu": 1 << 21, "cuda": 1 << 28}  # scores held at once


@dataclass(frozen=True)
class Naive(Attention):
    """`S = scale Q K^T; P = exp(S - rowmax S); O = (P / l) V`, each step in its format, over whole rows.

    Attributes:
        precision: the policy. `rescale` is not used: nothing is rescaled.
        normalise: EACH divides P by `l` before the product, as the paper's `softmax(Q K^T / sqrt(d)) V` does (section II.A):
            `exponential` rounds the quotient, then `probabilities`, and the accumulator's cast is not used;
            END divides O after it, which is exactly tiled attention with a single tile.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(
        (PRESET | STEPS | {"attention.normalise"}) - {"precision.rescale"}
    )
    unknown: ClassVar[str] = "it has no tiles"

    precision: Precision
    normalise: Normalise = setting(
        Normalise.EACH, "when untiled attention divides by l: `each`, P before the product with V, or `end`, O after it"
    )

    def __post_init__(self) -> None:
        inputs = self.precision.inputs
        if isinstance(inputs, Quantised) and any(inputs.shared_by(of_v=step == "values") for step in self.precision.units):
            hint = "its tensor cores would multiply codes times their scale; give it a number format, or attention=tiled"
            raise BadInput("precision.inputs", str(inputs), hint)

    @property
    def idle(self) -> dict[str, str]:
        """Where P is divided, the accumulator is not."""
        divided = {} if self.normalise is Normalise.END else {"precision.accumulator": "attention.normalise=end"}
        return self.precision.idle | divided

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        """Vanilla attention's, though a block of rows at a time is in memory."""
        return CostModel(Algorithm.VANILLA, Width.of(self.format, self.format))

    def unrounded(self) -> Naive:
        """Itself, its output left in the format of the last operation before the cast."""
        each = self.normalise is Normalise.EACH
        last = self.precision.values.accumulate if each else self.precision.accumulator
        return replace(self, precision=self.precision.with_step(output=last))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, the carrier out. Rows are worked on in blocks, which changes no bit: they are independent."""
        check_shapes(q, k, v, mask, adds=True)
        factor = softmax_scale(q, scale)
        carrier = self.precision.carrier
        q, k, v = q.to(carrier), mask.without_padding(k.to(carrier)), mask.without_padding(v.to(carrier))
        queries, (kv_heads, keys) = q.shape[2], k.shape[1:3]
        grouped, k, v = group_heads(q, kv_heads), k[:, :, None], v[:, :, None]
        transposed = k.mT.contiguous()
        out = q.new_empty(*grouped.shape[:-1], v.shape[-1])
        lse = q.new_empty(grouped.shape[:-1])
        steps = Steps.of(self.precision, queries)
        step = whole_blocks(_WORKSPACE[q.device.type] // (q.shape[0] * q.shape[1] * keys), carrier)
        for start in range(0, queries, step):
            rows = (start, min(start + step, queries))
            visible = mask.seen(queries, keys, rows, (0, keys), q.device, kv_heads)
            block = grouped[..., slice(*rows), :]
            bias, dropped = (of(rows, (0, keys), block) for of in (mask.added, mask.dropped))
            steps.at(0, 0, start)
            s = steps.raised(steps.scores(block, transposed, factor, mask.softcap), mask.softcap, bias)
            out[..., slice(*rows), :], lse[..., slice(*rows)] = self._rows(steps, s, v, (visible, dropped), mask.keep_scale)
        return Output(out.flatten(1, 2), lse.flatten(1, 2))

    def _rows(
        self, steps: Steps, s: Tensor, v: Tensor, masks: tuple[Tensor | None, Tensor | None], keep_scale: float
    ) -> tuple[Tensor, Tensor]:
        visible, dropped = masks
        p, m = _exponentials(steps, s, visible)
        row_sum = steps.row_sum(p)
        lse = steps.lse(m, row_sum).squeeze(-1)
        p = p if dropped is None else p.masked_fill_(dropped, 0.0)
        if self.normalise is Normalise.EACH:
            out = steps.values(steps.share(p, row_sum, keep_scale), v, visible)
        else:
            out = steps.values(steps.probabilities(p, keep_scale), v, visible)
            out = steps.normalise(self.precision.accumulator.apply_(out, steps.noise), row_sum)
        return steps.output(out), lse


def _exponentials(steps: Steps, s: Tensor, visible: Tensor | None) -> tuple[Tensor, Tensor]:
    """`exp(S - m)` and `m` of whole rows."""
    if visible is not None:
        s.masked_fill_(~visible, NEVER)
    m = s.amax(-1, keepdim=True)
    return steps.exponential(s, m, torch.exp_), m


_STORED = ("preset", "scores", "exponential", "row_sum", "probabilities")  # the steps that compute P


@dataclass(frozen=True)
class NaiveBackward(Backward):
    """`P = softmax(scale Q K^T)` as the forward pass stores it, then the gradient of each of its operations in turn.

    `dV = P^T dO`, `dP = dO V^T`, `dS = P * (dP - rowsum(dP * P))`, `dS <- scale dS`, `dQ = dS K`, `dK = dS^T Q`. Differences
    from `TiledBackward` with one tile as large as the problem: P is `exp(S - m) / l`, stored, and used in all three; delta is
    always computed from P; dS is rounded by `ds`, then scaled and rounded by `ds` again, as torch does.

    Of `precision` the steps `scores` and `exponential` are not used: nothing is recomputed. P is computed under `forward`.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(
        (BACKWARD_STEPS - {"precision.scores", "precision.exponential"}) | {f"forward_precision.{name}" for name in _STORED}
    )
    unknown: ClassVar[str] = "it has no tiles"

    precision: BackwardPrecision
    forward: Precision

    @staticmethod
    def eager(fmt: Format) -> NaiveBackward:
        """Both passes as three tensor operations in `fmt`."""
        return NaiveBackward(BackwardPrecision.eager(fmt), Precision.eager(fmt))

    @property
    def primal(self) -> Naive:
        return Naive(self.forward)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        return CostModel(Algorithm.VANILLA, Width.of(self.format, self.format), holds_scores=True)

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Gradients:
        """Takes rounded inputs and returns tensors in the carrier. Shapes as in `Gradients`; S and P are held in memory whole."""
        return self._prepared((q, k, v, do), mask, scale)()

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass of its own forward pass, whose P it computes again: O and LSE are not enough."""
        return self(q, k, v, do, mask, scale)

    def passes(self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, mask: Mask, scale: float | None = None) -> Passes:
        """Autograd keeps P of the forward pass, whereas `Naive` returns O alone: P is computed before the passes are timed."""
        backward = self._prepared((q, k, v, do), mask, scale)
        return bare_call(self.primal, (q, k, v), mask, scale), lambda _: backward()

    def _prepared(self, inputs: tuple[Tensor, ...], mask: Mask, scale: float | None) -> Callable[[], Gradients]:
        """The backward pass as a call; P is computed and stored before, 0 where a row does not see a key."""
        q, k, v, do = inputs
        check_backward_shapes(q, k, v, do, mask, adds=True)
        (queries, keys), kv_heads, factor = (q.shape[-2], k.shape[-2]), k.shape[1], softmax_scale(q, scale)
        k, v = (mask.without_padding(x)[:, :, None] for x in (k, v))
        q, do = group_heads(q, kv_heads), group_heads(do, kv_heads)
        visible = mask.seen(queries, keys, (0, queries), (0, keys), q.device, kv_heads)
        steps = Steps.of(self.forward, queries)
        steps.at(0, 0, 0)
        bias, dropped = (of((0, queries), (0, keys), q.to(steps.carrier)) for of in (mask.added, mask.dropped))
        s = steps.scores(q.to(steps.carrier), k.to(steps.carrier).mT, factor, mask.softcap)
        tanh_slope = slope(s, mask.softcap)
        p, _ = _exponentials(steps, steps.raised(s, mask.softcap, bias), visible)
        p = steps.share(p, steps.row_sum(p))
        p = (p if visible is None else p.masked_fill_(~visible, 0.0)).to(self.precision.carrier)
        carried = tuple(x.to(self.precision.carrier) for x in (q, k, v, do))
        return lambda: self._gradients(carried, p, (visible, tanh_slope, dropped), factor, mask.keep_scale)

    def _gradients(
        self, inputs: tuple[Tensor, ...], p: Tensor, masks: tuple[Tensor | None, ...], factor: float, keep_scale: float
    ) -> Gradients:
        """The gradient of each operation in turn, from the stored P."""
        (q, k, v, do), (visible, tanh_slope, dropped) = inputs, masks
        steps = BackwardSteps.of(self.precision, max(q.shape[-2], k.shape[-2]))
        steps.at(TILES, 0, 0)
        dp = steps.dp(do, v, dropped, keep_scale)
        if visible is not None:
            dp.masked_fill_(~visible, 0.0)
        delta = steps.delta("weigh dp by stored", dp.clone(), p)
        ds = steps.ds_of_stored(dp, p, delta, tanh_slope, factor)
        if visible is not None:
            ds.masked_fill_(~visible, 0.0)
            delta.masked_fill_(~visible.any(-1, keepdim=True), 0.0)
        p = steps.probabilities(p, dropped, keep_scale)
        dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k[:, :, 0]), torch.zeros_like(v[:, :, 0])
        steps.add("dq", dq, ds, k, visible)
        for head in range(q.shape[2]):
            seen = None if visible is None else visible[:, :, head % visible.shape[2]].mT
            steps.add("dk", dk, ds[:, :, head].mT, q[:, :, head], seen)
            steps.add("dv", dv, p[:, :, head].mT, do[:, :, head], seen)
        steps.at(END, 0, 0)
        dq, dk, dv = (steps.output(gradient) for gradient in (dq, dk, dv))
        return Gradients(dq.flatten(1, 2), dk, dv, delta.squeeze(-1).flatten(1, 2))
