"""How far the weights of two runs are apart, and the measurement of it over training: the kind `training`.

Points share runs: each is trained once, by one process, judged and kept.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from io import BytesIO
from itertools import zip_longest
from pathlib import Path
from typing import Any, ClassVar

import torch
from filelock import FileLock, Timeout
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from numdev.attention.operation import environment, settings_of, texts, texts_of
from numdev.errors import BadInput
from numdev.measurement.metrics import Sample, distance
from numdev.measurement.operation import Operation, Output
from numdev.measurement.runner import Context, Findings, Kind, Point
from numdev.results.record import Column, Use, write_atomically
from numdev.training.data import Text
from numdev.training.loop import Trained, train
from numdev.training.run import Run, deterministic, model_of
from numdev.training.rung import Rung
from numdev.training.scenes import Scenes
from numdev.training.tasks import Language, Task, TextToImage
from numdev.training.watch import FIGURES

MODEL = "model"  # the name of all weights together

METRICS: dict[str, tuple[str, str]] = {
    "max_difference": ("absolute", "max |W - W0|, the paper's max_difference (section V)"),
    "wasserstein": ("absolute", "Wasserstein-1 distance of the distributions of the values of W and W0 (section V)"),
    "relative_frobenius": ("relative", "||W - W0||_F / ||W0||_F"),
    "cosine": ("relative", "cosine of the angle between W and W0"),
    "change_cosine": ("relative", "cosine of the angle between the changes of W and W0 since initialisation"),
}
"""Unit and meaning of each metric of weights W against those of a reference, W0.

