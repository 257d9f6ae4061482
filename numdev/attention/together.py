"""Several replicates in one call: a short run takes its time for calling operations, not for their arithmetic.

On a CPU no bit of a batch entry depends on the others (`numdev.arithmetic.products`), so replicates are stacked as more entries
of the batch. Not stacked are runs whose bits or kernel might depend on it: on a GPU, where a library orders the sums; with NaN or
Inf in v, from which unseen keys are taken out for all entries alike; with stochastic rounding, whose draws depend on the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from numdev.attention.base import Attention, Output
from numdev.attention.mask import Mask

Inputs = tuple[Tensor, ...]
Stack = Callable[[Inputs, Mask, int], Sequence[Output]]


def together(replicates: Sequence[Inputs], mask: Mask, most_scores: int, stack: Stack) -> list[Output]:
    """The outputs of each replicate; `stack` computes some of them, given their q, k and v stacked, their mask and their number.

    A stack has at most `most_scores` scores in all, or one replicate.
    """
    found: list[Output] = []
    for part in _stacks(replicates, most_scores):
        inputs = tuple(torch.cat(tensors) for tensors in zip(*part, strict=True)) if len(part) > 1 else part[0]
        found += stack(inputs, mask.repeated(len(part)), len(part))
    return found


def plain_stack(attend: Attention, scale: float | None) -> Stack:
    """How an implementation that counts nothing computes a stack: as any batch."""

    def stack(inputs: Inputs, mask: Mask, replicates: int) -> list[Output]:
        found = attend(*inputs, mask, scale)
        assert found.lse is not None, "golden and baseline have one"
        return [Output(out, lse) for out, lse in split(found.out, found.lse, replicates)]

    return stack


def split(out: Tensor, lse: Tensor, replicates: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Output and LSE of each replicate, in memory of its own, so that what reads them finds them aligned alike."""
    if replicates == 1:
        yield out, lse
    else:
        for part in zip(out.chunk(replicates), lse.chunk(replicates), strict=True):
            yield part[0].clone(), part[1].clone()


def _stacks(replicates: Sequence[Inputs], most_scores: int) -> Iterator[Sequence[Inputs]]:
    q, k, _ = replicates[0]
    size = most_scores // (q[..., 0].numel() * k.shape[-2])
    alike = all(x.is_cpu and x.shape == y.shape for inputs in replicates for x, y in zip(inputs, replicates[0], strict=True))
    if size < 2 or not alike or not all(bool(v.isfinite().all()) for _, _, v in replicates):
        size = 1
    for first in range(0, len(replicates), size):
        yield replicates[first : first + size]
