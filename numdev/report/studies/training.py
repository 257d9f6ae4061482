"""Chapters on training: whether the deviation of attention reaches the weights, and what else moves them (Figures 7 and 8)."""

from __future__ import annotations

from functools import partial

import pandas as pd

from numdev.report.claims.claim import OURS, Claim
from numdev.report.claims.finding import MARGIN
from numdev.report.figures.plot import Plot
from numdev.report.reading.frames import LOSS, RUN
from numdev.report.reading.wording import Words
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.losses import draw_losses, draw_samples, run_table
from numdev.report.studies.parting import draw_ladder, draw_weights
from numdev.report.studies.published import GOLDEN
from numdev.report.studies.weights import (
    RANKS,
    ULP,
    findings,
    weigh_fig7,
    weigh_fig8,
    weigh_fig8_order,
    weigh_fig8_precision,
    weigh_fig8_ranks,
    weigh_fig8_rate,
    weigh_fig8_ulp,
    weigh_restart_exact,
    weigh_restart_lossy,
    weigh_training_sham,
)


def inputs(rows: pd.DataFrame) -> str:
    """What the seed of a replicate draws."""
    return "the initial weights and of the order of the data"


def describe(rows: pd.DataFrame) -> str:
    """How long the runs of some rows are."""
    return f"{int(rows['step'].max()):,} steps" if "step" in rows and len(rows) else ""


WORDS = Words(
    operation="training",
    title="How far fast attention moves a model's weights",
    methods="training.typ",
    headlines=("fig7_full.svg", "fig7.svg", "fig8_full_training_weights.svg", "fig8_training_weights.svg"),
    problem_class="problem.type",
    inputs=inputs,
    describe=describe,
    findings=findings,
    rules=(
        ("is it no more than another? (ratio)", f"lies below {MARGIN:g}", f"lies above {MARGIN:g}"),
        ("is it as much as another? (ratio)", f"lies above {1 / MARGIN:.3f}", f"lies below {1 / MARGIN:.3f}"),
        ("is it 2 to 5 times as much? (ratio)", "lies between 2 and 5", "lies outside them"),
        ("is it no faster? (difference of growth per step)", "lies below 0", "lies above 0"),
        ("is it the same run? (largest difference)", "is 0", "is not 0"),
    ),
)
claim = partial(Claim, words=WORDS)
"""A claim on training."""
chapter = partial(Chapter, operation="training", by_claim=True, table=run_table)
"""A chapter on training."""

_SOURCE = f"{GOLDEN}, section V"
_MEASURED = (
    "Each run and its reference start from the same weights and see the same batches in the same order, unless that is what "
    "the run changes. The difference is that of all weights together."
)
_CONTROLS = (
    claim(
        "training_sham",
        "training_ladder",
        "The reference, trained again, has the same weights to the bit",
        f"{OURS}: the control of every other difference",
        weigh_training_sham,
        is_ours=True,
    ),
)
_OF_FIGURE_8 = (
    claim(
        "fig8",
        "training_ladder",
        "Flash attention moves the weights no more than other initial weights do",
        f"{_SOURCE}, Figure 8",
        weigh_fig8,
    ),
    claim(
        "fig8_precision",
        "training_ladder",
        "Flash attention moves the weights 2 to 5 times less than low-precision training does",
        f"{GOLDEN}, abstract and section V, Figure 8",
        weigh_fig8_precision,
    ),
    claim(
        "fig8_rate",
        "training_ladder",
        "Per step, flash attention moves the weights no faster than other initial weights do, and slower than low precision does",
        f"{_SOURCE}, Figure 8",
        weigh_fig8_rate,
    ),
    claim("fig8_ulp", "training_ladder", ULP, f"{OURS}: the effect of chaos alone", weigh_fig8_ulp, is_ours=True),
    claim(
        "fig8_order",
        "training_ladder",
        "Flash attention moves the weights no more than another order of the data does",
        f"{OURS}: {GOLDEN}, Figure 8, with another bound",
        weigh_fig8_order,
        is_ours=True,
    ),
    claim(
        "fig8_ranks", "training_ladder", RANKS, f"{OURS}: the effect of another number of GPUs", weigh_fig8_ranks, is_ours=True
    ),
)

