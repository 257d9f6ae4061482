"""What the backward pass is measured on: a problem of attention, with a mean of v and of dO."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.attention.problem import Problem


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """A problem whose v and dO need not have mean 0.

    Rounding errors of O that all have the sign of v add up in delta, the sum of dO * O, where dO has a sign too (Qiu & Yao 2025,
    arXiv 2510.04212). With independent dO of mean 0 they average out.

    Attributes:
        v_mean: is added to every entry of v.
        do_mean: of the entries of dO, which are N(do_mean, 1).
    """

    v_mean: float = 0.0
    do_mean: float = 0.0

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """See `Problem.inputs`."""
        drawn = super().inputs(seed, device)
        return drawn if self.v_mean == 0 else drawn | {"v": drawn["v"] + self.v_mean}
