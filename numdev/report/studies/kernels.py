"""Figures with a row for each kernel, policy or method.

They show which precision policy kernels follow, what the emulation predicts of them, whether tiled attention is better than the
baseline, and FlashAttention-3's Table 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from numdev.report.claims.evidence import DEVIATION, EVERY, mean_of, over, over_baseline, per_replicate, select, the_entry
from numdev.report.claims.verdicts import ABOVE, Evidence, Question, Region, Undecidable, Verdict, about
from numdev.report.figures.grid import highest, name_steps, replicates
from numdev.report.figures.labels import WHITE
from numdev.report.figures.style import BLACK, FP32_INSIDE, GREY, PAGE, PALE, TILED, colour
from numdev.report.reading.scenarios import ENTRY_ROLE, LABEL, STANDS_FOR, formats, of, ordered
from numdev.report.statistics import Interval, ratio, significant, typical
from numdev.report.studies.attention import FIG4_RATIO, GRADIENTS, SAME_INPUTS, SHADES, SYMBOLS, measured, of_output
from numdev.report.studies.marks import BESIDE, DASHED, bar, lay_rows, legend, scenario_panels, words_in_row
from numdev.report.studies.marks import measured as value_of
from numdev.results.manifest import EntryRole

KERNEL, ROLE = f"{LABEL}kernel", f"{ENTRY_ROLE}kernel"
_SHADES = {EntryRole.CONTROL: TILED, EntryRole.EXPECTED: FP32_INSIDE, EntryRole.SUBJECT: BLACK, EntryRole.ASIDE: GREY}


def kernels(rows: pd.DataFrame) -> dict[str, EntryRole]:
    """The entries of the axis `kernel`, in the order of the study, with the role that the study declares of each."""
    if KERNEL not in rows:
        return {}
    own = rows.reindex(columns=[KERNEL, ROLE]).dropna(subset=KERNEL).drop_duplicates()
    return {str(name): EntryRole.SUBJECT if pd.isna(role) else EntryRole(role) for name, role in own.itertuples(index=False)}


def _subjects(rows: pd.DataFrame) -> list[str]:
    """The kernels of which the claims speak."""
    names = [name for name, role in kernels(rows).items() if role is EntryRole.SUBJECT]
    if not names:
        raise Undecidable("no kernel could be measured here")
    return names


def _readable(name: str) -> str:
    return name.replace("_", " ")


def draw_kernels(rows: pd.DataFrame) -> Figure:
    """RMSE of each kernel from golden, between the emulated policies `kernel(F)` and `uniform(F)`."""
    names, fmt = kernels(rows), formats(rows)[0].upper()
    policy = {EntryRole.CONTROL: f"every step in {fmt}", EntryRole.EXPECTED: f"kernel({fmt}), emulated"}

    def of_kernel(own: pd.DataFrame, name: str) -> Interval | None:
        return replicates(select(own, "variant", "golden", **{KERNEL: name}), EVERY)

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, (name, role) in enumerate(names.items()):
            value = value_of(of_kernel, own, name)
            if value is None:
                words_in_row(axes, place, "not measured", GREY)
                continue
            bar(axes, place, value, _SHADES[role], marker="D" if role in policy else "o")
            if role in policy:
                axes.axvline(value.estimate, color=_SHADES[role], linestyle="--", linewidth=0.6, zorder=0)

    shown = [policy.get(role, _readable(name)) for name, role in names.items()]
    return scenario_panels(rows, shown, draw, "RMSE of O from golden, absolute")


_MOST = 0.5  # a distance from the emulation below this share of the emulation's own error: most of the error is predicted
_SIZE = 1.1  # the size of the error is predicted if it is right within a factor of this
_LARGEST = "max_u"  # an ulp of its own would tell of elements that cancel to zero in one order of summation


@dataclass(frozen=True)
class Agreement:
    """How well the emulation predicts one kernel.

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

    @staticmethod
    def of(rows: pd.DataFrame, name: str) -> Agreement:
        """Over all points of a kernel, paired by point and seed."""
        own = rows[rows[KERNEL] == name]
        apart = select(own)[["key", "seed", "cluster", EVERY, _LARGEST, "equal_share"]]
        predicted = select(own, "baseline", SAME_INPUTS)[["key", "seed", EVERY]]
        pairs = apart.merge(predicted, on=["key", "seed"], suffixes=("", "_predicted"))
        shares = per_replicate(pairs.assign(share=pairs[EVERY] / pairs[f"{EVERY}_predicted"]), "share")  # 0 has no logarithm
        equal = mean_of(per_replicate(apart, "equal_share"))
        return Agreement(mean_of(shares), over_baseline(own, EVERY), equal, float(apart[_LARGEST].max()), shares)

    def questions(self, control: Agreement) -> tuple[Question, ...]:
        """Whether most of the error is predicted, more than by `control`, exact attention, and its size."""
        pairs = control.shares.join(self.shares["value"].rename("own"), how="inner")
        nearer = Question(mean_of(pairs.assign(value=pairs["value"] - pairs["own"])), Region(low=0.0))
        return Question(self.distance, Region(high=_MOST)), nearer, Question(self.size, about(1.0, _SIZE))

    def text(self, *, whole: bool) -> str:
        """Distance and share of equal elements; the `whole` has the largest distance and the size too."""
        first = f"{significant(self.distance.estimate)}, {100 * self.equal.estimate:.1f} %"
        return f"{first}, {significant(self.largest)}, {self.size.text()}" if whole else first


