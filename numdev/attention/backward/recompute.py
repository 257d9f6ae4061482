"""How a backward pass recomputes what the forward pass did not keep: P, and delta."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from numdev.attention.softmax import Exponential


class DeltaForm(Enum):
    """What delta is the row sum of. Without rounding both are equal, since `sum_j P_ij dP_ij = sum_j P_ij (dO_i V_j)`."""

    OUTPUT = "output"  # rowsum(dO * O): FlashAttention-2, Algorithm 2, line 4
    PROBABILITIES = "probabilities"  # rowsum(dP * P), which needs a pass of its own over the keys


class OutputForDelta(Enum):
    """Which O the backward pass reads to compute delta."""

    ROUNDED = "rounded"  # O as the forward pass returns it, after its output cast: FlashAttention
    UNROUNDED = "unrounded"  # O before that cast, of which a kernel would have to keep a copy


@dataclass(frozen=True)
class Recompute:
    """How the backward pass recomputes.

    Attributes:
        delta: see `DeltaForm`.
        output: see `OutputForDelta`; not read if delta is computed from P.
        exponential: that of `P = exp(S - LSE)`; if binary, `P = 2^(S log2(e) - LSE log2(e))`.
    """

    delta: DeltaForm = DeltaForm.OUTPUT
    output: OutputForDelta = OutputForDelta.ROUNDED
    exponential: Exponential = Exponential.EXP

    @property
    def reads_output(self) -> bool:
        """Whether the O of the forward pass is read at all."""
        return self.delta is DeltaForm.OUTPUT
