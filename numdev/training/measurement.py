"""How far the weights of a rung deviate from those of its reference over training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any, ClassVar

import torch

from numdev.errors import BadInput
from numdev.measurement.operation import Operation
from numdev.measurement.protocol import Context, Findings, configuration
from numdev.results.record import Column
from numdev.training.columns import LOSS, RUN, TABLES, WATCH, WATCHED, WEIGHTS
from numdev.training.judge import SAMPLES
from numdev.training.operation import TRAINING
from numdev.training.run import Run
from numdev.training.rung import Rung
from numdev.training.runs import Finished, runs
from numdev.training.task import Task
from numdev.training.trained import Trained
from numdev.training.watch import FIGURES
from numdev.training.weights import Weights, deviations

KIND = "training"
_FIRST, _MOST = 50, 450  # rows of the table of losses: of each of the first steps, and of the others at most


@dataclass(frozen=True)
class WeightsOverTraining:
    """The kind `training`: the problem is a task, the variant a rung, the baseline the rung that it is compared with."""

    operation: Operation = TRAINING
    name: ClassVar[str] = KIND
    seeds: ClassVar[int] = 1

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        return dict(TABLES)

    def of(self, problem: Any, variant: Any, baseline: Any, seeds: int) -> TrainingPoint:
        return TrainingPoint(self.operation, problem, variant, baseline, seeds)


@dataclass(frozen=True)
class TrainingPoint:
    """A rung of a task beside its reference."""

    operation: Operation
    problem: Any  # a Task; what a study refuses has a key too
    variant: Any
    baseline: Any
    seeds: int
    kind: ClassVar[str] = KIND

    @property
    def config(self) -> dict[str, Any]:
        return configuration(problem=self.problem, variant=self.variant, baseline=self.baseline, seeds=self.seeds)

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        """Of the tables; `watch` is among them where the rung is watched."""
        watched = {WATCH: WATCHED} if isinstance(self.variant, Rung) and self.variant.watch else {}
        return WeightsOverTraining(self.operation).columns | watched

    def run(self, context: Context) -> Findings:
        """Trains each replicate of the rung and of its reference that has not been trained yet.

        A run whose loss stops being finite is reported in `nonfinite`, with the step; its tables end there.

        Raises:
            BadInput: for what is no task or no rung, and for a run that cannot be trained.
            Unsupported: for a model or an attention that cannot be trained as asked.
        """
        self._check()
        tables: dict[str, list[dict[str, Any]]] = {name: [] for name in self.columns}
        stopped: list[str] = []
        with runs(context) as shared:
            for seed in context.replicates():
                own = shared.finished(Run(self.problem, self.variant, seed), f"replicate {seed}")
                reference = shared.finished(Run(self.problem, self.baseline, seed), f"reference of replicate {seed}")
                for name, rows in _rows(own, reference, context.device).items():
                    tables[name] += ({"seed": seed} | row for row in rows)
                if reason := _stopped(own, reference):
                    stopped.append(f"replicate {seed}: {reason}")
        return Findings(tables, nonfinite="; ".join(stopped))

    def _check(self) -> None:
        if not isinstance(self.problem, Task):
            raise BadInput(
                "problem", type(self.problem).__name__, "it is no numdev.training.task.Task; give task=NAME, an option"
            )
        for name, made in (("variant", self.variant), ("baseline", self.baseline)):
            if not isinstance(made, Rung):
                mend = "it is no numdev.training.rung.Rung, and a run is compared with another run; leave it out"
                raise BadInput(name, made if isinstance(made, str) else type(made).__name__, mend)


def _rows(own: Finished, reference: Finished, device: torch.device) -> dict[str, list[dict[str, Any]]]:
    """The rows of each table for one replicate."""
    compared = _weights(own.trained, reference.trained, device)
    tables = {WEIGHTS: compared, LOSS: _losses(own, reference), RUN: [_run(own, reference)]}
    return tables | ({WATCH: _watched(own.trained)} if own.trained.watched else {})


def _weights(ours: Trained, theirs: Trained, device: torch.device) -> list[dict[str, Any]]:
    """Every metric of every tensor at the snapshots that both have."""
    start, other = ours.weights(0), theirs.weights(0)
    rows: list[dict[str, Any]] = []
    for step in sorted(set(ours.snapshots) & set(theirs.snapshots)):
        found = deviations(Weights(ours.weights(step), start), Weights(theirs.weights(step), other), device)
        rows += ({"step": step, "tensor": name} | one.metrics() for name, one in found.items())
    return rows


def _losses(own: Finished, reference: Finished) -> list[dict[str, Any]]:
    """Losses and norms of gradients by step; NaN of a reference that stopped before."""
    ours, theirs = own.trained, reference.trained
    lists = ours.losses, theirs.losses, ours.gradient_norms, theirs.gradient_norms
    names = "loss", "baseline_loss", "gradient_norm", "baseline_gradient_norm"
    steps = list(zip_longest(*lists, fillvalue=math.nan))[: len(ours.losses)]
    return [{"step": step} | dict(zip(names, steps[step - 1], strict=True)) for step in shown(len(steps))]


def _watched(found: Trained) -> list[dict[str, Any]]:
    """The figures of attention in every step, beside its loss."""
    steps = zip(found.losses, found.gradient_norms, found.watched, strict=True)
    return [
        {"step": step, "loss": loss, "gradient_norm": norm} | dict(zip(FIGURES, figures, strict=True))
        for step, (loss, norm, figures) in enumerate(steps, start=1)
    ]


def shown(steps: int) -> list[int]:
    """Which of the steps 1 to `steps` have a row: all of the first, then as many as there may be, evenly spaced, and the last."""
    rest = max(steps - _FIRST, 0)
    stride = max(math.ceil(rest / _MOST), 1)
    return [*range(1, min(steps, _FIRST) + 1), *sorted(range(steps, _FIRST, -stride))]


def _run(own: Finished, reference: Finished) -> dict[str, Any]:
    ours, theirs = own.trained, reference.trained
    return {
        "steps_done": ours.done,
        "untrained_loss": own.judged.untrained_loss,
        "held_out_loss": own.judged.held_out_loss,
        "baseline_held_out_loss": reference.judged.held_out_loss,
        "score": own.judged.score,
        "baseline_score": reference.judged.score,
        "seconds_per_step": ours.seconds_per_step,
        "baseline_seconds_per_step": theirs.seconds_per_step,
        "parameters": ours.parameters,
        "checksum": ours.checksum,
        "baseline_checksum": theirs.checksum,
        "same_bits": int(ours.checksum == theirs.checksum),
        "samples": f"{ours.folder.parent.name}/{ours.folder.name}/{SAMPLES}" if own.judged.pictures else "",
        "stopped": _stopped(own, reference),
        "calls": ours.calls,
        "missed": ours.missed,
        "notes": "; ".join(ours.notes),
    }


def _stopped(own: Finished, reference: Finished) -> str:
    """Which of the two ended before its last step, and why; empty where none did."""
    ends = {"the run": own.trained, "its reference": reference.trained}
    return "; ".join(
        f"{who} stopped after step {one.done} of {one.steps}, {one.stopped}" for who, one in ends.items() if one.stopped
    )
