"""How much of a real kernel's error its emulation predicts."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from numdev.report.claims.comparisons import clustered, over_baseline, per_replicate
from numdev.report.claims.finding import Evidence, Question, Region, Undecidable, about, select
from numdev.report.figures.grid import highest, whiskers
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import GREY, colour
from numdev.report.reading.scenarios import formats
from numdev.report.statistics.estimates import Interval, mean, significant
from numdev.report.studies.attention import claim
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.entries import KERNEL, METRIC, beside, kernels, panels, readable, subjects, the
from numdev.report.studies.published import GOLDEN
from numdev.results.manifest import EntryRole

LARGEST = "max_u"  # an ulp of its own would tell of elements that cancel to zero in one order of summation
MOST = 0.5  # a distance from the emulation below this share of the emulation's own error: most of the error is predicted
SIZE = 1.1  # the size of the error is predicted if it is right within a factor of this


@dataclass(frozen=True)
class Agreement:
    """What the emulation predicts of one kernel.

    Attributes:
        distance: RMSE between kernel and emulation over the RMSE of the emulation from golden of the same inputs, the mean
            over points.
        size: RMSE of the kernel from golden over that of the emulation.
        equal: share of elements that are equal to the bit.
        largest: the largest distance of one element, in units of `u max |r|`.
        shares: `distance` by replicate, see `per_replicate`.
    """

    distance: Interval
    size: Interval
    equal: Interval
    largest: float
    shares: pd.DataFrame

    def questions(self, control: Agreement) -> tuple[Question, ...]:
        """Whether most of the error is predicted, more than by `control`, exact attention, and its size."""
        pairs = control.shares.join(self.shares["value"].rename("own"), how="inner")
        nearer = Question(_mean(pairs.assign(value=pairs["value"] - pairs["own"])), Region(low=0.0))
        return Question(self.distance, Region(high=MOST)), nearer, Question(self.size, about(1.0, SIZE))

    def text(self) -> str:
        parts = (significant(self.distance.estimate), f"{100 * self.equal.estimate:.1f} %", significant(self.largest))
        return f"{', '.join(parts)}, {self.size.text()}"


def agreement(rows: pd.DataFrame, name: str) -> Agreement:
    """The agreement of one kernel, over all of its points, paired by point and seed."""
    own = rows[rows[KERNEL] == name]
    columns = ["key", "seed", "cluster", METRIC, LARGEST, "equal_share"]
    apart = clustered(select(own))[columns]
    predicted = select(own, "baseline", "golden_same_inputs")[["key", "seed", METRIC]]
    pairs = apart.merge(predicted, on=["key", "seed"], suffixes=("", "_predicted"))
    shares = pairs.assign(share=pairs[METRIC] / pairs[f"{METRIC}_predicted"])  # 0 where bits are equal: no logarithm
    found = per_replicate(shares, "share")
    equal = per_replicate(apart, "equal_share")
    return Agreement(_mean(found), over_baseline(own, METRIC), _mean(equal), float(apart[LARGEST].max()), found)


def _mean(found: pd.DataFrame) -> Interval:
    return mean(found["value"].tolist(), found.index.tolist(), found["cluster"].tolist())


def weigh_validate(rows: pd.DataFrame) -> Evidence:
    """For every kernel most of the arithmetic error is predicted element by element, and the size of the total error is."""
    names = subjects(rows)
    control = agreement(rows, the(rows, EntryRole.CONTROL))
    found = {name: agreement(rows, name) for name in names}
    told = "; ".join(f"{name.replace('_', ' ')} {a.text()}" for name, a in found.items())
    worst = max(found.values(), key=lambda a: a.distance.estimate).distance
    counted = "1 kernel" if len(found) == 1 else f"{len(found)} kernels"
    figure = f"{counted}, at most {significant(worst.estimate)} of the error not predicted"
    note = (
        "Distance from the emulation over the emulation's own error, share of elements that are equal, largest distance in "
        f"u max |r|, error over the emulation's: {told}. "
        f"Exact attention, rounded once, is at a distance of {control.distance.text()}."
    )
    return Evidence(figure, note, tuple(question for a in found.values() for question in a.questions(control)))


def draw_validate(rows: pd.DataFrame) -> Figure:
    """RMSE between kernel and emulation over the emulation's own arithmetic error; left of 1 it is predicted, 0 is bit-equal."""
    names, found = kernels(rows), formats(rows)

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, (name, role) in enumerate(names.items()):
            for i, fmt in enumerate(found):
                part = own[(own["format"] == fmt) & (own[KERNEL] == name)]
                shade = GREY if role is EntryRole.CONTROL else colour(fmt)
                _agreement(axes, part, name, place + 0.42 * (i - (len(found) - 1) / 2), shade)
        axes.axvline(1, color=GREY, linewidth=0.6)
        axes.axvline(MOST, color=GREY, linestyle="--", linewidth=0.6)

    shown = ["control: exact" if role is EntryRole.CONTROL else readable(name) for name, role in names.items()]
    figure = panels(rows, shown, draw, "RMSE between kernel and emulation over that of the emulation from golden", 0.36)
    keys = [Line2D([], [], color=colour(fmt), marker="o", linestyle="") for fmt in found]
    words = [f"{fmt}, with the share of equal elements" for fmt in found]
    figure.legend(keys, words, loc="outside upper right", ncols=2, frameon=False)
    return figure


def _agreement(axes: Axes, rows: pd.DataFrame, name: str, place: float, shade: str) -> None:
    try:
        a = agreement(rows, name)
    except Undecidable:
        return
    if not a.distance.estimate > 0:
        axes.annotate("bit-equal", (0, place), (3, 0), xycoords=("axes fraction", "data"), **beside(shade))
        return
    axes.errorbar(a.distance.estimate, place, xerr=whiskers([a.distance]), color=shade, marker="o")
    axes.annotate(f"{100 * a.equal.estimate:.1f} %", (highest(a.distance), place), (5, 0), **beside(shade))


CHAPTERS = (
    Chapter(
        place=100,
        study="validate",
        title="Validation against real kernels",
        question="How accurately does the emulation predict the output of real kernels?",
        measured="The emulation has the kernel's formats and the tile of the study; kernels that could not run are listed "
        "with the environment.",
        paper="The microbenchmark is validated against the original FlashAttention kernel (Golden et al. 2024, section III).",
        claims=(
            claim(
                "validate",
                "validate",
                "The microbenchmark, a tiled emulation in pure tensors, agrees with the original kernel",
                f"{GOLDEN}, section III",
                weigh_validate,
            ),
        ),
        figures={
            "validate": Plot(
                draw_validate,
                "One line per kernel, a panel per scenario, on a log axis: the RMSE between the kernel and its emulation in "
                "pure tensors, divided by the emulation's own RMSE from golden, for each number format, with the share of "
                "elements that are equal to the bit. Left of 1 the emulation predicts the kernel's errors.",
                ("kernel",),
            ),
        },
    ),
)