def weigh_validate(rows: pd.DataFrame) -> Evidence:
    """For every kernel most of the arithmetic error is predicted element by element, and the size of the total error is."""
    control = Agreement.of(rows, the_entry(rows, "kernel", EntryRole.CONTROL))
    each = {name: Agreement.of(rows, name) for name in _subjects(rows)}
    listed = "; ".join(f"{_readable(name)} {one.text(whole=True)}" for name, one in each.items())
    sentence = (
        "Distance from the emulation over the emulation's own error, share of elements that are equal, largest distance in "
        f"u max |r|, error over the emulation's: {listed}. "
        f"Exact attention, rounded once, is at a distance of {control.distance.text()}."
    )
    return Evidence(
        _not_predicted(len(each), each.values()), sentence, tuple(q for one in each.values() for q in one.questions(control))
    )


def weigh_validate_backward(rows: pd.DataFrame) -> Evidence:
    """Of every kernel most of the arithmetic error of dq, dk and dv is predicted element by element, and its size is."""
    control = the_entry(rows, "kernel", EntryRole.CONTROL)
    of_gradient = {output: of_output(rows, output) for output in GRADIENTS}
    exact = {output: Agreement.of(own, control) for output, own in of_gradient.items()}
    each = {name: {output: Agreement.of(own, name) for output, own in of_gradient.items()} for name in _subjects(rows)}

    def listed(own: dict[str, Agreement]) -> str:
        return ", ".join(f"{SYMBOLS[output]} {one.text(whole=False)}" for output, one in own.items())

    sentence = (
        "For each gradient the distance from the emulation over the emulation's own error, and the share of elements that are "
        f"equal: {'; '.join(f'{_readable(name)} {listed(own)}' for name, own in each.items())}. "
        f"Exact gradients, rounded once, are at {listed(exact)}."
    )
    questions = [q for own in each.values() for output, one in own.items() for q in one.questions(exact[output])]
    return Evidence(_not_predicted(len(each), [one for own in each.values() for one in own.values()]), sentence, tuple(questions))


def _not_predicted(count: int, each: Any) -> str:
    worst = max(each, key=lambda one: one.distance.estimate).distance
    return f"{count} kernel{'s' * (count != 1)}, at most {significant(worst.estimate)} of the error not predicted"


_SHOWN = 1e-3  # what is smaller is told in words: one element that differs would stretch the axis over many decades
_MARKERS = ("o", "s", "^", "D")  # of formats, the narrowest first
_APART = "RMSE between kernel and emulation over that of the emulation from golden"


def _draw_agreement(rows: pd.DataFrame, mark: Any, row: float) -> Figure:
    """A panel per scenario with what `mark` draws of each kernel; left of 1 its error is predicted, 0 is bit-equal."""
    names = kernels(rows)

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, (name, role) in enumerate(names.items()):
            mark(axes, own[own[KERNEL] == name], place, name, role)
        axes.axvline(1, color=GREY, linewidth=0.6)
        axes.axvline(_MOST, color=GREY, linestyle="--", linewidth=0.6)

    shown = ["control: exact" if role is EntryRole.CONTROL else _readable(name) for name, role in names.items()]
    return scenario_panels(rows, shown, draw, _APART, row)


def _agreement(rows: pd.DataFrame, name: str) -> Agreement | None:
    try:
        return Agreement.of(rows, name)
    except Undecidable:
        return None


