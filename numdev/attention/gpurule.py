"""Which tiled runs the instrumented kernel takes on a GPU.

The kernel does the operations of `numdev.attention.recurrence` on the same tiles in the same order, and rounds the result of each
by the policy's step. Before a step rounds, two things differ: the order in which FP32 adds up, which tensor operations leave to a
library too, and the exponential. Where both are exact the bits are the same. Elsewhere a step that gets the same operands rounds
two FP32 numbers that are at most `2^-14` of the added magnitudes apart (256 terms; `u + 2u` for each, as tensor cores truncate),
or for an exponential `exp(x)` at most `4 + |x|` ulp.

Through all steps both runs are within the bound of one running error analysis, and so at most twice that bound apart;
`tests/attention/bounds.py` derives it. In a narrow format over many tiles it is larger than every |v|, and says nothing. The rule
does not ask for it: a figure below |v| would be no better ground than one above, and the bound of each step always holds.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from numdev.attention.kernelrun import KernelRun
from numdev.attention.kernels.runtime import triton_version
from numdev.attention.mask import Mask
from numdev.attention.path import Path, chosen, differentiates, multiplies_unseen

BR = 64
"""Rows of the kernel's tile, whatever `tiling.br` is: Br changes no bit of tiled attention, and so must not choose a launch."""
# Tensor operations take about a millisecond to launch for each tile of keys. With fewer tiles, ten replicates do not repay the
# seconds in which a kernel is compiled for a policy (`benchmarks/choice.py`), unless a tile has so many scores that they decide.
_FEWEST_TILES, _MOST_SCORES = 128, 1 << 31


@dataclass(frozen=True)
class Asked:
    """A tiled run on a device, before a way is chosen.

    Attributes:
        kernel: what would take it.
        q, k, v, mask, scale: what it is called with.
        device: where it runs.
        count: as that of `Tiled`.
    """

    kernel: KernelRun
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Mask
    scale: float | None
    device: torch.device
    count: bool | None


def obstacle(asked: Asked) -> str | None:
    """The first reason why a run goes without the kernel; None where the kernel takes it."""
    for find in _OBSTACLES:
        if (reason := find(asked)) is not None:
            return reason
    return None


def _when(applies: Callable[[Asked], bool], reason: str) -> Callable[[Asked], str | None]:
    return lambda asked: reason if applies(asked) else None


def _is_short(asked: Asked) -> bool:
    keys = asked.k.shape[-2]
    few = math.ceil(keys / asked.kernel.tiling.bc) < _FEWEST_TILES
    return chosen() is Path.FASTEST and few and asked.q[..., 0].numel() * keys < _MOST_SCORES


_OBSTACLES: tuple[Callable[[Asked], str | None], ...] = (
    _when(lambda asked: asked.device.type != "cuda", "it is not on a GPU"),
    _when(lambda asked: chosen() is Path.TENSORS, "tensor operations were asked for"),
    _when(lambda asked: asked.count is True, "its events are to be counted, and the kernel counts none"),
    _when(lambda asked: asked.count is False, "it is to be without counters by tensor operations, as every emulation is"),
    _when(_is_short, "it is too short to pay for compiling a kernel"),
    _when(lambda asked: triton_version() == "none", "Triton is not installed"),
    _when(lambda asked: asked.kernel.precision.is_random, "a step rounds stochastically"),
    lambda asked: asked.kernel.refusal(asked.q, asked.v, asked.mask, asked.scale),
    _when(lambda asked: differentiates(asked.q, asked.k, asked.v), "torch is to differentiate it"),
    _when(lambda asked: multiplies_unseen(asked.v, asked.mask), "a key that is not seen may hold a value that is not finite"),
)