CHAPTERS = (
    chapter(
        place=300,
        study="fig7",
        title="Weights with flash and with baseline attention",
        question="Does the deviation of flash attention reach the weights, and does it grow over training? (Figure 7)",
        measured=_MEASURED,
        paper="Flash attention changes the weights throughout training, by Wasserstein distance and by max difference, and this "
        "difference only increases (section V).",
        claims=(
            claim(
                "fig7",
                "training_weights",
                "The weights with flash attention and with baseline attention differ more the longer they train, by both metrics",
                f"{_SOURCE}, Figure 7",
                weigh_fig7,
            ),
        ),
        figures={
            "training_weights": Plot(
                draw_weights,
                "The largest difference of one weight and the Wasserstein distance between a model trained with flash attention "
                "and the same model trained with baseline attention, over the training steps t, one line for each kernel, with "
                "its power of t. Lines are medians over replicates, bands their range.",
                title="The largest difference of a weight and the Wasserstein distance over training",
            ),
        },
    ),
    chapter(
        place=310,
        study="fig8",
        title="Weight differences of other changes",
        question="How much does flash attention change the weights, compared with other changes of training? (Figure 8)",
        measured=_MEASURED,
        paper="Flash attention moves the weights at a rate that is comparable with or below that of another initialisation, and "
        "2 to 5 times less than FP16 in place of FP32 does (section V; the figure's weight differences are called relative, "
        "and the paper does not say to what).",
        claims=(*_OF_FIGURE_8, *_CONTROLS),
        figures={
            "training_ladder": Plot(
                draw_ladder,
                "Above, the difference of the weights from those of the reference run over the training steps: on linear axes by "
                "the paper's metric, on log axes by two others. Each line is a run, coloured by what it changes: the median over "
                "replicates, with their range as a band. Below, the Wasserstein distance at the last step and its growth per "
                "step, with 95 % confidence intervals.",
            ),
            "training_loss": Plot(
                draw_losses,
                "A panel for each run: the training loss of every replicate over the steps as a thin line in the colour of what "
                "the run changes, and that of its reference in grey.",
                title="Training losses compared with the reference",
                table=LOSS,
            ),
            "training_samples": Plot(
                draw_samples,
                "Images that the trained models generate from the same held-out captions, one grid for each run.",
                title="Images generated from held-out captions",
                table=RUN,
                files=("samples",),
            ),
        },
    ),
    chapter(
        place=320,
        study="fig7_full",
        title="Weights with flash and with baseline attention: a model of full size on a GPU",
        question="Does the difference grow with the kernels of a GPU, and over a longer training?",
        measured=_MEASURED,
        paper="The difference grows over training (section V).",
    ),
    chapter(
        place=330,
        study="fig8_full",
        title="Weight differences of other changes: a model of full size on a GPU",
        question="How large is the difference compared with other changes, with the kernels of a GPU and over a longer training?",
        measured=_MEASURED,
        paper="Flash attention is bounded by another initialisation, and moves the weights 2 to 5 times less than low precision "
        "(section V).",
    ),
    chapter(
        place=335,
        study="fig8_language",
        title="Weight differences of other changes: a language model",
        question="Does a small causal language model show what a text-to-image model shows?",
        measured=_MEASURED,
        paper="The model of section V is text-to-image; the paper trains no other.",
    ),
    chapter(
        place=340,
        study="restart",
        title="Restarts",
        question="Does stopping and resuming a run change its weights?",
        measured="Each run is stopped after half of its steps and resumed; its reference is not stopped.",
        paper="Failures stop and restart training, and what that does to the weights is left to future work (section VI).",
        claims=(
            claim(
                "restart_exact",
                "training_ladder",
                "A run that is stopped and resumed from its checkpoint has the same weights to the bit",
                f"{OURS}: {GOLDEN}, section VI",
                weigh_restart_exact,
                is_ours=True,
            ),
            claim(
                "restart_lossy",
                "training_ladder",
                "A resume from a rounded checkpoint, or without the moments of the optimizer, moves the weights more than one "
                "unit in the last place of one weight does",
                f"{OURS}: {GOLDEN}, section VI",
                weigh_restart_lossy,
                is_ours=True,
            ),
        ),
    ),
)
