"""Tiled attention in pure tensors, both passes, every step in a format of its own: the instrument's subject.

Forward, the recurrence of FlashAttention-1 (Dao et al. 2022, Algorithm 1) and -2 (Dao 2023, Algorithm 1) as DESIGN states it.
Backward, FlashAttention-2's (Dao 2023, Algorithm 2), without the split of the work over processors: P is recomputed tile by tile
from S and the LSE that the forward pass saved. Rows are independent, so those of all heads and batch entries go through one KV
tile together; only tiles are a loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from numdev.arithmetic.quantise import Quantised, Scale
from numdev.attention.base import (
    Attention,
    Backward,
    Gradients,
    KernelArithmetic,
    Output,
    Saved,
    check_backward_shapes,
    check_shapes,
    group_heads,
    softmax_scale,
)
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.groups import BACKWARD_STEPS, FORWARD_STEPS, PRESET, RECOMPUTED, RECURRENCE, STEPS, TILES, AcceptedSettings
from numdev.attention.mask import Mask, grouped, ungrouped
from numdev.attention.precision import BackwardPrecision, Precision, Three
from numdev.attention.problem import Shape
from numdev.attention.recurrence import BackwardCounters, BackwardRun, Counters, Run
from numdev.attention.softmax import Maximum, Normalise, OnlineSoftmax, OutputForDelta, Recompute, ScaleOn
from numdev.attention.steps import END, NEVER, BackwardSteps, Steps
from numdev.attention.tile_schedule import Meeting, Sizes, Turns, in_order
from numdev.attention.tiling import KernelLaunch, Order, Tiling
from numdev.errors import BadInput, NotHonoured, Unsupported
from numdev.settings import setting

READ = PRESET | STEPS | TILES | RECURRENCE
"""The settings that a forward pass over tiles reads."""
READ_BACKWARD = BACKWARD_STEPS | FORWARD_STEPS | RECURRENCE | RECOMPUTED | (TILES - {"tiling.splits", "tiling.split_size"})
"""Those of both passes."""


@dataclass(frozen=True)
class OverTiles(Attention):
    """A forward pass over tiles: the format of each step, the tiles in their order, and the recurrence."""

    precision: Precision
    tiling: Tiling = Tiling()
    softmax: OnlineSoftmax = OnlineSoftmax()

    @property
    def idle(self) -> dict[str, str]:
        return self.precision.idle | self.tiling.idle

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        lengths = dict.fromkeys(("row_sum", "values"), self.tiling.bc)
        if self.precision.values.architecture is not None:
            del lengths["values"]  # see `Tiled.tiles_per_promotion`
        if shape is not None:
            inputs = self.precision.inputs
            smoothed = isinstance(inputs, Quantised) and inputs.smoothing.of_q
            lengths["scores"] = shape.head_dim * (2 if smoothed else 1)
        of_keys = [] if shape is None else self.tiling.ineffective(shape.keys)
        return self.precision.ineffective_sums(lengths) + of_keys + self.softmax.exp.ineffective(self.tiling.bc)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        return CostModel(Algorithm.TILED, Width.of(self.format, self.format), self.tiling.br)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[Precision]:
        return KernelArithmetic(self.precision, self.softmax, tiling=self.tiling)

    def unrounded(self) -> Attention:
        """Its copy that leaves the output in the format of the accumulator."""
        return replace(self, precision=self.precision.with_step(output=self.precision.accumulator))


@dataclass(frozen=True)
class GradientsOverTiles(Backward):
    """A forward pass, which saves O and LSE, then a backward pass over tiles of one split."""

    forward: Attention
    precision: BackwardPrecision
    tiling: Tiling = Tiling()
    recompute: Recompute = Recompute()

    def __post_init__(self) -> None:
        if self.tiling.splits != 1:
            raise BadInput("tiling.splits", self.tiling.splits, "gradients of ranges of keys cannot be combined; give 1")
        if self.tiling.split_size is not None:
            raise BadInput("tiling.split_size", self.tiling.split_size, "gradients have no splits of the keys; give null")

    @property
    def orders(self) -> tuple[Order, ...]:
        """Those of the tiles of keys and of queries."""
        return (self.tiling.order,)

    @property
    def idle(self) -> dict[str, str]:
        """Settings of tiles, of the forward pass's O and of its steps that have no effect, and that under which each would."""
        first, *others = (replace(self.tiling, order=order).idle for order in self.orders)
        tiles = {name: reader for name, reader in first.items() if all(name in other for other in others)}
        if not self.recompute.reads_output:
            of_output = (f"forward_precision.{name}" for name in ("values", "accumulator", "output"))  # they never enter the LSE
            return tiles | dict.fromkeys(("recompute.output", *of_output), "recompute.delta=output")
        rounded = self.recompute.output is OutputForDelta.ROUNDED
        return tiles | ({} if rounded else {"forward_precision.output": "recompute.output=rounded"})

    def ineffective(self, shape: Shape | None) -> list[NotHonoured]:
        lengths = {"dq": self.tiling.bc, "dk": self.tiling.br, "dv": self.tiling.br}
        if shape is not None:
            lengths |= {"scores": shape.head_dim, "dp": shape.head_dim}
        if not self.recompute.reads_output:
            lengths["delta"] = self.tiling.bc
        elif shape is not None:
            lengths["delta"] = shape.head_dim
        of_forward = [
            NotHonoured(error.field.replace("precision.", "forward_precision."), error.value, error.hint)
            for error in self.forward.ineffective(shape)
        ]
        polynomial = self.recompute.exponential.ineffective(self.tiling.bc, "recompute")
        return self.precision.ineffective_sums(lengths) + of_forward + polynomial

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[BackwardPrecision]:
        return KernelArithmetic(self.precision, recompute=self.recompute, tiling=self.tiling)


