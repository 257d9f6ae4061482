"""Which backward runs the compiled passes take; `rule` has the reasons."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec

import torch

from numdev.attention.accepts import ALL, MASK, RECOMPUTE, Accepts, backward_policy, of
from numdev.attention.fused.rule import CAST, is_short
from numdev.attention.path import Path, chosen, differentiates, multiplies_unseen
from numdev.attention.recurrence import BackwardRun
from numdev.attention.steps import BackwardSteps

_STEPS = Accepts(BackwardSteps, "steps", precision=backward_policy(CAST), carrier=ALL)
_RUN = Accepts(BackwardRun, "run", steps=_STEPS, recompute=RECOMPUTE, mask=MASK, **of("q k v do lse factor meetings", ALL))


def backward_obstacle(run: BackwardRun) -> str | None:
    """The first reason why a run goes by tensor operations; None where compiled passes take it."""
    reason = next((reason for applies, reason in _OBSTACLES if applies(run)), None)
    refusal = reason or _RUN.refusal(run)
    return None if refusal is None else str(refusal)


def _multiplies_unseen(run: BackwardRun) -> bool:
    return any(multiplies_unseen(x, run.mask) for x in (run.q, run.k, run.do))


_OBSTACLES: tuple[tuple[Callable[[BackwardRun], bool], str], ...] = (
    (lambda run: chosen() is Path.TENSORS, "tensor operations were asked for"),
    (lambda run: not run.q.is_cpu, "it is not on a CPU"),
    (lambda run: is_short(run.q, run.k), "it is too short to pay for loading compiled code"),
    (lambda run: find_spec("numba") is None, "numba is not installed"),
    (lambda run: run.q.dtype is not torch.float32, "a step needs FP64"),
    (lambda run: differentiates(run.q, run.k, run.v, run.do), "torch is to differentiate it"),
    (_multiplies_unseen, "a row or key that is not seen may hold a value that is not finite"),
)
