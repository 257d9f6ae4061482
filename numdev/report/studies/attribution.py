"""Which step of the arithmetic makes the error: each step alone in the low format, and each step alone in the high one.

Errors of independent roundings add up in squares. So the share of a step is what its format changes in the squared RMSE from
golden, over what the format of all steps changes; to the first order the shares of all steps add up to 1.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from itertools import takewhile
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from numdev.report.claims.evidence import EVERY, per_replicate, select
from numdev.report.claims.verdicts import ALIKE, Evidence, Question, Region, Undecidable
from numdev.report.figures.grid import whiskers
from numdev.report.figures.style import BLACK, GREY, PAGE, PALE, SMALL
from numdev.report.reading.scenarios import ENTRY_ROLE, LABEL, SCENARIO, TITLE
from numdev.report.statistics import Interval, mean, ratio, significant
from numdev.report.studies.attention import SYMBOLS, measured, of_output
from numdev.report.studies.marks import lay_rows
from numdev.results.manifest import EntryRole

_STEP, _ROLE = f"{LABEL}step", f"{ENTRY_ROLE}step"
_FIXED = ("inputs", "output")
"""Steps whose format is that of the tensors, so that a kernel has no choice."""
_MOST = Region(low=0.5)  # of the squared error: more than all other steps together, to the first order


@dataclass(frozen=True)
class Shares:
    """The share of each step in one output, one scenario.

    Attributes:
        adds: whether each step alone is in the low format, and not alone in the high one.
        by_step: in the order of the study.
        total: the square root of the sum of all shares: the RMSE that they predict over that of all steps.
    """

    adds: bool
    by_step: dict[str, Interval]
    total: Interval

    @property
    def chief(self) -> str:
        """The step with the largest share of those that a kernel may choose."""
        free = {name: share.estimate for name, share in self.by_step.items() if name not in _FIXED}
        if not free:
            raise Undecidable("no step was measured but those that the tensors' format gives")
        return max(free, key=free.__getitem__)


def shares(rows: pd.DataFrame, output: str) -> Shares:
    """The shares in one scenario, whose axis `step` has a control, where no step is changed, and one where all are.

    Raises:
        Undecidable: if one of the two is lacking, or if they do not differ.
    """
    if _STEP not in rows or _ROLE not in rows:
        raise Undecidable("the study has no axis of steps")
    own = of_output(rows, output)
    none, every = (_squares(own[own[_ROLE] == role.value]) for role in (EntryRole.CONTROL, EntryRole.EXPECTED))
    span = every["value"] - none["value"]
    if not ((span > 0).all() or (span < 0).all()):
        raise Undecidable("the deviation with every step changed is not apart from that with none")
    steps = [str(name) for name in own[_STEP][own[_ROLE].isna()].dropna().unique()]
    if not steps:
        raise Undecidable("no step was changed alone")
    each = {name: (_squares(own[own[_STEP] == name])["value"] - none["value"]) / span for name in steps}
    summed = pd.DataFrame(each).sum(axis=1).clip(lower=0.0)
    total = ratio(np.sqrt(summed), np.ones(len(summed)), summed.index, none["cluster"])
    clusters = none["cluster"].tolist()
    by_step = {name: mean(one.tolist(), one.index.tolist(), clusters) for name, one in each.items()}
    return Shares(bool((span > 0).all()), by_step, total)


def _squares(rows: pd.DataFrame) -> pd.DataFrame:
    """The squared RMSE from golden by replicate; the rounding of the inputs counts."""
    values = per_replicate(select(rows, reference="golden"), EVERY)
    return values.assign(value=values["value"] ** 2)


def _outputs(rows: pd.DataFrame) -> list[str]:
    """The gradients, or the primary output of an operation that has none."""
    own: list[str] = rows["output"][rows["primary"].astype(bool)].unique().tolist()
    return measured(rows) or own


def weigh_sum(rows: pd.DataFrame) -> Evidence:
    """The squared errors of the steps add up to that of all steps."""
    each = {output: shares(rows, output).total for output in _outputs(rows)}
    listed = ", ".join(f"{SYMBOLS.get(output, output)} {total.text()}" for output, total in each.items())
    sentence = f"The RMSE that the steps predict by the sum of their squares, over that of all steps at once: {listed}."
    return Evidence(listed, sentence, tuple(Question(total, ALIKE) for total in each.values()))


def weigh_chief(rows: pd.DataFrame) -> Evidence:
    """One step has more than half of the squared error."""
    each = {SYMBOLS.get(output, output): shares(rows, output) for output in _outputs(rows)}
    chief = {name: one.by_step[one.chief] for name, one in each.items()}
    figure = ", ".join(f"{name} {_words(one.chief)} {chief[name].text()}" for name, one in each.items())
    listed = "; ".join(f"{name}: {_brief(one)}" for name, one in each.items())
    return Evidence(figure, f"The largest shares: {listed}.", tuple(Question(share, _MOST) for share in chief.values()))


def _brief(own: Shares) -> str:
    largest = sorted(own.by_step.items(), key=lambda item: -item[1].estimate)[:4]
    return ", ".join(f"{_words(name)} {significant(share.estimate)}" for name, share in largest)


def _words(step: str) -> str:
    return step.replace("_", " ")


def draw_attribution(rows: pd.DataFrame) -> Figure:
    """The share of each step, a row of panels for each problem, a column for each output, the largest shares on top."""
    outputs, problems = _outputs(rows), [own for _, own in rows.groupby("pairing", sort=False)]
    each = [[_drawn(own, output) for output in outputs] for own in problems]
    steps = _ordered([one for row in each for both in row for one in both])
    several = len(outputs) > 1
    down, across = (len(problems), len(outputs)) if several else (1, len(problems))
    figure = Figure(figsize=(PAGE, 0.7 + down * (0.5 + 0.155 * len(steps))), layout="constrained")
    grid: Any = figure.subplots(down, across, sharey=True, sharex=True, squeeze=False)
    for i, own in enumerate(problems):
        for j, output in enumerate(outputs):
            axes = grid[i][j] if several else grid[0][i]
            _panel(axes, each[i][j], steps)
            title = f"{SYMBOLS.get(output, output)}, {_title(own)}" if several else _title(own)
            axes.set_title(textwrap.fill(title, 92 // across), loc="left", fontsize=7, fontweight="bold")
    for axes in grid[:, 0]:
        lay_rows(axes, [_words(step) for step in steps])
        axes.tick_params(axis="y", length=0)
    figure.supxlabel("share of the squared RMSE from golden that all steps make together", fontsize=8)
    keys: dict[str, Any] = {
        "low format alone: largest": Patch(color=BLACK),
        "the others": Patch(color=GREY),
        "set by the tensors": Patch(color=PALE),
        "high format alone: removed": Line2D(
            [], [], color="black", marker="D", markerfacecolor="white", linestyle="", markersize=3
        ),
    }
    figure.legend(list(keys.values()), list(keys), loc="outside upper right", ncols=4, frameon=False, fontsize=SMALL)
    return figure


def _drawn(rows: pd.DataFrame, output: str) -> list[Shares]:
    """The shares in every scenario of a problem that has them."""
    known = []
    for _, own in rows.groupby(SCENARIO, sort=False):
        try:
            known.append(shares(own, output))
        except Undecidable:
            continue
    return known


def _ordered(known: list[Shares]) -> list[str]:
    """All steps, by the largest share that each has alone in the low format anywhere."""
    alone = [one for one in known if one.adds] or known

    def most(step: str) -> float:
        return max((one.by_step[step].estimate for one in alone if step in one.by_step), default=0.0)

    return sorted(dict.fromkeys(name for one in known for name in one.by_step), key=most, reverse=True)


def _title(rows: pd.DataFrame) -> str:
    """The parts, between commas, that the titles of a problem's scenarios have in common."""
    parts = [str(title).split(", ") for title in rows[TITLE].unique()]
    same = list(takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
    return ", ".join(each[0] for each in same) or ", ".join(parts[0])


def _panel(axes: Axes, known: list[Shares], steps: list[str]) -> None:
    """Bars: each step alone in the low format. Marks: what each step alone in the high format removes."""
    for one in known:
        for step, share in one.by_step.items():
            place = steps.index(step)
            look: dict[str, Any] = {"color": "black", "linewidth": 0.7, "capsize": 1.5, "xerr": whiskers([share])}
            if one.adds:
                shade = PALE if step in _FIXED else BLACK if step == one.chief else GREY
                axes.barh(place, share.estimate, 0.75, color=shade)
                axes.errorbar(share.estimate, place - 0.18, **look)
            else:
                axes.errorbar(share.estimate, place + 0.18, marker="D", markersize=3, markerfacecolor="white", **look)
    sums = ", ".join(f"{'bars' if one.adds else 'marks'} {significant(one.total.estimate**2)}" for one in known)
    words: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": SMALL, "color": GREY}
    axes.annotate(f"sum: {sums}" if sums else "not measured", (1, 0), (-2, 3), xycoords="axes fraction", **words)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