_KERNEL_ROWS = 64  # of the kernel's tile, whatever Br is: Br changes no bit of tiled attention, and so must not choose a launch
# Scores of a block of rows held at once. On a CPU a block and its scratch stay in the cache of two cores; on a GPU a
# block is as many rows as memory should bear.
_WORKSPACE = {"cpu": 1 << 19, "cuda": 1 << 28}


@dataclass(frozen=True)
class Tiled(OverTiles):
    """Tiled attention under a precision policy.

    A row's state is not touched by a tile in which the row sees no key. So the result of a row depends on its own query, on k
    and v, on `bc`, the order and the splits; never on `br` or on other rows. (Under stochastic rounding it also depends on the
    row's place.)

    Counting its events reads every P twice more.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(READ | {"attention.count"})

    def __post_init__(self) -> None:
        soft = self.softmax
        if self.tiles_per_promotion > 1 and (soft.normalise is Normalise.EACH or soft.maximum is Maximum.LOCAL):
            hint = f"this recurrence takes P V out of the tensor cores after every tile; give at most {self.tiling.bc} behind @"
            raise BadInput("precision.values", str(self.precision.values), hint)
        inputs, units = self.precision.inputs, self.precision.units
        if not isinstance(inputs, Quantised):
            return
        if "values" in units and inputs.shared_by(of_v=True) is Scale.BLOCK and inputs.block % self.tiling.bc:
            hint = f"on tensor cores a tile of V has one scale; give a multiple of tiling.bc={self.tiling.bc}"
            raise BadInput("precision.quantise.block", inputs.block, hint)
        if "scores" in units and soft.scale_on is ScaleOn.QUERIES:
            raise BadInput("softmax.scale_on", "queries", "codes of q are multiplied as they are; give scores")

    @property
    def tiles_per_promotion(self) -> int:
        """Tiles after which P V, whose sum stays in the tensor cores meanwhile, is added to O: whole tiles of `values.every`."""
        values = self.precision.values
        return 1 if values.architecture is None or values.every is None else max(values.every // self.tiling.bc, 1)

    count: bool | None = setting(
        None,
        "whether the run counts its events, which are the columns `counter.*`; null counts them, except in a long run on a GPU, "
        "which goes by the instrumented kernel and counts nothing; with true and false a GPU goes by tensor operations",
    )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        """Rounded inputs in, the carrier out. Shapes as in `Output`."""
        check_shapes(q, k, v, mask, adds=True)
        output = self._by_kernel(q, k, v, mask, scale)
        return self._by_rows(q, k, v, mask, scale) if output is None else output

    def _by_kernel(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Output | None:
        """The run by the instrumented kernel, where it takes it."""
        if not is_on_gpu(q) or self.count is not None:  # the kernel counts nothing, and an emulation of it is not the kernel
            return None
        from numdev.attention.instrumented import Instrumented, kernel_refusal

        kernel = Instrumented(self.precision, replace(self.tiling, br=_KERNEL_ROWS), self.softmax)
        if kernel_refusal(kernel, q, k, v, mask, scale) is not None:
            return None
        try:
            return kernel(q, k, v, mask, scale)
        except Unsupported:  # a tile that does not fit into this GPU, which only compiling shows
            return None

    def _by_rows(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None) -> Output:
        """By tensor operations, block by block of the rows; how many rows a block has changes no bit."""
        factor = softmax_scale(q, scale) * self.softmax.log_scale
        carrier = self.precision.carrier
        k, v = mask.without_padding(k.to(carrier)), mask.without_padding(v.to(carrier))
        (q, k, v), scales, v_scale = self._codes(q.to(carrier), k, v)
        k, v = k[:, :, None], v[:, :, None]
        q = group_heads(q, k.shape[1])
        if self.softmax.scale_on is ScaleOn.QUERIES:
            q, factor = self.precision.scale_queries(q, factor), 1.0
        counters = Counters(q[..., :1], self.softmax, self.precision, mask.keep_scale) if self.count is not False else None
        steps, joins = Steps.of(self.precision, q.shape[-2]), self.tiling.split_size is not None
        run = Run(steps, self.softmax, q, k, v, mask, factor, counters, self.tiles_per_promotion, joins, scales, v_scale)
        out, lse = q.new_empty(*q.shape[:-1], v.shape[-1]), q.new_empty(*q.shape[:-1], 1)
        block = max(16, _WORKSPACE[q.device.type] // (q[..., 0, 0].numel() * min(self.tiling.bc, k.shape[-2])))
        splits = self.tiling.key_tiles(k.shape[-2])
        for first in range(0, q.shape[-2], block):
            last = min(first + block, q.shape[-2])
            out[..., first:last, :], lse[..., first:last, :] = run.rows(splits, first, last)
        if counters is not None:
            sees = mask.seeing_heads(q.shape[0], q.shape[-2], k.shape[-2]).to(q.device)
            counters.ended(lse, grouped(sees, k.shape[1]))
        counted = {} if counters is None else counters.summary()
        return Output(out.flatten(1, 2), lse.squeeze(-1).flatten(1, 2), counters=counted)

    def _codes(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Three, tuple[Tensor, Tensor] | None, Tensor | None]:
        """q, k and v, those that tensor cores multiply as codes, whose scales come after the product: of q and k, and of v."""
        inputs, units, scales, v_scale = self.precision.inputs, self.precision.units, None, None
        if isinstance(inputs, Quantised) and "scores" in units:
            kv_heads, carrier = k.shape[1], q.dtype
            (q, rows), (k, columns) = inputs.codes(q, "q"), inputs.codes(k, "k")
            q, k, scales = q.to(carrier), k.to(carrier), (group_heads(rows, kv_heads), columns.mT[:, :, None])
        if isinstance(inputs, Quantised) and "values" in units and inputs.shared_by(of_v=True) is not None:
            codes, factor = inputs.codes(v, "v")
            v, v_scale = codes.to(v.dtype), factor[:, :, None].to(v.dtype)
        return (q, k, v), scales, v_scale


@dataclass(frozen=True)
class TiledBackward(GradientsOverTiles):
    """A forward pass, then the tiled backward pass under a precision policy.

    dQ of a row is summed over the KV tiles in the tiling's order. dK and dV of a KV tile are summed over the heads of the
    group and, within a head, over the query tiles in `query_order`. So `br`, `bc` and both orders change bits. A kernel that
    adds to dQ by atomics has no fixed order: `Order.RANDOM` with a seed draws one for dQ; `query_order` is that of dK and dV.

    `turns` is a walk in which each tile of keys has an order of query tiles of its own, in place of `query_order`.
    """

    accepted_settings: ClassVar[AcceptedSettings] = AcceptedSettings(READ_BACKWARD | {"backward.query_order", "backward.count"})
    learns: ClassVar[bool] = True

    query_order: Order | None = setting(
        None,
        "in which order a tile of keys meets the tiles of queries, which are added to dK and dV: forward, reverse, ...; null is "
        "tiling.order",
    )
    count: bool = setting(True, "whether the variant counts flushed P, flushed dS, ...; it changes no result")
    turns: Turns | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.turns is not None:
            self.turns.check(self.tiling)
            if self.query_order is not None:
                raise BadInput("backward.query_order", self.query_order.value, "the walk has an order of its own; give null")

    @property
    def orders(self) -> tuple[Order, ...]:
        return (self.tiling.order,) if self.query_order is None else (self.tiling.order, self.query_order)

    def cost_model(self, launch: KernelLaunch) -> CostModel:
        return CostModel(Algorithm.TILED, Width.of(self.format, self.format), self.tiling.br, bc=self.tiling.bc)

    def arithmetic(self, shape: Shape, mask: Mask) -> KernelArithmetic[BackwardPrecision]:
        return replace(super().arithmetic(shape, mask), query_order=self.query_order, turns=self.turns)

    def backward(
        self, q: Tensor, k: Tensor, v: Tensor, do: Tensor, saved: Saved, mask: Mask, scale: float | None = None
    ) -> Gradients:
        """The backward pass alone. Its carrier holds the saved O and LSE: an FP32 one rounds those in FP64 to nearest."""
        check_backward_shapes(q, k, v, do, mask, saved, adds=True)
        carrier, kv_heads = self.precision.carrier, k.shape[1]
        k, v = (mask.without_padding(x.to(carrier))[:, :, None] for x in (k, v))
        q, do, out = (group_heads(x.to(carrier), kv_heads) for x in (q, do, saved.out))
        lse = group_heads(saved.lse.to(carrier)[..., None], kv_heads)
        steps = BackwardSteps.of(self.precision, max(q.shape[-2], k.shape[-2]))
        steps.at(END, -1, 0)
        hidden, scaled = lse == NEVER, steps.lse(lse, self.recompute.exponential)
        run = BackwardRun(steps, self.recompute, q, k, v, do, scaled, mask, softmax_scale(q, scale), self._meetings(q, k, mask))
        delta = steps.delta("weigh output", do.clone(), out) if self.recompute.reads_output else run.delta()
        delta.masked_fill_(hidden, 0.0)
        counters = BackwardCounters(q.device) if self.count else None
        learned = None if mask.bias is None or mask.bias.source is None else mask.bias
        slopes = None if learned is None else q.new_zeros(*q.shape[:-1], k.shape[-2])
        dq, dk, dv = run.gradients(delta, counters, slopes)
        steps.at(END, 0, 0)
        dq, dk = steps.scale("scale dq", dq, run.factor), steps.scale("scale dk", dk, run.factor)
        dq, dk, dv = (steps.output(gradient) for gradient in (dq, dk, dv))
        counted = {} if counters is None else counters.summary()
        dbias = None if learned is None or slopes is None else ungrouped(slopes, learned)
        return Gradients(dq.flatten(1, 2), dk, dv, delta.squeeze(-1).flatten(1, 2), dbias, counters=counted)

    def _meetings(self, q: Tensor, k: Tensor, mask: Mask) -> list[Meeting]:
        """Of query tiles and KV tiles of grouped heads, in their order."""
        group, queries, keys = q.shape[2], q.shape[-2], k.shape[-2]
        sizes = Sizes(group, mask.query_range(queries, keys, 0, keys)[0], queries, keys)
        if self.turns is not None:
            return self.turns.meetings(self.tiling, sizes)
        order = self.tiling.order if self.query_order is None else self.query_order
        return in_order(self.tiling, order, sizes)


def is_on_gpu(x: Tensor) -> bool:
    """Whether kernels run where a tensor lies."""
    return x.is_cuda
