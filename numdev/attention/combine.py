"""The last step of split-KV: one result from those of the splits."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.attention.steps import Steps


def combine(parts: list[tuple[Tensor, Tensor]], steps: Steps, first: int = 0) -> tuple[Tensor, Tensor]:
    """`O = sum_s w_s O_s` with `w_s = exp(LSE_s - LSE)` (Flash-Decoding): weights in `rescale`, sums in `accumulator`.

    Each part is the normalised `O_s` and its natural LSE `[..., 1]`, -inf where a row has no sum in the split. `first` is the
    place of the first row.
    """
    steps.at(-1, -1, first)
    largest = torch.stack([lse for _, lse in parts]).amax(0)
    total = torch.zeros_like(largest)
    for _, lse in parts:
        total = steps.add_weight(total, steps.weight(lse, largest))
    whole = steps.lse_of_splits(largest, total)
    combined = torch.zeros_like(parts[0][0])
    for out, lse in parts:
        combined = steps.add_part(combined, out, steps.weight(lse, whole))
    return combined, whole
