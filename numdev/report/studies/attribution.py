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

from numdev.report.claims.claim import OURS
from numdev.report.claims.comparisons import per_replicate
from numdev.report.claims.finding import ALIKE, Evidence, Question, Region, Undecidable, select
from numdev.report.figures.grid import whiskers
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import BLACK, GREY, PAGE, PALE, SMALL
from numdev.report.reading.scenarios import ENTRY_ROLE, SCENARIO, TITLE
from numdev.report.statistics.estimates import Interval, mean, ratio, significant
from numdev.report.studies import attention
from numdev.report.studies.backward import SYMBOLS, claim, measured, of_output
from numdev.report.studies.chapter import Chapter
from numdev.results.manifest import EntryRole

EVERY = "rmse"
LABEL, ROLE = "label.step", f"{ENTRY_ROLE}step"
GIVEN = ("inputs", "output")
"""Steps whose format is that of the tensors, so that a kernel has no choice."""
_LOOK: dict[str, Any] = {"color": "black", "linewidth": 0.7, "capsize": 1.5}
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
        free = {name: share.estimate for name, share in self.by_step.items() if name not in GIVEN}
        if not free:
            raise Undecidable("no step was measured but those that the tensors' format gives")
        return max(free, key=free.__getitem__)


def shares(rows: pd.DataFrame, output: str) -> Shares:
    """The shares in one scenario, whose axis `step` has a control, where no step is changed, and one where all are.

    Raises:
        Undecidable: if one of the two is lacking, or if they do not differ.
    """
    if LABEL not in rows or ROLE not in rows:
        raise Undecidable("the study has no axis of steps")
    own = of_output(rows, output)
    none, every = (_squares(own[own[ROLE] == role.value]) for role in (EntryRole.CONTROL, EntryRole.EXPECTED))
    span = every["value"] - none["value"]
    if not ((span > 0).all() or (span < 0).all()):
        raise Undecidable("the deviation with every step changed is not apart from that with none")
    steps = [str(name) for name in own[LABEL][own[ROLE].isna()].dropna().unique()]
    each = {name: (_squares(own[own[LABEL] == name])["value"] - none["value"]) / span for name in steps}
    if not each:
        raise Undecidable("no step was changed alone")
    summed = sum(each.values()).clip(lower=0.0)  # type: ignore[union-attr]
    total = ratio(np.sqrt(summed), np.ones(len(summed)), summed.index, none["cluster"])
    by_step = {name: mean(found.tolist(), found.index.tolist(), none["cluster"].tolist()) for name, found in each.items()}
    return Shares(bool((span > 0).all()), by_step, total)


def _squares(rows: pd.DataFrame) -> pd.DataFrame:
    """The squared RMSE from golden by replicate; the rounding of the inputs counts."""
    found = per_replicate(select(rows, reference="golden"), EVERY)
    return found.assign(value=found["value"] ** 2)


def _outputs(rows: pd.DataFrame) -> list[str]:
    """The gradients, or the primary output of an operation that has none."""
    found: list[str] = measured(rows) or rows["output"][rows["primary"].astype(bool)].unique().tolist()
    return found


def _name(output: str) -> str:
    return SYMBOLS.get(output, "O" if output == "out" else output)


def weigh_sum(rows: pd.DataFrame) -> Evidence:
    """The squared errors of the steps add up to that of all steps."""
    found = {output: shares(rows, output) for output in _outputs(rows)}
    told = ", ".join(f"{_name(output)} {one.total.text()}" for output, one in found.items())
    sentence = f"The RMSE that the steps predict by the sum of their squares, over that of all steps at once: {told}."
    return Evidence(told, sentence, tuple(Question(one.total, ALIKE) for one in found.values()))


def weigh_chief(rows: pd.DataFrame) -> Evidence:
    """One step has more than half of the squared error."""
    found = {output: shares(rows, output) for output in _outputs(rows)}
    chief = {output: (one.chief, one.by_step[one.chief]) for output, one in found.items()}
    figure = ", ".join(f"{_name(output)} {_words(step)} {share.text()}" for output, (step, share) in chief.items())
    told = "; ".join(f"{_name(output)}: {_brief(one)}" for output, one in found.items())
    return Evidence(figure, f"The largest shares: {told}.", tuple(Question(share, _MOST) for _, share in chief.values()))


def _brief(found: Shares) -> str:
    largest = sorted(found.by_step.items(), key=lambda item: -item[1].estimate)[:4]
    return ", ".join(f"{_words(name)} {significant(share.estimate)}" for name, share in largest)


def _words(step: str) -> str:
    return step.replace("_", " ")