The first, the paper's, sees one weight. `wasserstein`, the paper's too, is blind to which weight has which value: two runs whose
weights are a permutation of each other have distance 0, and two initialisations by the same rule are near each other however
different they are. `relative_frobenius` sees every weight, the large ones most. `cosine` is blind to a common factor, and near 1
while both still resemble a common start. `change_cosine` sees whether both learnt in the same direction.
"""


def weight_deviation(*tensors: Float[Tensor, "*shape"]) -> dict[str, float]:
    """`METRICS` of weights, those of a reference and the initial values of both, on their device, in FP64; NaN if not finite.

    Raises BadInput for a tensor without elements.
    """
    w, w0, i, i0 = map(Sample, tensors)
    if w.values.numel() == 0:
        raise BadInput("weights", tuple(w.shape), "give a tensor that holds something")
    if not (w.is_finite and w0.is_finite):
        return dict.fromkeys(METRICS, math.nan)
    difference = Sample(w.values - w0.values)
    return {
        "max_difference": difference.largest,
        "wasserstein": distance(w, w0),
        "relative_frobenius": difference.norm.over(w0.norm),
        "cosine": _cosine(w.values, w0.values),
        "change_cosine": _cosine(w.values - i.values, w0.values - i0.values),
    }


def _cosine(x: Tensor, y: Tensor) -> float:
    """In [-1, 1]; exactly 1 for equal tensors, NaN where one of them is 0."""
    size = float(x.norm()) * float(y.norm())
    if size == 0:
        return math.nan
    return 1.0 if bool((x == y).all()) else max(-1.0, min(1.0, float(x.dot(y)) / size))


def deviations(parts: tuple[Mapping[str, Tensor], ...], device: torch.device) -> dict[str, dict[str, float]]:
    """The metrics of every tensor by its name, and under `model` those of all weights together.

    `parts` are the weights of a run, those of the reference, and both before the first step, by name. On a GPU ten million values
    are sorted in milliseconds; the metrics are the CPU's but for the order of FP64 sums.
    """
    held = [{name: part[name].detach().to(device) for name in sorted(part)} for part in parts]  # files have no order
    whole = [torch.cat([x.reshape(-1) for x in part.values()]) for part in held]
    return {MODEL: weight_deviation(*whole)} | {name: weight_deviation(*(part[name] for part in held)) for name in held[0]}


SAMPLES = "samples.png"
WEIGHTS, LOSS, RUN, WATCH = "weights", "loss", "run", "watch"
_BASELINE = "baseline_"


def _beside(name: str, unit: str, text: str, use: Use = Use.FIGURE) -> tuple[Column, Column]:
    """A column of the rung's run and that of its reference's."""
    return Column(name, unit, text, use), Column(_BASELINE + name, unit, f"{name} of the reference", use)


_SEED = Column("seed", "", "the replicate: the seed of the initial weights and of the order of the data", Use.PLACE)
_CHIEF = ("max_difference", "wasserstein", "relative_frobenius")
_SCORE = "share of held-out captions whose picture shows the right shapes and colours, or of tokens, in [0, 1]"
_LOSS, _NORM = "of the batch of that step, in the rung's run", "of the gradient of that step before it is clipped"
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
        *_beside("loss", "", _LOSS),
        *_beside("gradient_norm", "", _NORM),
    ),
    RUN: (
        _SEED,
        Column("steps_done", "count", "steps after which the rung's weights are known to be finite"),
        Column("untrained_loss", "", "of the initial weights on the held-out batch, in FP32 with plain attention"),
        *_beside("held_out_loss", "", "of the rung's last weights on the held-out batch, in FP32 with plain attention"),
        *_beside("score", "", _SCORE),
        *_beside("seconds_per_step", "s", "median time of a step of the rung's run"),
        Column("parameters", "count", "weights that are trained"),
        *_beside("checksum", "", "SHA-256 of the rung's last weights", Use.NOTE),
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
    Column("loss", "", _LOSS),
    Column("gradient_norm", "", _NORM),
    *(Column(name, unit, text) for name, (unit, text) in FIGURES.items()),
)
"""The table `watch`, of rungs that are watched: what attention did in each step."""

_REFUSED = ("kind", "stated")  # what a study cannot measure has in place of a rung


def settings() -> tuple[Column, ...]:
    """Every setting of a task and of a rung, by the column in which a configuration states it."""
    (_, forward), (_, backward) = texts(), texts(backward=True)
    problem = {
        "type": ("", "class of numdev that states the task"),
        "data.type": ("", "class of numdev that states what it is trained on"),
        "data.digest": ("", "SHA-256 of the files of which it is made"),
        **texts_of(Scenes, Text, prefix="data."),
        **texts_of(Language, TextToImage),
        "data.path": ("", "file of text, or folder of pictures"),
    }
    variant = {
        "type": ("", "class of numdev that states how a run differs"),
        **texts_of(Rung),
        **{f"attention.{name}": text for name, text in (forward | backward).items() if name not in _REFUSED},
        **{name: forward[name] for name in _REFUSED},
    }
    return settings_of(problem, variant)


TRAINING = Operation(
    name="training",
    golden=None,
    inputs=(),
    outputs=(Output("weights", "the weights after training"),),
    settings=settings,
    environment=environment,
    smaller="a smaller model (task.width, task.depth) or a smaller task.batch",
)
"""The training of a model, whose runs are compared with one another: there is no exact run."""

_FIRST, _MOST = 50, 450  # rows of the table of losses: of each of the first steps, and of the others at most


@dataclass(frozen=True)
class WeightsOverTraining(Kind):
    """The kind `training`: the problem is a task, the variant a rung, the baseline the rung that it is compared with."""

    operation: Operation = TRAINING
    name: ClassVar[str] = "training"
    seeds: ClassVar[int] = 1
    columns: ClassVar[dict[str, tuple[Column, ...]]] = TABLES

    @property
    def comparable(self) -> list[str]:
        """Those of the weights, and those of the runs that both runs have."""
        weights, runs = ([one.name for one in TABLES[name] if one.use in (Use.CHIEF, Use.FIGURE)] for name in (WEIGHTS, RUN))
        return [*weights, *(name for name in runs if f"baseline_{name}" in runs)]

    def columns_of(self, point: Point) -> dict[str, tuple[Column, ...]]:
        """`watch` is among them where the rung is watched."""
        return self.columns | ({WATCH: WATCHED} if isinstance(point.variant, Rung) and point.variant.watch else {})

    def run(self, point: Point, context: Context) -> Findings:
        """Trains each replicate of the rung and of its reference that has not been trained yet.

        A run whose loss stops being finite is reported in `nonfinite`, with the step; its tables end there. Raises BadInput for
        what is no task or no rung, and as `train` does.
        """
        if not isinstance(point.problem, Task):
            hint = "it is no numdev.training.tasks.Task; give task=NAME, an option"
            raise BadInput("problem", type(point.problem).__name__, hint)
        for name, made in (("variant", point.variant), ("baseline", point.baseline)):
            if not isinstance(made, Rung):
                hint = "it is no numdev.training.rung.Rung, and a run is compared with another run; leave it out"
                raise BadInput(name, made if isinstance(made, str) else type(made).__name__, hint)
        tables: dict[str, list[dict[str, Any]]] = {name: [] for name in self.columns_of(point)}
        stopped: list[str] = []
        with tempfile.TemporaryDirectory() as alone:  # removed afterwards where nothing is stored
            folder = Path(alone) if context.shared is None else Path(context.shared)
            for further in context.replicates():
                seed = point.variant.seed + further
                run, reference = (Run(point.problem, replace(rung, seed=seed)) for rung in (point.variant, point.baseline))
                ours = finished(run, f"replicate {seed}", folder, context)
                theirs = finished(reference, f"reference of replicate {seed}", folder, context)
                rows = {WEIGHTS: _weights(ours, theirs, context.device), RUN: [_run(ours, theirs)]}
                losses, norms = (ours.losses, theirs.losses), (ours.gradient_norms, theirs.gradient_norms)
                rows[LOSS] = _by_step(TABLES[LOSS], shown(len(ours.losses)), *losses, *norms)
                if WATCH in tables:
                    figures = ours.losses, ours.gradient_norms, *zip(*ours.watched, strict=True)
                    rows[WATCH] = _by_step(WATCHED, range(1, len(ours.losses) + 1), *figures)
                for name in tables:
                    tables[name] += ({"seed": seed} | row for row in rows[name])
                if reason := rows[RUN][0]["stopped"]:
                    stopped.append(f"replicate {seed}: {reason}")
        return Findings(tables, nonfinite="; ".join(stopped))


def _weights(ours: Trained, theirs: Trained, device: torch.device) -> list[dict[str, Any]]:
    """Every metric of every tensor at the snapshots that both have."""
    starts = ours.weights(0), theirs.weights(0)
    return [
        {"step": step, "tensor": name} | metrics
        for step in sorted(ours.snapshots.keys() & theirs.snapshots.keys())
        for name, metrics in deviations((ours.weights(step), theirs.weights(step), *starts), device).items()
    ]


def _by_step(columns: tuple[Column, ...], steps: Iterable[int], *lists: tuple[float, ...]) -> list[dict[str, Any]]:
    """The rows of a table for some steps, of a list for each of its figures; NaN of a reference that stopped before."""
    names, figures = [column.name for column in columns[2:]], list(zip_longest(*lists, fillvalue=math.nan))
    return [{"step": step} | dict(zip(names, figures[step - 1], strict=True)) for step in steps]


def shown(steps: int) -> list[int]:
    """Which of the steps 1 to `steps` have a row: all of the first, then as many as there may be, evenly spaced, and the last."""
    stride = max(math.ceil((steps - _FIRST) / _MOST), 1)
    return [*range(1, min(steps, _FIRST) + 1), *sorted(range(steps, _FIRST, -stride))]


def _run(ours: Trained, theirs: Trained) -> dict[str, Any]:
    values = vars(ours) | {_BASELINE + name: value for name, value in vars(theirs).items()}
    ends = [(who, one) for who, one in (("the run", ours), ("its reference", theirs)) if one.stopped]
    values |= {
        "steps_done": ours.done,
        "same_bits": int(ours.checksum == theirs.checksum),
        "samples": f"{ours.folder.parent.name}/{ours.folder.name}/{SAMPLES}" if ours.pictures else "",
        "stopped": "; ".join(f"{who} stopped after step {one.done} of {one.steps}, {one.stopped}" for who, one in ends),
        "notes": "; ".join(ours.notes),
    }
    return {column.name: values[column.name] for column in TABLES[RUN][1:]}


_PICTURES, _ACROSS, _ENLARGED = 32, 8, 3  # pictures, pictures in a row, pixels for one
_GAP = 2  # white pixels between two, before they are enlarged


def finished(run: Run, title: str, folder: Path, context: Context) -> Trained:
    """The run, trained to its end and judged unless it is there; another process that trains the same is waited for.

    `title` names it where its progress is shown. Raises as `train` does.
    """

    def report(step: int, steps: int, text: str) -> None:
        if context.within is not None:
            context.within(step, steps, f"{title}: {text}")

    own = folder / run.key(context.device)
    try:
        own.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise BadInput("results", str(folder), f"no run can be kept there ({error.strerror})") from None
    lock = FileLock(own / ".lock", mode=0o666)  # the operating system releases it when a process is killed
    try:
        held = lock.acquire(blocking=False)
    except Timeout:
        report(0, run.task.steps, "waits for another process, which trains it")
        held = lock.acquire()
    with held:
        trained = train(run, own, context.device, report)
        if trained.held_out_loss is None:
            judge(run, trained, context.device)
        return trained


def judge(run: Run, trained: Trained, device: torch.device) -> None:
    """Take losses and samples of the weights, in FP32 with plain attention, and write them: what differs lies in the weights."""
    with deterministic(), torch.no_grad():
        untrained, last = (model_of(run, device, trained.weights(at, buffers=True)) for at in (0, max(trained.snapshots)))
        batch = {name: x.to(device) for name, x in run.task.held_out().items()}
        trained.untrained_loss, trained.held_out_loss = (float(run.task.loss(model, batch)) for model in (untrained, last))
        samples = run.task.samples(last, run.rung.seed)
    trained.score = samples.score
    if samples.pictures is not None:
        write_atomically(trained.folder / SAMPLES, contact_sheet(samples.pictures))
        trained.pictures = True
    trained.write()


def contact_sheet(pictures: Float[Tensor, "count 3 height width"]) -> bytes:
    """The first pictures, whose values lie in [-1, 1], side by side in rows, as PNG."""
    from PIL import Image  # late: only what draws samples needs it

    across = min(count := len(pictures[:_PICTURES]), _ACROSS)
    shown = functional.pad(pictures[:count].clamp(-1, 1), (0, _GAP, 0, _GAP, 0, 0, 0, -count % across), value=1.0)
    rows = shown.unflatten(0, (-1, across))  # [rows, across, 3, height, width]
    sheet = ((rows.permute(0, 3, 1, 4, 2).flatten(2, 3).flatten(0, 1)[:-_GAP, :-_GAP] + 1) * 127.5).round()
    image, written = Image.fromarray(sheet.byte().numpy()), BytesIO()
    image.resize((_ENLARGED * image.width, _ENLARGED * image.height), Image.Resampling.NEAREST).save(written, "PNG")
    return written.getvalue()