def draw_validate(rows: pd.DataFrame) -> Figure:
    """RMSE between kernel and emulation over the emulation's own arithmetic error, for each format."""
    names = formats(rows)

    def mark(axes: Axes, own: pd.DataFrame, place: float, name: str, role: EntryRole) -> None:
        for i, fmt in enumerate(names):
            one = _agreement(own[own["format"] == fmt], name)
            shade, at = GREY if role is EntryRole.CONTROL else colour(fmt), place + 0.42 * (i - (len(names) - 1) / 2)
            if one is not None and one.distance.estimate > 0:
                bar(axes, at, one.distance, shade, f"{100 * one.equal.estimate:.1f} %")
            elif one is not None:
                words_in_row(axes, at, "bit-equal", shade)

    figure = _draw_agreement(rows, mark, 0.36)
    keys = {
        f"{fmt}, with the share of equal elements": Line2D([], [], color=colour(fmt), marker="o", linestyle="") for fmt in names
    }
    legend(figure, keys, 2)
    return figure


def draw_validate_backward(rows: pd.DataFrame) -> Figure:
    """RMSE between kernel and emulation over the emulation's own arithmetic error, a line for each gradient of each kernel."""
    names, outputs = formats(rows), measured(rows)
    markers = {fmt: _MARKERS[i % len(_MARKERS)] for i, fmt in enumerate(names)}

    def mark(axes: Axes, own: pd.DataFrame, place: float, name: str, role: EntryRole) -> None:
        for row, output in enumerate(outputs):
            here = own[own["output"] == output]
            for i, fmt in enumerate(names if len(here) else ()):
                at = place + 0.26 * (row - (len(outputs) - 1) / 2) + 0.08 * (i - (len(names) - 1) / 2)
                one = _agreement(of_output(here, output)[here["format"] == fmt], name)
                if one is not None and one.distance.estimate < _SHOWN:
                    words_in_row(axes, at, f"below {_SHOWN}" if one.distance.estimate > 0 else "bit-equal", SHADES[output])
                elif one is not None:
                    bar(axes, at, one.distance, SHADES[output], marker=markers[fmt], markersize=3)

    figure = _draw_agreement(rows, mark, 0.42)
    keys = {SYMBOLS[output]: Line2D([], [], color=SHADES[output], linewidth=2) for output in outputs}
    keys |= {fmt: Line2D([], [], color=GREY, marker=marker, linestyle="") for fmt, marker in markers.items()}
    legend(figure, keys, len(keys))
    return figure


_FA3_RATIO = 1.0 / 1.7
"""Shah et al. 2024 (FlashAttention-3), section 4.3: FP16 RMSE of FlashAttention-2 and -3 over the baseline's."""
_POLICIES = {"uniform": ("every step in F", TILED), "kernel": ("FP32 inside", FP32_INSIDE)}


def draw_sign(rows: pd.DataFrame) -> Figure:
    """The variant's deviation from golden over the baseline's, by precision policy: right of 1 is worse."""
    lines: list[tuple[str, str, Interval, Interval]] = []
    for scenario in ordered(rows):
        here = of(rows, scenario)
        for fmt in formats(here):
            for policy, (words, shade) in _POLICIES.items():
                own = here[(here["format"] == fmt) & (here["policy"] == policy)]
                largest, root = (value_of(over_baseline, own, metric) for metric in (DEVIATION, EVERY))
                if largest is not None and root is not None:
                    lines.append((f"{scenario.title}: {fmt}, {words}", shade, largest, root))
    figure = Figure(figsize=(PAGE, 1.1 + 0.26 * max(len(lines), 1)), layout="constrained")
    axes = figure.add_subplot()
    for place, (_, shade, largest, root) in enumerate(lines):
        bar(axes, place - 0.15, largest, shade)
        bar(axes, place + 0.15, root, shade, markerfacecolor="white")
        right = max(highest(largest), highest(root))
        axes.annotate(significant(largest.estimate), (right, place), (5, 0), bbox=WHITE, color=shade, **BESIDE)
    values = [end for *_, largest, root in lines for value in (largest, root) for end in _ends(value)] + [FIG4_RATIO, _FA3_RATIO]
    axes.set_xscale("log")
    axes.set_xlim(min(values) / 1.3, max(values) * 1.8)
    name_steps(axes.xaxis)
    lay_rows(axes, [text for text, *_ in lines], (-0.6, 1.2))
    axes.grid(visible=False)
    axes.set_xlabel("deviation of tiled attention from golden / that of the baseline\n(filled: max difference, open: RMSE)")
    axes.axvline(1, color=BLACK, linewidth=0.8)
    look = BESIDE | {"va": "bottom", "xycoords": axes.get_xaxis_transform()}
    for value, text in ((FIG4_RATIO, "Golden et al.: 10"), (_FA3_RATIO, "FlashAttention-3: 1/1.7")):
        axes.axvline(value, **DASHED)
        axes.annotate(text, (value, 1), (0, 3), ha="center", color=GREY, **look)
    for text, side, shift in (("← better than the baseline", "right", -6), ("worse than the baseline →", "left", 6)):
        axes.annotate(text, (1, 0), (shift, 3), ha=side, bbox=WHITE, color=BLACK, **look)
    return figure


