"""How much of the error of a real kernel's gradients its emulation predicts."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.claim import OURS
from numdev.report.claims.finding import Evidence, Undecidable
from numdev.report.figures.grid import whiskers
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import GREY
from numdev.report.reading.scenarios import formats
from numdev.report.statistics.estimates import significant
from numdev.report.studies.backward import GRADIENTS, SHADES, SYMBOLS, claim, measured, of_output
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.entries import beside, kernels, panels, readable, subjects, the
from numdev.report.studies.published import GOLDEN
from numdev.report.studies.validate import MOST, Agreement, agreement
from numdev.results.manifest import EntryRole

_SHOWN = 1e-3  # what is smaller is told in words: one element that differs would stretch the axis over many decades
_MARKERS = ("o", "s", "^", "D")  # of formats, the narrowest first


def weigh_validate_backward(rows: pd.DataFrame) -> Evidence:
    """Of every kernel most of the arithmetic error of dq, dk and dv is predicted element by element, and its size is."""
    names, control = subjects(rows), the(rows, EntryRole.CONTROL)
    exact = {output: agreement(of_output(rows, output), control) for output in GRADIENTS}
    found = {name: {output: agreement(of_output(rows, output), name) for output in GRADIENTS} for name in names}
    told = "; ".join(f"{readable(name)} {_told(own)}" for name, own in found.items())
    every = [one for own in found.values() for one in own.values()]
    worst = max(every, key=lambda one: one.distance.estimate).distance
    counted = "1 kernel" if len(found) == 1 else f"{len(found)} kernels"
    note = (
        "For each gradient the distance from the emulation over the emulation's own error, and the share of elements that are "
        f"equal: {told}. Exact gradients, rounded once, are at {_told(exact)}."
    )
    questions = [question for own in found.values() for output, one in own.items() for question in one.questions(exact[output])]
    return Evidence(f"{counted}, at most {significant(worst.estimate)} of the error not predicted", note, tuple(questions))


def _told(found: dict[str, Agreement]) -> str:
    parts = (
        f"{SYMBOLS[output]} {significant(one.distance.estimate)}, {100 * one.equal.estimate:.1f} %"
        for output, one in found.items()
    )
    return ", ".join(parts)


def draw_validate_backward(rows: pd.DataFrame) -> Figure:
    """RMSE between kernel and emulation over the emulation's own arithmetic error, a line for each gradient of each kernel."""
    names, found, outputs = kernels(rows), formats(rows), measured(rows)

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, name in enumerate(names):
            for line, output in enumerate(outputs):
                here = of_output(own, output)
                for i, fmt in enumerate(found):
                    at = place + 0.26 * (line - (len(outputs) - 1) / 2) + 0.08 * (i - (len(found) - 1) / 2)
                    _mark(axes, here[here["format"] == fmt], name, at, output, _MARKERS[i % len(_MARKERS)])
        axes.axvline(1, color=GREY, linewidth=0.6)
        axes.axvline(MOST, color=GREY, linestyle="--", linewidth=0.6)

    shown = ["control: exact" if role is EntryRole.CONTROL else readable(name) for name, role in names.items()]
    figure = panels(rows, shown, draw, "RMSE between kernel and emulation over that of the emulation from golden", 0.42)
    keys = [Line2D([], [], color=SHADES[output], linewidth=2) for output in outputs]
    keys += [Line2D([], [], color=GREY, marker=_MARKERS[i % len(_MARKERS)], linestyle="") for i in range(len(found))]
    words = [*(SYMBOLS[output] for output in outputs), *found]
    figure.legend(keys, words, loc="outside upper right", ncols=len(words), frameon=False)
    return figure


def _mark(axes: Axes, rows: pd.DataFrame, name: str, place: float, output: str, marker: str) -> None:
    try:
        distance = agreement(rows, name).distance
    except Undecidable:
        return
    if distance.estimate < _SHOWN:
        words = f"below {_SHOWN}" if distance.estimate > 0 else "bit-equal"
        axes.annotate(words, (0, place), (3, 0), xycoords=("axes fraction", "data"), **beside(SHADES[output]))
        return
    axes.errorbar(distance.estimate, place, xerr=whiskers([distance]), color=SHADES[output], marker=marker, markersize=3)


CHAPTERS = (
    Chapter(
        place=240,
        study="validate_backward",
        operation="attention_backward",
        title="Validation against the gradients of real kernels",
        question="How accurately does the emulation predict the gradients of real kernels?",
        measured="The emulation takes O and LSE from the kernel's own forward pass, and has the kernel's formats, tiles and "
        "orders where they are known, else those of the study; kernels that could not run are listed with the environment.",
        paper="The forward pass is validated against the original FlashAttention kernel (Golden et al. 2024, section III); "
        "gradients are not.",
        claims=(
            claim(
                "validate_backward",
                "validate_backward",
                "The tiled emulation of the backward pass agrees with real kernels in dQ, dK and dV",
                f"{OURS}: {GOLDEN}, section III, for the gradients",
                weigh_validate_backward,
                is_ours=True,
            ),
        ),
        figures={
            "validate_backward": Plot(
                draw_validate_backward,
                "Three lines per kernel, one for each of dQ, dK and dV, a panel per scenario, on a log axis: the RMSE between "
                "the kernel and its emulation in pure tensors, divided by the emulation's own RMSE from golden, a mark for each "
                "number format. Left of 1 the emulation predicts the errors of the kernel's gradients.",
                ("kernel",),
            ),
        },
    ),
)
