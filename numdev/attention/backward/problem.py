"""What the backward pass is measured on: a problem of attention, with a mean of v and of dO."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from numdev.attention.problem import Problem
from numdev.errors import BadInput


@dataclass(frozen=True)
class BackwardProblem(Problem):
    """A problem whose v and dO need not have mean 0.

    If all rounding errors of O have the sign of v, they add up in delta, the sum of dO * O, when dO has a nonzero mean too (Qiu &
    Yao 2025, arXiv 2510.04212). With independent dO of mean 0 they average out.

    Attributes:
        v_mean: added to every entry of v.
        do_mean: mean of the entries of dO, which are N(do_mean, 1).
    """

    v_mean: float = 0.0
    do_mean: float = 0.0

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """See `Problem.inputs`."""
        drawn = super().inputs(seed, device)
        return drawn if self.v_mean == 0 else drawn | {"v": drawn["v"] + self.v_mean}


_STREAM = 0x9E3779B9  # changes the seed, so that dO is independent of q, k and v of any small seed; torch reads 32 bits of it


def draw_do(problem: Any, seed: int, device: torch.device) -> dict[str, Tensor]:
    """`do` `[batch, heads, queries, head_dim]` in FP64, drawn on the CPU, so the same on every device.

    If the problem's source provides dO, as captured tensors may, it is taken from there; otherwise entries are independent
    N(mean, 1), where the mean is `do_mean` of a `BackwardProblem` and 0 for other problems.

    Raises:
        BadInput: for a mean if the source provides dO, and if the source cannot provide dO of this shape.
    """
    mean = problem.do_mean if isinstance(problem, BackwardProblem) else 0.0
    do = problem.source.gradient(problem.shape, seed)
    if do is None:
        generator = torch.Generator().manual_seed(seed ^ _STREAM)
        do = torch.randn(problem.shape.q, dtype=torch.float64, generator=generator) + mean
    elif mean != 0:
        raise BadInput("problem.do_mean", mean, "dO comes from the captured file; give 0, or a file without dO")
    return {"do": do.to(device)}
