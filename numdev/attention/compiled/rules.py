"""Which runs the compiled passes take: those whose every setting they implement, if long enough to pay for loading them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from itertools import chain

import torch
from torch import Tensor

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.formats import FP32
from numdev.arithmetic.rounding import Subnormals
from numdev.attention import accepts
from numdev.attention.accepts import ALL, Accepts, of
from numdev.attention.path import Path, chosen, differentiates, multiplies_unseen
from numdev.attention.recurrence import BackwardRun, Run
from numdev.attention.softmax import Normalise, OnlineSoftmax, ScaleOn
from numdev.attention.steps import BackwardSteps, Steps
from numdev.attention.tiling import Tiling

COMPILED = "numdev compiled"
_FEWEST_SCORES = 1 << 20  # below, loading compiled code takes longer than all that it saves

_CAST = accepts.REPEATABLE.but(to=accepts.BINARY, rounding=(Rounding.NEAREST_EVEN,), subnormals=(Subnormals.KEPT,))
"""The casts of compiled code."""
_SOFTMAX = Accepts(
    OnlineSoftmax,
    "softmax",
    normalise=(Normalise.EACH, Normalise.END),
    exp=accepts.EXPONENTIAL,
    scale_on=(ScaleOn.SCORES, ScaleOn.QUERIES),
)
_RUN = Accepts(
    Run,
    "run",
    steps=Accepts(Steps, "steps", precision=accepts.policy(_CAST), carrier=ALL),
    softmax=_SOFTMAX,
    mask=accepts.MASK,
    **of("q k v factor counters", ALL),
)
_BACKWARD = Accepts(
    BackwardRun,
    "run",
    steps=Accepts(BackwardSteps, "steps", precision=accepts.backward_policy(_CAST), carrier=ALL),
    recompute=accepts.RECOMPUTE,
    mask=accepts.MASK,
    **of("q k v do lse factor meetings", ALL),
)


def unsupported_reason(run: Run, tiling: Tiling) -> str | None:
    """The first reason why a run goes by tensor operations; None where compiled passes take it."""
    reason = next(chain(_reasons(run.q, run.k, run.v), _forward_reasons(run)), None)
    refusal = reason or _RUN.refusal(run) or accepts.TILING.refusal(tiling)
    return None if refusal is None else str(refusal)


def backward_unsupported_reason(run: BackwardRun) -> str | None:
    """The reason of a backward run."""
    reason = next(_reasons(run.q, run.k, run.v, run.do), None)
    if reason is None and any(multiplies_unseen(x, run.mask) for x in (run.q, run.k, run.do)):
        reason = "a row or key that is not seen may hold a value that is not finite"
    refusal = reason or _BACKWARD.refusal(run)
    return None if refusal is None else str(refusal)


def _reasons(q: Tensor, k: Tensor, *others: Tensor) -> Iterator[str]:
    """Reasons of both passes; the tensors are as a run has them."""
    if chosen() is Path.TENSORS:
        yield "tensor operations were asked for"
    if not q.is_cpu:
        yield "it is not on a CPU"
    if chosen() is Path.FASTEST and q[..., 0].numel() * k.shape[-2] < _FEWEST_SCORES:
        yield "it is too short to pay for loading compiled code"
    if find_spec("numba") is None:
        yield "numba is not installed"
    if q.dtype is not torch.float32:
        yield "a step needs FP64"
    if differentiates(q, k, *others):
        yield "torch is to differentiate it"


def _forward_reasons(run: Run) -> Iterator[str]:
    # torch computes FP32 exponentials in either path, and little else is left to save.
    if chosen() is Path.FASTEST and run.steps.precision.exponential.to == FP32 and run.counters is None:
        yield "nothing is counted and the exponential is in FP32, so that tensor operations are as fast"
    if multiplies_unseen(run.v, run.mask):
        yield "a key that is not seen may hold a value that is not finite"
