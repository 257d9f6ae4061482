"""How far the weights of two runs are apart, and the measurement of it over training: the kind `training`.

Of weights W of a run, W0 of the reference and I, the initial ones of each:

- `max_difference = max |W - W0|`: the paper's. It sees one weight; it says nothing of the others.
- `wasserstein = W1(values of W, values of W0)`: the paper's. It compares the distributions of values and is blind to which weight
  has which value: two runs whose weights are a permutation of each other have distance 0, and two initialisations by the same
  rule are near each other however different they are.
- `relative_frobenius = ||W - W0||_F / ||W0||_F`: sees every weight, the large ones most.
- `cosine` of W and W0: blind to a common factor; near 1 while both still resemble a common start.
- `change_cosine` of `W - I` and `W0 - I0`: whether both learnt in the same direction; undefined (NaN) before the first step.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from itertools import zip_longest
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from numdev.errors import BadInput
from numdev.measurement.deviation.sample import wasserstein
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.results.record import Column, Use
from numdev.training.operation import TRAINING
from numdev.training.run import Run
from numdev.training.run_files import Trained
from numdev.training.rung import Rung
from numdev.training.runs import SAMPLES, Finished, runs
from numdev.training.task import Task
from numdev.training.watch import FIGURES

MODEL = "model"
"""The name of all weights together."""


def _metric(unit: str, text: str) -> Any:
    return field(metadata={"unit": unit, "text": text})


@dataclass(frozen=True)
class WeightDeviation:
    """Metrics of weights W against those of a reference, W0, from the initial I and I0. See the module for what each sees.

    All are NaN where a weight is not finite.
    """

    max_difference: float = _metric("absolute", "max |W - W0|, the paper's max_difference (section V)")
    wasserstein: float = _metric("absolute", "Wasserstein-1 distance of the distributions of the values of W and W0 (section V)")
    relative_frobenius: float = _metric("relative", "||W - W0||_F / ||W0||_F")
    cosine: float = _metric("relative", "cosine of the angle between W and W0")
    change_cosine: float = _metric("relative", "cosine of the angle between the changes of W and W0 since initialisation")

    @staticmethod
    def between(
        weights: Float[Tensor, "*shape"],
        reference: Float[Tensor, "*shape"],
        start: Float[Tensor, "*shape"],
        reference_start: Float[Tensor, "*shape"],
    ) -> WeightDeviation:
        """Compare two tensors on their device, in FP64.

        Raises:
            BadInput: for a tensor without elements.
        """
        if weights.numel() == 0:
            raise BadInput("weights", tuple(weights.shape), "give a tensor that holds something")
        w, w0, i, i0 = (x.detach().reshape(-1).double() for x in (weights, reference, start, reference_start))
        if not bool((w.isfinite() & w0.isfinite()).all()):
            return WeightDeviation(*[math.nan] * len(METRICS))
        difference = w - w0
        return WeightDeviation(
            max_difference=float(difference.abs().max()),
            wasserstein=wasserstein(weights.reshape(-1), reference.reshape(-1)),
            relative_frobenius=_ratio(float(difference.norm()), float(w0.norm())),
            cosine=_cosine(w, w0),
            change_cosine=_cosine(w - i, w0 - i0),
        )

    def metrics(self) -> dict[str, float]:
        """Every metric by name."""
        return {f.name: getattr(self, f.name) for f in fields(self)}


METRICS: dict[str, tuple[str, str]] = {f.name: (f.metadata["unit"], f.metadata["text"]) for f in fields(WeightDeviation)}
"""Unit and meaning of each metric."""


@dataclass(frozen=True)
class Weights:
    """The weights of a run after some step and before the first, by name."""

    now: Mapping[str, Tensor]
    start: Mapping[str, Tensor]


def deviations(run: Weights, reference: Weights, device: torch.device) -> dict[str, WeightDeviation]:
    """Every tensor's deviation by its name, and under `model` that of all weights together.

    On a GPU ten million values are sorted in milliseconds; the metrics are the CPU's but for the order of FP64 sums.

    Raises:
        BadInput: where names or shapes differ.
    """
    parts = [run.now, reference.now, run.start, reference.start]
    shapes = [{name: x.shape for name, x in part.items()} for part in parts]
    if any(each != shapes[0] for each in shapes) or not shapes[0]:
        raise BadInput("weights", "weights of different models", "compare runs of the same task")
    held = [{name: part[name].detach().to(device) for name in sorted(part)} for part in parts]  # files have no order
    whole = [torch.cat([part[name].reshape(-1) for name in held[0]]) for part in held]
    each = {name: WeightDeviation.between(*(part[name] for part in held)) for name in held[0]}
    return {MODEL: WeightDeviation.between(*whole)} | each


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else (0.0 if part == 0 else math.inf)


def _cosine(x: Tensor, y: Tensor) -> float:
    """In [-1, 1]; exactly 1 for equal tensors, NaN where one of them is 0."""
    size = float(x.norm()) * float(y.norm())
    if size == 0:
        return math.nan
    return 1.0 if bool((x == y).all()) else max(-1.0, min(1.0, float(x.dot(y)) / size))


WEIGHTS, LOSS, RUN, WATCH = "weights", "loss", "run", "watch"
_SEED = Column("seed", "", "the replicate: the seed of the initial weights and of the order of the data", Use.PLACE)

_CHIEF = ("max_difference", "wasserstein", "relative_frobenius")
TABLES: dict[str, tuple[Column, ...]] = {
    WEIGHTS: (
        _SEED,
        Column("step", "", "after how many steps of training", Use.PLACE),
        Column("tensor", "", f"which weights: `{MODEL}`, all together, or the name of one parameter", Use.PLACE),
        *(Column(name, unit, text, Use.CHIEF if name in _CHIEF else Use.FIGURE) for name, (unit, text) in METRICS.items()),
    ),
    LOSS: (
        _SEED,
        Column("step", "", "which step of training, counted from 1; every one of the first, then evenly spaced ones", Use.PLACE),
        Column("loss", "", "of the batch of that step, in the rung's run"),
        Column("baseline_loss", "", "the same in the reference's run"),
        Column("gradient_norm", "", "of the gradient of that step before it is clipped, in the rung's run"),
        Column("baseline_gradient_norm", "", "the same in the reference's run"),
    ),
    RUN: (
        _SEED,
        Column("steps_done", "count", "steps after which the rung's weights are known to be finite"),
        Column("untrained_loss", "", "of the initial weights on the held-out batch, in FP32 with plain attention"),
        Column("held_out_loss", "", "of the rung's last weights on the held-out batch, in FP32 with plain attention"),
        Column("baseline_held_out_loss", "", "the same of the reference's last weights"),
        Column(
            "score", "", "share of held-out captions whose picture shows the right shapes and colours, or of tokens, in [0, 1]"
        ),
        Column("baseline_score", "", "the same of the reference"),
        Column("seconds_per_step", "s", "median time of a step of the rung's run"),
        Column("baseline_seconds_per_step", "s", "the same of the reference's run"),
        Column("parameters", "count", "weights that are trained"),
        Column("checksum", "", "SHA-256 of the rung's last weights", Use.NOTE),
        Column("baseline_checksum", "", "SHA-256 of the reference's last weights", Use.NOTE),
        Column("same_bits", "", "1 where the two are equal, else 0"),
        Column(
            "samples", "", "file of pictures of the rung's last weights, in the folder of the results; empty without", Use.NOTE
        ),
        Column("stopped", "", "why a run ended before its last step; empty where none did", Use.NOTE),
        Column("calls", "count", "calls of attention in one step that the rung's attention computed"),
        Column("missed", "count", "calls of attention in one step that another attention computed"),
        Column("notes", "", "of the rung's run: damaged checkpoints, why no CUDA graph was captured; empty without", Use.NOTE),
    ),
}

WATCHED: tuple[Column, ...] = (
    _SEED,
    Column("step", "", "which step of training, counted from 1; every one", Use.PLACE),
    Column("loss", "", "of the batch of that step, in the rung's run"),
    Column("gradient_norm", "", "of the gradient of that step before it is clipped"),
    *(Column(name, unit, text) for name, (unit, text) in FIGURES.items()),
)
"""The table `watch`, of rungs that are watched: what attention did in each step."""

_FIRST, _MOST = 50, 450  # rows of the table of losses: of each of the first steps, and of the others at most


@dataclass(frozen=True)
class WeightsOverTraining(Kind):
    """The kind `training`: the problem is a task, the variant a rung, the baseline the rung that it is compared with."""

    operation: Operation = TRAINING
    name: ClassVar[str] = "training"
    seeds: ClassVar[int] = 1

    @property
    def columns(self) -> dict[str, tuple[Column, ...]]:
        return dict(TABLES)

    def columns_of(self, point: Point) -> dict[str, tuple[Column, ...]]:
        """`watch` is among them where the rung is watched."""
        watched = {WATCH: WATCHED} if isinstance(point.variant, Rung) and point.variant.watch else {}
        return self.columns | watched

    def run(self, point: Point, context: Context) -> Findings:
        """Trains each replicate of the rung and of its reference that has not been trained yet.

        A run whose loss stops being finite is reported in `nonfinite`, with the step; its tables end there.

        Raises:
            BadInput: for what is no task or no rung, and for a run that cannot be trained.
            Unsupported: for a model or an attention that cannot be trained as asked.
        """
        _check(point)
        tables: dict[str, list[dict[str, Any]]] = {name: [] for name in self.columns_of(point)}
        stopped: list[str] = []
        with runs(context) as shared:
            for seed in context.replicates():
                own = shared.finished(Run(point.problem, point.variant, seed), f"replicate {seed}")
                reference = shared.finished(Run(point.problem, point.baseline, seed), f"reference of replicate {seed}")
                for name, rows in _rows(own, reference, context.device).items():
                    tables[name] += ({"seed": seed} | row for row in rows)
                if reason := _stopped(own, reference):
                    stopped.append(f"replicate {seed}: {reason}")
        return Findings(tables, nonfinite="; ".join(stopped))


def _check(point: Point) -> None:
    if not isinstance(point.problem, Task):
        hint = "it is no numdev.training.task.Task; give task=NAME, an option"
        raise BadInput("problem", type(point.problem).__name__, hint)
    for name, made in (("variant", point.variant), ("baseline", point.baseline)):
        if not isinstance(made, Rung):
            hint = "it is no numdev.training.rung.Rung, and a run is compared with another run; leave it out"
            raise BadInput(name, made if isinstance(made, str) else type(made).__name__, hint)


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
        tensors = deviations(Weights(ours.weights(step), start), Weights(theirs.weights(step), other), device)
        rows += ({"step": step, "tensor": name} | deviation.metrics() for name, deviation in tensors.items())
    return rows


def _losses(own: Finished, reference: Finished) -> list[dict[str, Any]]:
    """Losses and norms of gradients by step; NaN of a reference that stopped before."""
    ours, theirs = own.trained, reference.trained
    lists = ours.losses, theirs.losses, ours.gradient_norms, theirs.gradient_norms
    names = "loss", "baseline_loss", "gradient_norm", "baseline_gradient_norm"
    steps = list(zip_longest(*lists, fillvalue=math.nan))[: len(ours.losses)]
    return [{"step": step} | dict(zip(names, steps[step - 1], strict=True)) for step in shown(len(steps))]


def _watched(trained: Trained) -> list[dict[str, Any]]:
    """The figures of attention in every step, beside its loss."""
    steps = zip(trained.losses, trained.gradient_norms, trained.watched, strict=True)
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
