"""Which runs the compiled passes take: those whose every setting they implement, if long enough to pay for loading them."""

from __future__ import annotations

from importlib.util import find_spec

import torch
from torch import Tensor

from numdev.arithmetic.bits import Rounding
from numdev.arithmetic.formats import FP32
from numdev.arithmetic.rounding import Subnormals
from numdev.attention import accepts
from numdev.attention.accepts import ALL, Accepts, of
from numdev.attention.mask import Mask
from numdev.attention.path import Path, chosen, unsuited
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
    reason = _unsuited((run.q, run.k, run.v), (run.v,), run.mask)
    # torch computes FP32 exponentials in either path, and little else is left to save.
    if chosen() is Path.FASTEST and run.steps.precision.exponential.to == FP32 and run.counters is None:
        reason = reason or "nothing is counted and the exponential is in FP32, so that tensor operations are as fast"
    refusal = reason or _RUN.refusal(run) or accepts.TILING.refusal(tiling)
    return None if refusal is None else str(refusal)


def backward_unsupported_reason(run: BackwardRun) -> str | None:
    """The reason of a backward run."""
    refusal = _unsuited((run.q, run.k, run.v, run.do), (run.q, run.k, run.do), run.mask) or _BACKWARD.refusal(run)
    return None if refusal is None else str(refusal)


def _unsuited(tensors: tuple[Tensor, ...], multiplied: tuple[Tensor, ...], mask: Mask) -> str | None:
    """The tensors are as a run has them."""
    q, k, *_ = tensors
    if not q.is_cpu:
        return "it is not on a CPU"
    if q.dtype is not torch.float32:
        return "a step needs FP64"
    is_short = q[..., 0].numel() * k.shape[-2] < _FEWEST_SCORES
    reason = unsuited(tensors, multiplied, mask, is_short=is_short)
    return "numba is not installed" if reason is None and find_spec("numba") is None else reason
