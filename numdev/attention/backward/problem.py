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


_STREAM = 0x9E3779B9  # of the 32 bits that torch's generator reads of a seed: not the draws of q, k and v of any small seed


def draw_do(problem: Any, seed: int, device: torch.device) -> dict[str, Tensor]:
    """`do` `[batch, heads, queries, head_dim]` in FP64, drawn on the CPU, so the same on every device.

    That of the problem's source where it has one, as of captured tensors; else independent N(mean, 1). The mean is 0 unless the
    problem has another.

    Raises:
        BadInput: for a mean where the source has dO, and for dO that the source cannot serve.
    """
    mean = problem.do_mean if isinstance(problem, BackwardProblem) else 0.0
    do = problem.source.gradient(problem.shape, seed)
    if do is None:
        generator = torch.Generator().manual_seed(seed ^ _STREAM)
        do = torch.randn(problem.shape.q, dtype=torch.float64, generator=generator) + mean
    elif mean != 0:
        raise BadInput("problem.do_mean", mean, "dO comes from the captured file; give 0, or a file without dO")
    return {"do": do.to(device)}
