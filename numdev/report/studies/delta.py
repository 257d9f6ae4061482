"""The signed bias of delta: whether rounding P V biases it, by how O is accumulated and how delta is computed.

`delta = rowsum(dO * O)` enters every element of dS. An error of either sign cancels over rows and steps; an error of
one sign accumulates. The bias is the mean of `sign(delta) D` over the mean of `|delta|`, in units of u: it would be 1 if every
element of O were off by u away from zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.arithmetic.formats import Format
from numdev.report.claims.claim import OURS
from numdev.report.claims.comparisons import over, per_replicate
from numdev.report.claims.finding import LARGER, Evidence, Question, Region, Undecidable, by_format, left_out, select
from numdev.report.figures.grid import whiskers
from numdev.report.figures.labels import WHITE
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import FP32_INSIDE, GREY, PAGE, PALE, SMALL, TILED
from numdev.report.reading.scenarios import ENTRY_ROLE, FORMATS, ROLES, of, ordered
from numdev.report.statistics.estimates import Interval, mean
from numdev.report.studies.backward import SAME_INPUTS, claim, of_output
from numdev.report.studies.chapter import Chapter
from numdev.results.manifest import EntryRole

QIU = "Qiu and Yao 2025 (arXiv 2510.04212)"
BIAS, EVERY = "bias", "rmse"
LEAST = 0.025
"""Of u. If half of the sums of P V are halfway cases, as sums of two numbers with one exponent are, and all of these are rounded
to one side, by u / 2 at least, then O is off by u / 4 at least on average. Below a tenth of that there is no bias."""
_SHOWS, _ABSENT = Region(low=LEAST), Region(-LEAST, LEAST)
_FORM, _READ = "variant.recompute.delta", "variant.recompute.output"
_ACCUMULATES = ("variant.forward.precision.values", "variant.forward.precision.accumulator")
_WIDE = ("fp32", "fp64")


@dataclass(frozen=True)
class Made:
    """How delta is made.

    Attributes:
        fmt: F, the format of the gradients and of O.
        wide: whether the forward pass accumulates O in FP32 or FP64.
        form: whether of O or of P, as `DeltaForm` has it.
        read: which O, as `OutputForDelta` has it.
    """

    fmt: str
    wide: bool
    form: str
    read: str

    @property
    def of_output(self) -> bool:
        return self.form == "output"

    @property
    def text(self) -> str:
        """For a reader."""
        where = "PV in FP32" if self.wide else f"PV in {self.fmt}"
        made = f"dO·O, O {'before' if self.read == 'unrounded' else 'after'} its cast" if self.of_output else "dP·P"
        return f"{self.fmt}, {where}: {made}"


def ways(rows: pd.DataFrame) -> dict[Made, pd.DataFrame]:
    """The rows of delta by how it is made, with `bias` in units of u of the study's format and relative to the mean |delta|."""
    own = of_output(rows, "delta")
    lacking = [name for name in (_FORM, _READ, *_ACCUMULATES) if name not in own]
    if lacking:
        raise Undecidable(f"the points do not say {', '.join(lacking)}")
    units = own["format"].map({name: Format.parse(name).u for name in own["format"].unique()}).astype(float)
    size = (own["mean_absolute"] / own["relative_l1"]).where(own["relative_l1"] > 0, 1.0)  # mean |delta|
    wide = own[list(_ACCUMULATES)].apply(lambda each: each.str.partition("@")[0].isin(_WIDE)).all(axis=1)
    own = own.assign(bias=own[BIAS] / size / units, wide=wide)
    grouped = own.groupby(["format", "wide", _FORM, _READ], sort=False)
    found = {Made(str(fmt), bool(wide), str(form), str(read)): group for (fmt, wide, form, read), group in grouped}
    return dict(sorted(found.items(), key=lambda item: (FORMATS.index(item[0].fmt), item[0].wide, item[0].form, item[0].read)))


