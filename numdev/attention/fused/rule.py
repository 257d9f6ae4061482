"""Which runs the compiled passes take: those whose every setting they implement, if long enough to pay for loading them."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib.util import find_spec
from itertools import chain

import torch
from torch import Tensor

from numdev.arithmetic.formats import FP32
from numdev.attention.accepts import ALL, BINARY, MASK, REPEATABLE, SOFTMAX, TILING, Accepts, of, policy
from numdev.attention.path import Path, chosen, differentiates, multiplies_unseen
from numdev.attention.recurrence import Run
from numdev.attention.steps import Steps
from numdev.attention.tiling import Tiling

FUSED = "numdev fused"
_LONGEST_SUM = 512  # numbers of a row that torch adds in one pass: see `numdev.arithmetic.products`
_FEWEST_SCORES = 1 << 20  # below, loading compiled code takes longer than all that it saves

CAST = REPEATABLE.but(to=BINARY)
"""The casts of compiled code."""
_STEPS = Accepts(Steps, "steps", precision=policy(CAST), carrier=ALL)
_RUN = Accepts(Run, "run", steps=_STEPS, softmax=SOFTMAX, mask=MASK, **of("q k v factor counters", ALL))


def tensor_scores() -> int:
    """How many scores a run can have and certainly goes by tensor operations."""
    return 0 if chosen() is Path.COMPILED else _FEWEST_SCORES - 1


def obstacle(run: Run, tiling: Tiling) -> str | None:
    """The first reason why a run goes by tensor operations; None where compiled passes take it."""
    reason = next((reason for applies, reason in _OBSTACLES if applies(run, tiling)), None)
    refusal = reason or _RUN.refusal(run) or TILING.refusal(tiling)
    return None if refusal is None else str(refusal)


def is_short(q: Tensor, k: Tensor) -> bool:
    """Whether a run has too few scores; `q` and `k` as a run has them."""
    return chosen() is Path.FASTEST and q[..., 0].numel() * k.shape[-2] < _FEWEST_SCORES


def _gains_nothing(run: Run, tiling: Tiling) -> bool:
    """torch computes FP32 exponentials in either path, and little else is left to save."""
    wide = run.steps.precision.exponential.to == FP32
    return chosen() is Path.FASTEST and wide and run.counters is None


def _sums(run: Run, tiling: Tiling) -> set[int]:
    """How many numbers are added at once, in any tile."""
    every, found = run.steps.precision.row_sum.every, set()
    for first, last in chain.from_iterable(tiling.key_tiles(run.k.shape[-2])):
        columns, piece = last - first, min(every or last - first, last - first)
        found |= {piece, columns % piece or piece}
    return found


def _adds_otherwise(run: Run, tiling: Tiling) -> bool:
    return not all(_is_order_of_torch(length) for length in _sums(run, tiling))


@lru_cache(maxsize=1024)
def _is_order_of_torch(length: int) -> bool:
    """Whether compiled sums of so many numbers have the bits of torch's: torch promises no order, and has several.

    Of 64 sums of random numbers over 16 binades two orders agree in all with a chance below 2^-64, but for sums of two numbers.
    """
    from numdev.attention.fused.walk import sums_as_torch

    return sums_as_torch(length)


_OBSTACLES: tuple[tuple[Callable[[Run, Tiling], bool], str], ...] = (
    (lambda run, tiling: chosen() is Path.TENSORS, "tensor operations were asked for"),
    (lambda run, tiling: not run.q.is_cpu, "it is not on a CPU"),
    (lambda run, tiling: is_short(run.q, run.k), "it is too short to pay for loading compiled code"),
    (_gains_nothing, "nothing is counted and the exponential is in FP32, so that tensor operations are as fast"),
    (lambda run, tiling: find_spec("numba") is None, "numba is not installed"),
    (lambda run, tiling: run.q.dtype is not torch.float32, "a step needs FP64"),
    (lambda run, tiling: differentiates(run.q, run.k, run.v), "torch is to differentiate it"),
    (lambda run, tiling: multiplies_unseen(run.v, run.mask), "a key that is not seen may hold a value that is not finite"),
    (lambda run, tiling: max(_sums(run, tiling)) > _LONGEST_SUM, "more numbers of a row are added than torch adds in one pass"),
    (_adds_otherwise, "torch adds up a row in another order on this processor"),
)
