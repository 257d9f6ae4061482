"""By which way a tiled run goes: what a caller may choose, and which runs the instrumented kernel takes on a GPU.

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
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from enum import Enum

import torch
from torch import Tensor

from numdev.attention.kernelrun import KernelRun
from numdev.attention.kernels.runtime import triton_version
from numdev.attention.mask import Mask


class Path(Enum):
    """By which way tiled attention goes: compiled passes on a CPU and the instrumented kernel on a GPU, or tensor operations."""

    FASTEST = "fastest"  # compiled code where it pays
    TENSORS = "tensors"  # tensor operations, which are the specification
    COMPILED = "compiled"  # compiled code also in a run so short that it does not pay


_path: ContextVar[Path] = ContextVar("path", default=Path.FASTEST)


@contextmanager
def by(path: Path) -> Iterator[None]:
    """Go by a path within this context, to compare both; what compiled code does not take goes by tensor operations in any."""
    token = _path.set(path)
    try:
        yield
    finally:
        _path.reset(token)


def chosen() -> Path:
    """The path of this context."""
    return _path.get()


def differentiates(*tensors: Tensor) -> bool:
    """Whether torch is to differentiate the result of these tensors, which it can through its own operations alone."""
    return torch.is_grad_enabled() and any(x.requires_grad for x in tensors)


def multiplies_unseen(v: Tensor, mask: Mask) -> bool:
    """Whether a key that a row does not see may hold a value that is not finite, and 0 times it is NaN."""
    return not mask.is_none and not bool(v.isfinite().all())


BR = 64
"""Rows of the kernel's tile, whatever `tiling.br` is: Br changes no bit of tiled attention, and so must not choose a launch."""
# Tensor operations take about a millisecond to launch for each tile of keys. With fewer tiles, ten replicates do not repay the
# seconds in which a kernel is compiled for a policy (`benchmarks/choice.py`), unless a tile has so many scores that they decide.
_FEWEST_TILES, _MOST_SCORES = 128, 1 << 31


def kernel_refusal(
    kernel: KernelRun, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None, count: bool | None
) -> str | None:
    """Why a run on the device of `q` goes without the instrumented kernel; None where the kernel takes it.

    `count` is as that of `Tiled`.
    """
    if not is_on_gpu(q):
        return "it is not on a GPU"
    if chosen() is Path.TENSORS:
        return "tensor operations were asked for"
    if count is not None:
        return "its events are to be counted, or it is an emulation, which goes by tensor operations without counters"
    if chosen() is Path.FASTEST and _is_short(kernel, q, k):
        return "it is too short to pay for compiling a kernel"
    if triton_version() == "none":
        return "Triton is not installed"
    if kernel.precision.is_random:
        return "a step rounds stochastically"
    if (refusal := kernel.refusal(q, v, mask, scale)) is not None:
        return refusal
    if differentiates(q, k, v):
        return "torch is to differentiate it"
    return "a key that is not seen may hold a value that is not finite" if multiplies_unseen(v, mask) else None


def is_on_gpu(x: Tensor) -> bool:
    """Whether kernels run where a tensor lies."""
    return x.is_cuda


def _is_short(kernel: KernelRun, q: Tensor, k: Tensor) -> bool:
    keys = k.shape[-2]
    return math.ceil(keys / kernel.tiling.bc) < _FEWEST_TILES and q[..., 0].numel() * keys < _MOST_SCORES