def draw_attribution(rows: pd.DataFrame) -> Figure:
    """The share of each step, a row of panels for each problem, a column for each output, the largest shares on top."""
    outputs = _outputs(rows)
    problems = [own for _, own in rows.groupby("pairing", sort=False)]
    found = [[[_found(own, output) for _, own in each.groupby(SCENARIO, sort=False)] for output in outputs] for each in problems]
    steps = _ordered([one for each in found for both in each for one in both if one is not None])
    down, across = (len(problems), len(outputs)) if len(outputs) > 1 else (1, len(problems))
    figure = Figure(figsize=(PAGE, 0.7 + down * (0.5 + 0.155 * len(steps))), layout="constrained")
    grid: Any = figure.subplots(down, across, sharey=True, sharex=True, squeeze=False)
    for i, own in enumerate(problems):
        for j, output in enumerate(outputs):
            axes = grid[i][j] if len(outputs) > 1 else grid[0][i]
            _panel(axes, [one for one in found[i][j] if one is not None], steps)
            title = f"{_name(output)}, {_title(own)}" if len(outputs) > 1 else _title(own)
            axes.set_title(textwrap.fill(title, 92 // across), loc="left", fontsize=7, fontweight="bold")
    for axes in grid[:, 0]:
        axes.set_yticks(range(len(steps)), [_words(step) for step in steps])
        axes.tick_params(axis="y", length=0)
    grid[0][0].set_ylim(len(steps) - 0.5, -0.5)
    figure.supxlabel("share of the squared RMSE from golden that all steps make together", fontsize=8)
    mark = Line2D([], [], color="black", marker="D", markerfacecolor="white", linestyle="", markersize=3)
    keys = [*(Patch(color=shade) for shade in (BLACK, GREY, PALE)), mark]
    words = [
        "low format alone: largest",
        "the others",
        "set by the tensors",
        "high format alone: removed",
    ]
    figure.legend(keys, words, loc="outside upper right", ncols=4, frameon=False, fontsize=SMALL)
    return figure


def _found(rows: pd.DataFrame, output: str) -> Shares | None:
    try:
        return shares(rows, output)
    except Undecidable:
        return None


def _ordered(found: list[Shares]) -> list[str]:
    """All steps, by the largest share that each has alone in the low format anywhere."""
    known = dict.fromkeys(name for one in found for name in one.by_step)
    alone = [one for one in found if one.adds] or found

    def most(step: str) -> float:
        return max((one.by_step[step].estimate for one in alone if step in one.by_step), default=0.0)

    return sorted(known, key=most, reverse=True)


def _title(rows: pd.DataFrame) -> str:
    """What the titles of a problem's scenarios have in common, up to a comma."""
    parts = [str(title).split(", ") for title in rows[TITLE].unique()]
    same = list(takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
    return ", ".join(each[0] for each in same) or ", ".join(parts[0])


def _panel(axes: Axes, found: list[Shares], steps: list[str]) -> None:
    """Bars: each step alone in the low format. Marks: what each step alone in the high format removes."""
    for one in found:
        for place, step in enumerate(steps):
            share = one.by_step.get(step)
            if share is None:
                continue
            look = _LOOK | {"xerr": whiskers([share])}
            if one.adds:
                shade = PALE if step in GIVEN else BLACK if step == one.chief else GREY
                axes.barh(place, share.estimate, 0.75, color=shade)
                axes.errorbar(share.estimate, place - 0.18, **look)
            else:
                axes.errorbar(share.estimate, place + 0.18, marker="D", markersize=3, markerfacecolor="white", **look)
    sums = [f"{'bars' if one.adds else 'marks'} {significant(one.total.estimate**2)}" for one in found]
    words: dict[str, Any] = {"textcoords": "offset points", "ha": "right", "va": "bottom", "fontsize": SMALL, "color": GREY}
    axes.annotate(f"sum: {', '.join(sums)}" if sums else "not measured", (1, 0), (-2, 3), xycoords="axes fraction", **words)
    axes.axvline(0, color="black", linewidth=0.6)
    axes.grid(axis="x")
    axes.grid(visible=False, axis="y")


_QUESTION = "Which step makes the error, and which step gains most from high precision?"
_MEASURED = (
    "Each step alone in the low format among steps in the high one, and alone in the high format among steps in the low one. "
    "Shares are of the squared RMSE from golden on the unrounded inputs."
)
_PAPER = "Nothing: the sources compare whole policies."
_ALT = (
    "A panel for each problem and output, a row for each step, the largest on top: bars of the share of the squared error that "
    "the step makes alone in the low format, the largest one black, those that the tensors set pale; diamonds of the share "
    "that the high format in this step alone removes; both with 95 % confidence intervals, and their sums."
)
_SUM = "The squared errors of the steps, each changed alone, add up to that of all steps changed at once"
_CHIEF = "One step beside the inputs and the output makes more than half of the squared error"

CHAPTERS = (
    Chapter(
        place=94,
        study="attribution_forward",
        title="Error by step: the forward pass",
        question=_QUESTION,
        measured=_MEASURED,
        paper=_PAPER,
        claims=(
            attention.claim("attribution_forward", "attribution_forward", _SUM, OURS, weigh_sum, is_ours=True),
            attention.claim("attribution_forward_step", "attribution_forward", _CHIEF, OURS, weigh_chief, is_ours=True),
        ),
        figures={"attribution_forward": Plot(draw_attribution, _ALT, ("step",))},
    ),
    Chapter(
        place=230,
        study="attribution",
        operation="attention_backward",
        title="Error by step: the backward pass",
        question=_QUESTION,
        measured=_MEASURED,
        paper=_PAPER,
        claims=(
            claim("attribution", "attribution", f"{_SUM}, in dQ, dK and dV", OURS, weigh_sum, is_ours=True),
            claim("attribution_step", "attribution", f"{_CHIEF}, in each of dQ, dK and dV", OURS, weigh_chief, is_ours=True),
        ),
        figures={"attribution": Plot(draw_attribution, _ALT, ("step",))},
    ),
)
