"""The tables of the kind `training`: what their columns say."""

from __future__ import annotations

from numdev.results.record import Column, Use
from numdev.training.watch import FIGURES
from numdev.training.weights import METRICS, MODEL

WEIGHTS, LOSS, RUN, WATCH = "weights", "loss", "run", "watch"

SEED = Column("seed", "", "the replicate: the seed of the initial weights and of the order of the data", Use.PLACE)

_CHIEF = ("max_difference", "wasserstein", "relative_frobenius")
TABLES: dict[str, tuple[Column, ...]] = {
    WEIGHTS: (
        SEED,
        Column("step", "", "after how many steps of training", Use.PLACE),
        Column("tensor", "", f"which weights: `{MODEL}`, all together, or the name of one parameter", Use.PLACE),
        *(Column(name, *said, Use.CHIEF if name in _CHIEF else Use.FIGURE) for name, said in METRICS.items()),
    ),
    LOSS: (
        SEED,
        Column("step", "", "which step of training, counted from 1; every one of the first, then evenly spaced ones", Use.PLACE),
        Column("loss", "", "of the batch of that step, in the rung's run"),
        Column("baseline_loss", "", "the same in the reference's run"),
        Column("gradient_norm", "", "of the gradient of that step before it is clipped, in the rung's run"),
        Column("baseline_gradient_norm", "", "the same in the reference's run"),
    ),
    RUN: (
        SEED,
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
    SEED,
    Column("step", "", "which step of training, counted from 1; every one", Use.PLACE),
    Column("loss", "", "of the batch of that step, in the rung's run"),
    Column("gradient_norm", "", "of the gradient of that step before it is clipped"),
    *(Column(name, *said) for name, said in FIGURES.items()),
)
"""The table `watch`, of rungs that are watched: what attention did in each step."""
