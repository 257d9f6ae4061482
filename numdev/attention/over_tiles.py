"""Attention over tiles under any policy: the settings of both passes, shared by the reference and the instrumented kernels."""

from __future__ import annotations

from dataclasses import dataclass, replace

from numdev.arithmetic.quantise import Quantised
from numdev.attention.accepted_settings import BACKWARD_STEPS, FORWARD_STEPS, PRESET, RECOMPUTED, RECURRENCE, STEPS, TILES
from numdev.attention.base import Attention, KernelArithmetic
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.differentiable import Backward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Shape
from numdev.attention.softmax import OnlineSoftmax, OutputForDelta, Recompute
from numdev.attention.tiling import KernelLaunch, Order, Tiling
from numdev.errors import BadInput, NotHonoured

READ = PRESET | STEPS | TILES | RECURRENCE
"""The settings that a forward pass over tiles reads."""
READ_BACKWARD = BACKWARD_STEPS | FORWARD_STEPS | RECURRENCE | RECOMPUTED | (TILES - {"tiling.splits"})
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
