"""Several replicates in one call: a short run takes its time for calling operations, not for their arithmetic.

On a CPU no bit of a batch entry depends on the others (`numdev.arithmetic.products`), so replicates are stacked as more entries
of the batch. Not stacked are runs whose bits or kernel might depend on it: on a GPU, where a library orders the sums; with NaN or
Inf in v, from which unseen keys are taken out for all entries alike; with stochastic rounding, whose draws depend on the place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from numdev.attention.accepts import ALL, MASK, MICROSCALED, QUANTISED, REPEATABLE, SOFTMAX, TILING, Accepts, policy
from numdev.attention.base import Attention, Output
from numdev.attention.mask import Mask
from numdev.attention.softmax import Normalise

Inputs = tuple[Tensor, ...]
Stack = Callable[[Inputs, Mask, int], Sequence[Output]]


@dataclass(frozen=True)
class Limits:
    """Up to where stacking is faster, as `benchmarks/together.py` measures: beyond, caches cost more than calls.

    Attributes:
        each: scores that an operation on one replicate has at most.
        most: scores of a stack in all.
        keys: of one operation; None is all.
    """

    each: int
    most: int
    keys: int | None = None

    def size(self, q: Tensor, k: Tensor) -> int:
        """How many replicates with such q and k a stack has."""
        rows, keys = q[..., 0].numel(), k.shape[-2]
        return max(1, self.most // (rows * keys)) if rows * min(keys, self.keys or keys) <= self.each else 1


def together(attend: Attention, replicates: Sequence[Inputs], mask: Mask, limits: Limits, stack: Stack) -> list[Output]:
    """The outputs of each replicate by `attend`.

    `stack` computes some, given their q, k and v stacked, their mask and their number.
    """
    found: list[Output] = []
    if _ACCEPTS.refusal(attend) or MASK.refusal(mask):
        limits = replace(limits, each=0)
    for part in _stacks(replicates, limits):
        inputs = tuple(torch.cat(tensors) for tensors in zip(*part, strict=True)) if len(part) > 1 else part[0]
        found += stack(inputs, mask.repeated(len(part)), len(part))
    return found


# Of `Tiled`, `Naive` and `Exact`.
_ACCEPTS = Accepts(
    object,
    "attention",
    precision=policy(REPEATABLE, (MICROSCALED.but(element=REPEATABLE),)).but(inputs=(REPEATABLE, QUANTISED), output=REPEATABLE),
    tiling=TILING,
    softmax=SOFTMAX,
    normalise=(Normalise.EACH, Normalise.END),
    count=ALL,
)


def plain_stack(attend: Callable[..., Output], scale: float | None) -> Stack:
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


def _stacks(replicates: Sequence[Inputs], limits: Limits) -> Iterator[Sequence[Inputs]]:
    size = limits.size(*replicates[0][:2])
    alike = all(x.is_cpu and x.shape == y.shape for inputs in replicates for x, y in zip(inputs, replicates[0], strict=True))
    if size > 1 and not (alike and all(bool(v.isfinite().all()) for _, _, v in replicates)):
        size = 1
    for first in range(0, len(replicates), size):
        yield replicates[first : first + size]
