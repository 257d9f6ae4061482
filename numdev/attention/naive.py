"""Naive, untiled attention under a precision policy: the paper's baseline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from numdev.arithmetic.products import whole_blocks
from numdev.attention.base import Output, UnderPolicy, check_shapes, group_heads, softmax_scale
from numdev.attention.commonsteps import NEVER
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.honours import PRESET, STEPS, Honours
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.softmax import Normalise
from numdev.attention.steps import Steps
from numdev.attention.together import Inputs, Limits, plain_stack, together
from numdev.attention.walk import Walk
from numdev.settings import setting

_WORKSPACE = {"cpu": 1 << 21, "cuda": 1 << 28}  # scores held at once
_STACKED = Limits(each=1 << 15, most=1 << 19)


@dataclass(frozen=True)
class Naive(UnderPolicy):
    """`S = scale Q K^T; P = exp(S - rowmax S); O = (P / l) V`, each step in its format, over whole rows.

    Attributes:
        precision: the policy. `rescale` is not used: nothing is rescaled.
        normalise: EACH divides P by `l` before the product, as the paper's `softmax(Q K^T / sqrt(d)) V` does (section II.A):
            `exponential` rounds the quotient, then `probabilities`, and the accumulator's cast is not used;
            END divides O after it, which is exactly tiled attention with a single tile.
    """

    honours: ClassVar[Honours] = Honours((PRESET | STEPS | {"attention.normalise"}) - {"precision.rescale"})

    precision: Precision
    normalise: Normalise = setting(
        Normalise.EACH, "when untiled attention divides by l: `each`, P before the product with V, or `end`, O after it"
    )

    @property
    def idle(self) -> dict[str, str]:
        """Where P is divided, the accumulator is not."""
        divided = {} if self.normalise is Normalise.END else {"precision.accumulator": "attention.normalise=end"}
        return super().idle | divided

    def cost_model(self, ran: Ran) -> CostModel:
        """Vanilla attention's, though a block of rows at a time is in memory."""
        return CostModel(Algorithm.VANILLA, Width.of(self.format, self.format))

    def walk(self, shape: Shape, mask: Mask) -> Walk:
        return Walk(self.precision, why="it has no tiles")

    def unrounded(self) -> Naive:
        """The same, its output left in the format of the last operation before the cast."""
        each = self.normalise is Normalise.EACH
        last = self.precision.values.accumulate if each else self.precision.accumulator
        return replace(self, precision=self.precision.with_step(output=last))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, the carrier out. Rows are worked on in blocks, which changes no bit: they are independent."""
        check_shapes(q, k, v, mask)
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
            visible = mask.visible(queries, keys, rows, (0, keys), q.device)
            block = grouped[..., slice(*rows), :]
            steps.at(0, 0, start)
            out[..., slice(*rows), :], lse[..., slice(*rows)] = self._rows(steps, block, transposed, v, visible, factor)
        return Output(out.flatten(1, 2), lse.flatten(1, 2))

    def together(self, replicates: Sequence[Inputs], mask: Mask, scale: float | None = None) -> list[Output]:
        """See `numdev.measurement.operation.Together`."""
        return together(self, replicates, mask, _STACKED, plain_stack(self, scale))

    def _rows(
        self, steps: Steps, q: Tensor, transposed: Tensor, v: Tensor, visible: Tensor | None, factor: float
    ) -> tuple[Tensor, Tensor]:
        s = steps.scores(q, transposed, factor)
        if visible is not None:
            visible = visible[:, :, None]
            s.masked_fill_(~visible, NEVER)
        m = s.amax(-1, keepdim=True)
        p = steps.exponential(s, m, torch.exp_)
        row_sum = steps.row_sum(p)
        lse = steps.lse(m, row_sum).squeeze(-1)
        if self.normalise is Normalise.EACH:
            out = steps.values(steps.share(p, row_sum), v, visible)
        else:
            out = steps.values(steps.probabilities(p), v, visible)
            out = steps.normalise(steps.enter_accumulator(out), row_sum)
        return steps.output(out), lse
