"""The steps of the backward pass under a policy: each elementary operation is rounded once, to the format of its step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from numdev.arithmetic.noise import Noise
from numdev.arithmetic.products import visible_product
from numdev.attention.backward.operations import BACKWARD_OPERATIONS
from numdev.attention.backward.precision import BackwardPrecision
from numdev.attention.commonsteps import NEVER, CommonSteps
from numdev.attention.operations import Row
from numdev.attention.softmax import Exponential

LOG2_E = math.log2(math.e)
# Rounding events of a run; the forward pass has those of its splits, which are fewer.
TILES, DELTA, END = 1 << 16, (1 << 16) + 1, (1 << 16) + 2


@dataclass(frozen=True)
class BackwardSteps(CommonSteps):
    """The steps of the backward pass; see `CommonSteps`."""

    table: ClassVar[Mapping[str, Row]] = BACKWARD_OPERATIONS

    precision: BackwardPrecision

    @staticmethod
    def of(precision: BackwardPrecision, total_rows: int) -> BackwardSteps:
        """The steps of a run over so many rows of each head, queries or keys."""
        return BackwardSteps(precision, precision.carrier, Noise(total_rows=total_rows) if precision.is_random else None)

    def lse(self, lse: Tensor, exponential: Exponential) -> Tensor:
        """LSE in the units of the scores: times log2(e) where the exponential is binary."""
        if not exponential.is_binary:
            return lse
        hidden = lse == NEVER
        return self._do("scale lse", lse.masked_fill(hidden, 0.0), LOG2_E).masked_fill_(hidden, NEVER)

    def probabilities(self, p: Tensor) -> Tensor:
        """P as it enters `P^T dO`, in memory of its own if it changes."""
        return self.precision.probabilities(p, self.noise)

    def dp(self, do: Tensor, v: Tensor) -> Tensor:
        """`dP = dO V^T`."""
        return self.precision.dp(do, v.mT, self.noise)

    def delta_of_output(self, do: Tensor, out: Tensor) -> Tensor:
        """`rowsum(dO * O)`, in memory of its own."""
        return self.precision.delta.sum(self._do("weigh output", do.clone(), out), self.noise)

    def delta_of_tile(self, dp: Tensor, p: Tensor) -> Tensor:
        """`rowsum(dP * P)` over the keys of a tile."""
        return self.precision.delta.sum(self._do("weigh dp", dp, p), self.noise)

    def delta_of_stored(self, dp: Tensor, p: Tensor) -> Tensor:
        """`rowsum(dP * P)` with the P that the forward pass stored, in memory of its own."""
        return self.precision.delta.sum(self._do("weigh dp by stored", dp.clone(), p), self.noise)

    def add_delta(self, delta: Tensor, more: Tensor) -> Tensor:
        """The running sum of delta over tiles."""
        return self._do("add delta", delta, more)

    def ds(self, dp: Tensor, p: Tensor, delta: Tensor) -> Tensor:
        """`dS = P * (dP - delta)` as it enters its products."""
        return self._enter(self._do("weigh difference", self._do("shift dp", dp, delta), p))

    def ds_of_stored(self, dp: Tensor, p: Tensor, delta: Tensor, factor: float) -> Tensor:
        """`scale dS` with the P that the forward pass stored: the gradient of softmax, then that of the scaling."""
        ds = self._enter(self._do("weigh difference by stored", self._do("shift dp", dp, delta), p))
        return ds if factor == 1.0 else self._do("scale ds", ds, factor)

    def _enter(self, ds: Tensor) -> Tensor:
        cast = self.precision.ds
        return ds if cast == self.precision.difference else cast.apply_(ds, self.noise)

    def dq(self, ds: Tensor, k: Tensor, visible: Tensor | None) -> Tensor:
        """`dS K`, in which keys that a row does not see have no part."""
        return visible_product(ds, k, visible, lambda a, b: self.precision.dq(a, b, self.noise))

    def dk(self, ds: Tensor, q: Tensor, visible: Tensor | None) -> Tensor:
        """`dS^T Q`, in which rows that do not see a key have no part."""
        return visible_product(ds.mT, q, _turned(visible), lambda a, b: self.precision.dk(a, b, self.noise))

    def dv(self, p: Tensor, do: Tensor, visible: Tensor | None) -> Tensor:
        """`P^T dO`, likewise."""
        return visible_product(p.mT, do, _turned(visible), lambda a, b: self.precision.dv(a, b, self.noise))

    def add_dq(self, dq: Tensor, more: Tensor) -> Tensor:
        """The running sum of dQ."""
        return self._do("add dq", dq, more)

    def add_dk(self, dk: Tensor, more: Tensor) -> Tensor:
        """The running sum of dK."""
        return self._do("add dk", dk, more)

    def add_dv(self, dv: Tensor, more: Tensor) -> Tensor:
        """The running sum of dV."""
        return self._do("add dv", dv, more)

    def scale_dq(self, dq: Tensor, factor: float) -> Tensor:
        """`scale dQ`."""
        return dq if factor == 1.0 else self._do("scale dq", dq, factor)

    def scale_dk(self, dk: Tensor, factor: float) -> Tensor:
        """`scale dK`."""
        return dk if factor == 1.0 else self._do("scale dk", dk, factor)

    def output(self, gradient: Tensor) -> Tensor:
        """What is returned, in the format of the output."""
        return self.precision.output.apply_(gradient, self.noise)


def _turned(visible: Tensor | None) -> Tensor | None:
    return None if visible is None else visible.mT