def judged(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without those that the study declares to be controls."""
    roles = [name for name in rows if str(name).startswith(ENTRY_ROLE)]
    return rows[~(rows[roles] == EntryRole.CONTROL.value).any(axis=1)]


def bias(rows: pd.DataFrame) -> Interval:
    """The mean over replicates, with its sign."""
    own = per_replicate(select(rows, reference=SAME_INPUTS), BIAS)
    return mean(own["value"].tolist(), own.index.tolist(), own["cluster"].tolist())


def weigh_delta(rows: pd.DataFrame) -> Evidence:
    """Rounding P V to the low format tile by tile biases delta away from zero."""
    return by_format(judged(rows), lambda own: _biased(own, wide=False, region=_SHOWS))


def weigh_delta_fp32(rows: pd.DataFrame) -> Evidence:
    """Where O is accumulated in FP32, delta has no bias, whether O is read before its cast or after it."""
    return by_format(judged(rows), lambda own: _biased(own, wide=True, region=_ABSENT))


def _biased(rows: pd.DataFrame, *, wide: bool, region: Region) -> Evidence:
    found = {made: bias(own) for made, own in ways(rows).items() if made.wide == wide and made.of_output}
    if not found:
        raise Undecidable(f"nothing was measured with O accumulated in {'FP32' if wide else 'a low format'}")
    figure = ", ".join(f"{interval.text()} u" for interval in found.values())
    told = "; ".join(f"{interval.text()} u with {made.text}" for made, interval in found.items())
    return Evidence(figure, f"the signed bias of delta is {told}.", tuple(Question(one, region) for one in found.values()))


def weigh_delta_forms(rows: pd.DataFrame) -> Evidence:
    """With O accumulated in FP32, delta computed from the rounded O is farther from the exact one than delta computed from P."""

    def judge(own: pd.DataFrame) -> Evidence:
        found = {made: of for made, of in ways(own).items() if made.wide}
        rounded = [of for made, of in found.items() if made.of_output and made.read == "rounded"]
        recomputed = [of for made, of in found.items() if not made.of_output]
        if not (rounded and recomputed):
            raise Undecidable("it compares delta from the rounded O with delta from P, both with O accumulated in FP32")
        times = over(*(per_replicate(select(of, reference=SAME_INPUTS), EVERY) for of in (rounded[0], recomputed[0])))
        ratio = f"the RMSE of delta computed from the rounded O is {times.text()} times that of delta computed from P"
        sentence = f"{ratio}.{left_out(times)}"
        return Evidence(times.text(), sentence, (Question(times, LARGER),))

    return by_format(judged(rows), judge)


def draw_delta(rows: pd.DataFrame) -> Figure:
    """The signed bias of delta, a row for each way to make it, below the title of its scenario."""
    found = [(scenario, list(_intervals(ways(of(rows, scenario))))) for scenario in ordered(rows)]
    end = _end(interval for _, one in found for made, interval in one if made.fmt not in _WIDE)
    lines = sum(1 + len(one) for _, one in found)
    figure = Figure(figsize=(PAGE, 0.7 + 0.145 * lines), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-LEAST, LEAST, color=PALE, zorder=0, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    named: dict[int, str] = {}
    place = 0
    for scenario, one in found:
        role = f" ({ROLES[scenario.role]})" if ROLES[scenario.role] else ""
        words: dict[str, Any] = {"va": "center", "fontsize": 7, "fontweight": "bold", "bbox": WHITE}
        axes.annotate(f"{scenario.title}{role}", (0, place), (2, 0), ("axes fraction", "data"), "offset points", **words)
        for made, interval in one:
            place += 1
            named[place] = made.text
            _mark(axes, place, interval, end, FP32_INSIDE if made.wide else TILED)
        place += 1
    axes.set_yticks(list(named), list(named.values()), fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(lines - 0.4, -0.7)
    axes.set_xlim(-end, 1.15 * end)  # on the right is room for the values
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")
    said = f"signed bias of delta in u of the format: mean of sign(delta) D / mean |delta|; grey: within {LEAST:g} u"
    figure.supxlabel(said, fontsize=SMALL)
    return figure


def _intervals(found: dict[Made, pd.DataFrame]) -> Iterator[tuple[Made, Interval]]:
    for made, own in found.items():
        try:
            yield made, bias(own)
        except Undecidable:
            continue


def _end(intervals: Iterable[Interval]) -> float:
    """Where the axis ends, the same on both sides: all intervals within 1 u are inside, and `LEAST` can be seen."""
    ends = [max(abs(each.low), abs(each.high)) for each in intervals]
    return 1.05 * max([value for value in ends if value <= 1], default=0.0) or 4 * LEAST


def _mark(axes: Axes, place: int, interval: Interval, end: float, shade: str) -> None:
    """The bias with its interval, or an arrow where it lies beyond the end; its value in the margin of the panel."""
    value = interval.estimate
    if abs(value) <= end:
        bars = [[min(half, end - abs(value)) for half in side] for side in whiskers([interval])]
        axes.errorbar(value, place, xerr=bars, color=shade, marker="o")
    else:
        axes.errorbar(math.copysign(0.96 * end, value), place, xerr=0.0, color=shade, marker="<" if value < 0 else ">")
    look: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": SMALL, "color": GREY}
    shown = round(value, 2) + 0.0  # no minus before a zero
    text = f"{shown:+.2f}" if abs(shown) < 100 else f"{value:+.0e}"
    axes.annotate(text, (1, place), (-2, 0), ("axes fraction", "data"), "offset points", **look)


CHAPTERS = (
    Chapter(
        place=220,
        study="delta",
        operation="attention_backward",
        title="The signed bias of delta",
        question="Does rounding $P V$ bias delta where row maxima tie, also if $O$ is accumulated in FP32?",
        measured="Delta against that of exact gradients of the same rounded inputs: the mean of the difference, away from zero, "
        "over the mean of $|delta|$, in $u$.",
        paper="Where several scores of a row tie for its maximum, their exponentials are exactly 1, and sums of values of one "
        "sign in BF16 round with a bias; the error of delta then has a sign that stays, and training fails (Qiu and Yao 2025).",
        claims=(
            claim(
                "delta",
                "delta",
                "Rounding P V to the low format tile by tile biases delta away from zero",
                QIU,
                weigh_delta,
            ),
            claim(
                "delta_fp32",
                "delta",
                "Where O is accumulated in FP32, delta has no bias, whether O is read before its cast or after it",
                f"{OURS}: {QIU}, asked of kernels",
                weigh_delta_fp32,
                is_ours=True,
            ),
            claim(
                "delta_forms",
                "delta",
                "With O accumulated in FP32, delta computed from the rounded O is farther from exact than delta computed from P",
                f"{OURS}: Dao 2023, Algorithm 2, line 4, against the formula that it replaces",
                weigh_delta_forms,
                is_ours=True,
            ),
        ),
        figures={
            "delta": Plot(
                draw_delta,
                "One row for each way to make delta, below the title of its scenario: the signed bias of delta in u with "
                "its 95 % confidence interval, with O accumulated in FP32 (light blue) or in the low format (dark blue) in the "
                "forward pass. Right of 0 delta is biased away from zero; a grey band marks no bias.",
            ),
        },
    ),
)
