"""Tiled attention in pure tensors, every step in a format of its own: the instrument's subject.

The recurrence of FlashAttention-1 (Dao et al. 2022, Algorithm 1) and -2 (Dao 2023, Algorithm 1) as DESIGN states it.
Rows are independent, so those of all heads and batch entries go through one KV tile together; only tiles are a loop.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from numdev.attention.base import Output, UnderPolicy, check_shapes, group_heads, softmax_scale
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.counters import Counters
from numdev.attention.fused.rule import FUSED, obstacle, tensor_scores
from numdev.attention.gpurule import BR, Asked
from numdev.attention.gpurule import obstacle as obstacle_to_kernel
from numdev.attention.honours import PRESET, RECURRENCE, STEPS, TILES, Honours, tiled_ineffective
from numdev.attention.kernelrun import KernelRun
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.problem import Shape
from numdev.attention.ran import Ran
from numdev.attention.reach import keeps_every
from numdev.attention.recurrence import Rows, Run, through
from numdev.attention.softmax import OnlineSoftmax, ScaleOn
from numdev.attention.steps import Steps
from numdev.attention.tiling import Tiling
from numdev.attention.together import Inputs, Limits, split, together
from numdev.attention.walk import Walk
from numdev.errors import NotHonoured, Unsupported
from numdev.settings import setting

# Scores of a block of rows held at once. On a CPU a block and its scratch stay in the cache of two cores; on a GPU a
# block is as many rows as memory should bear.
_WORKSPACE = {"cpu": 1 << 19, "cuda": 1 << 28}
_STACKED = 1 << 15  # scores of one replicate in a tile up to which several are computed in one call


@dataclass(frozen=True)
class Tiled(UnderPolicy):
    """Tiled attention under a precision policy.

    A row's state is not touched by a tile in which the row sees no key. So the result of a row depends on its own query, on k
    and v, on `bc`, the order and the splits; never on `br` or on other rows. (Under stochastic rounding it also depends on the
    row's place.)

    Attributes:
        precision: the format of each step.
        tiling: which tiles, in which order.
        softmax: the recurrence.
        count: whether to fill `Output.counters`; counting reads every P twice more. None counts too, but lets the instrumented
            kernel, which counts nothing, take a run on a GPU (`numdev.attention.gpurule`); with the others no kernel takes it.
    """

    honours: ClassVar[Honours] = Honours(PRESET | STEPS | TILES | RECURRENCE | {"attention.count"})

    precision: Precision
    tiling: Tiling = Tiling()
    softmax: OnlineSoftmax = OnlineSoftmax()
    count: bool | None = setting(
        None,
        "whether the run counts its events, which are the columns `counter.*`; null counts them, except in a long run on a GPU, "
        "which goes by the instrumented kernel and counts nothing; with true and false a GPU goes by tensor operations",
    )

    @property
    def idle(self) -> dict[str, str]:
        return super().idle | self.tiling.idle

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        """See `numdev.attention.honours.OnShape`."""
        return tiled_ineffective(self.precision, self.tiling, self.softmax, shape)

    def cost_model(self, ran: Ran) -> CostModel:
        return CostModel(Algorithm.TILED, Width.of(self.format, self.format), self.tiling.br)

    def walk(self, shape: Shape, mask: Mask) -> Walk:
        return Walk(self.precision, self.softmax, self.tiling)

    def unrounded(self) -> Tiled:
        """The same, its output left in the format of the accumulator."""
        return replace(self, precision=self.precision.with_step(output=self.precision.accumulator))

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, the carrier out. Shapes as in `Output`."""
        return self._stack(scale, (q, k, v), mask, 1)[0]

    def together(self, replicates: Sequence[Inputs], mask: Mask, scale: float | None = None) -> list[Output]:
        """See `numdev.measurement.operation.Together`. Compiled passes, which gain nothing, take one replicate at a time."""
        limits = Limits(_STACKED, tensor_scores(), self.tiling.bc)
        return together(self, replicates, mask, limits, partial(self._stack, scale))

    def _stack(self, scale: float | None, inputs: Inputs, mask: Mask, replicates: int) -> list[Output]:
        """The output of each of so many replicates, whose batch entries follow one another."""
        q, k, v = inputs
        check_shapes(q, k, v, mask)
        if (found := self._by_kernel(q, k, v, mask, scale)) is not None:
            assert found.lse is not None, "the kernel has one"
            return [Output(*part, ran=found.ran) for part in split(found.out, found.lse, replicates)]
        return self._by_rows(scale, inputs, mask, replicates)

    def _by_kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Output | None:
        """The run by the instrumented kernel, where it takes it."""
        kernel = KernelRun(self.precision, replace(self.tiling, br=BR), self.softmax)
        if obstacle_to_kernel(Asked(kernel, q, k, v, mask, scale, q.device, self.count)) is not None:
            return None
        try:
            return kernel(q, k, v, mask, scale)
        except Unsupported:  # a tile that does not fit into this GPU, which only compiling shows
            return None

    def _by_rows(self, scale: float | None, inputs: Inputs, mask: Mask, replicates: int) -> list[Output]:
        """By the recurrence itself: tensor operations, or compiled passes."""
        q, k, v = inputs
        factor = softmax_scale(q, scale) * self.softmax.log_scale
        carrier = self.precision.carrier
        k, v = mask.without_padding(k.to(carrier))[:, :, None], mask.without_padding(v.to(carrier))[:, :, None]
        q = group_heads(q.to(carrier), k.shape[1])
        if self.softmax.scale_on is ScaleOn.QUERIES:
            q, factor = self.precision.scale_queries(q, factor), 1.0
        counters = self._counters(q, k, factor, replicates) if self.count is not False else None
        run = Run(Steps.of(self.precision, q.shape[-2]), self.softmax, q, k, v, mask, factor, counters)
        ran = Ran(FUSED) if obstacle(run, self.tiling) is None else Ran()
        out, lse = self._fused(run) if ran.name else self._tensors(run)
        if counters is not None:
            counters.ended(lse, mask.seeing_rows(q.shape[0], q.shape[-2], k.shape[-2])[:, None, None].to(q.device))
        counted = counters.summaries() if counters is not None else [{} for _ in range(replicates)]
        parts = split(out.flatten(1, 2), lse.squeeze(-1).flatten(1, 2), replicates)
        return [Output(*part, events, ran) for part, events in zip(parts, counted, strict=True)]

    def _counters(self, q: Tensor, k: Tensor, factor: float, replicates: int) -> Counters:
        keeps = keeps_every(self.precision, self.softmax, q, k, factor)
        return Counters(q[..., :1], self.softmax, self.precision, replicates, keeps_every=keeps)

    def _fused(self, run: Run) -> tuple[Tensor, Tensor]:
        """The same bits by compiled passes."""
        from numdev.attention.fused.walk import attend  # here, since numba takes as long to import as all of numdev

        return attend(run, self.tiling)

    def _tensors(self, run: Run) -> tuple[Tensor, Tensor]:
        """Block by block of the rows, by tensor operations."""
        q, v = run.q, run.v
        out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], 1)
        block = max(16, _WORKSPACE[q.device.type] // (q[..., 0, 0].numel() * min(self.tiling.bc, run.k.shape[-2])))
        for first in range(0, q.shape[-2], block):
            rows = slice(first, min(first + block, q.shape[-2]))
            out[..., rows, :], lse[..., rows, :] = self._rows(run, rows.start, rows.stop)
        return out, lse

    def _rows(self, run: Run, first: int, last: int) -> tuple[Tensor, Tensor]:
        """A block of rows through every tile; how many rows a block has changes no bit."""
        splits = self.tiling.key_tiles(run.k.shape[-2])
        return through(run, splits, first, lambda split: Rows(run, first, last, split))
