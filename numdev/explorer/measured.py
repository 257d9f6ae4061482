"""What is drawn of a view, each part computed once: the record of all replicates, and one head of one replicate."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from torch import Tensor

from numdev.api import bench
from numdev.attention.baseline import baseline_for
from numdev.attention.exact import Exact
from numdev.attention.problem import Problem
from numdev.attention.tiled import Tiled
from numdev.errors import BadInput, Unsupported
from numdev.explorer.view import View
from numdev.results.record import Record, Status

_KEPT = 64  # points: a change of one policy measures nothing of the other again


@dataclass(frozen=True)
class Measured:
    """One view measured.

    Attributes:
        record: of all replicates.
        out: O of one head of one replicate, `[queries, head_dim]`.
        golden: exact attention on the unrounded inputs of the same.
    """

    record: Record
    out: Tensor
    golden: Tensor


def measured(view: View, seed: int) -> Measured:
    """A view measured, and O of its replicate `seed`.

    Raises:
        BadInput: for settings that cannot be used.
        Unsupported: where the measurement has no figures; it says why.
    """
    if not 0 <= seed < view.seeds:
        raise BadInput("seed", seed, f"give one of the {view.seeds} replicates that are measured, 0 to {view.seeds - 1}")
    record = _record(view.problem, view.variant, view.seeds, view.settings["device"])
    if record.status not in (Status.OK, Status.NONFINITE, Status.ZERO):
        raise Unsupported(record.status.value, record.reason)
    return Measured(record, _out(view.problem, view.variant, seed), _golden(view.problem, seed))


def key_of(view: View) -> str:
    """The key of the record of a view."""
    runner = bench(view.settings["device"])
    return runner.key(view.problem, view.variant, baseline_for(view.variant.format), view.seeds)


@lru_cache(_KEPT)
def _record(problem: Problem, variant: Tiled, seeds: int, device: str) -> Record:
    return bench(device).measure(problem, variant, baseline_for(variant.format), seeds)


@lru_cache(_KEPT)
def _out(problem: Problem, variant: Tiled, seed: int) -> Tensor:
    own = replace(variant, count=False).replicate(seed)  # the record has the counts, which take a third of a run
    q, k, v = own.round_inputs(*problem.inputs(seed).values())
    return own(q, k, v, problem.mask, problem.softmax_scale).out[0, 0].double()


@lru_cache(8)
def _golden(problem: Problem, seed: int) -> Tensor:
    q, k, v = problem.inputs(seed).values()
    return Exact()(q, k, v, problem.mask, problem.softmax_scale).out[0, 0]