def _ends(value: Interval) -> tuple[float, float]:
    """The drawn ends of an interval: at most a factor 5 to each side, so that a wide one does not dwarf the others."""
    low, high = (end if math.isfinite(end) else value.estimate for end in (value.low, value.high))
    return max(low, value.estimate / 5), min(high, value.estimate * 5)


FA3_RMSE = {
    "FP16 baseline": 3.2e-4,
    "FP16 FlashAttention-2": 1.9e-4,
    "FP16 FlashAttention-3": 1.9e-4,
    "FP8 baseline": 2.4e-2,
    "FP8 FlashAttention-3": 9.1e-3,
    "FP8 FA3, no block quantisation": 9.3e-3,
    "FP8 FA3, no incoherent processing": 2.4e-2,
}
"""Shah et al. 2024, Table 3: RMSE against FP64. A study's scenarios state which row they stand for."""
_FACTOR = 1.5  # between a measured RMSE and the published one, whose N and d are not given


def weigh_table3(rows: pd.DataFrame) -> Evidence:
    """Every RMSE within a factor 1.5 of the published one, and every two rows in the published order, by their intervals.

    The published values have no intervals, and two of them are 2 % apart: an order that the replicates cannot tell is undecided.
    """
    each = {name: _rmse(rows, name) for name in FA3_RMSE}
    ratios = {name: ratio(one["value"], [FA3_RMSE[name]] * len(one), one.index, one["cluster"]) for name, one in each.items()}
    order = sorted(FA3_RMSE, key=lambda name: -FA3_RMSE[name])
    pairs = [over(each[a], each[b]) for a, b in combinations(order, 2) if FA3_RMSE[a] > FA3_RMSE[b]]
    region = about(1.0, _FACTOR)
    close = sum(region.verdict(times) is Verdict.HOLDS for times in ratios.values())
    ways = [ABOVE.verdict(pair) for pair in pairs]
    right, wrong, neither = (ways.count(way) for way in (Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED))
    sentence = (
        f"Measured over published: {', '.join(f'{name} {times.text()}' for name, times in ratios.items())}. "
        f"Of {len(pairs)} pairs the interval of {right} is in the published order, of {wrong} in the other, and of {neither} in "
        "neither."
    )
    figure = f"{close} of {len(ratios)} within {_FACTOR:g}, {right} of {len(pairs)} pairs in order"
    questions = [*(Question(times, region) for times in ratios.values()), *(Question(pair, ABOVE) for pair in pairs)]
    return Evidence(figure, sentence, tuple(questions))


def _rmse(rows: pd.DataFrame, method: str) -> pd.DataFrame:
    """The RMSE from golden of each replicate of the scenario that stands for one row of the published table."""
    return per_replicate(select(rows, reference="golden", **{STANDS_FOR: method}), EVERY)


def draw_table3(rows: pd.DataFrame) -> Figure:
    """RMSE against FP64 of each method with its 95 % interval, the published figure, and a factor 1.5 around that."""
    figure = Figure(figsize=(PAGE * 0.75, 2.6), layout="constrained")
    axes = figure.add_subplot()
    look: dict[str, Any] = {"marker": "D", "markerfacecolor": "white", "color": GREY, "linestyle": "", "markersize": 5}
    for place, (name, published) in enumerate(FA3_RMSE.items()):
        axes.barh(place, published * _FACTOR - published / _FACTOR, 0.6, left=published / _FACTOR, color=PALE, zorder=0)
        axes.plot(published, place, **look)
        value = value_of(lambda method: typical(*(_rmse(rows, method)[column].tolist() for column in ("value", "cluster"))), name)
        if value is None:
            axes.annotate("not measured", (published, place), (8, 0), color=GREY, **BESIDE)
            continue
        bar(axes, place, value, TILED, markersize=4.5)
        right = max(highest(value), published * _FACTOR)
        axes.annotate(significant(value.estimate), (right, place), (6, 0), color=TILED, **BESIDE)
    keys = {"measured, 95 % interval": Line2D([], [], color=TILED, marker="o"), "published": Line2D([], [], **look)}
    legend(figure, keys | {"published ×/÷ 1.5": Patch(color=PALE)}, 3)
    axes.set_xscale("log")
    axes.set_xlim(axes.dataLim.x0 / 1.4, axes.dataLim.x1 * 3)  # room for the figures on the right
    axes.set_yticks(range(len(FA3_RMSE)), list(FA3_RMSE))
    axes.invert_yaxis()
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    axes.set_xlabel("RMSE of O against FP64, absolute")
    return figure
