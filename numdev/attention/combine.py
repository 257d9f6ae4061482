"""The last step of split-KV: one result from those of the splits."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.precision import Precision


def combine(parts: list[tuple[Tensor, Tensor]], step: Precision) -> tuple[Tensor, Tensor]:
    """`O = sum_s w_s O_s` with `w_s = exp(LSE_s - LSE)` (Flash-Decoding): weights in `rescale`, sums in `accumulator`.

    Each part is the normalised `O_s` and its natural LSE `[..., 1]`, -inf where a row saw no key of the split.
    """
    stacked = torch.stack([lse for _, lse in parts])
    largest = stacked.amax(0)
    largest = largest.masked_fill(largest == float("-inf"), 0.0)
    total = torch.zeros_like(largest)
    for _, lse in parts:
        weight = step.rescale.apply_(step.rescale.apply_(lse - largest).exp_())
        total = step.row_sum.accumulate.apply_(total + weight)
    cast = step.row_sum.accumulate
    lse_all = cast.apply_(largest + cast.apply_(total.log()))
    reference = lse_all.masked_fill(lse_all == float("-inf"), 0.0)
    combined = torch.zeros_like(parts[0][0])
    for out, lse in parts:
        weight = step.rescale.apply_(step.rescale.apply_(lse - reference).exp_())
        combined = step.accumulator.apply_(combined + step.accumulator.apply_(out * weight))
    return combined, lse_all
