"""Studies with a row for each kernel, policy or method.

They show which precision policy kernels follow, what the emulation predicts of them, whether tiled attention is better than the
baseline, and FlashAttention-3's Table 3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations, product
from typing import Any

import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from numdev.report.claims.evidence import DEVIATION, EVERY, mean_of, over, over_baseline, per_replicate, select, the_entry
from numdev.report.claims.verdicts import ABOVE, Evidence, Question, Region, Undecidable, Verdict, about
from numdev.report.figures import marks
from numdev.report.figures.theme import BLACK, FP32_INSIDE, GREY, OUTPUT_COLOURS, PAGE, PALE, TILED, colour
from numdev.report.reading.scenarios import ENTRY_ROLE, LABEL, STANDS_FOR, compared, formats, of, ordered
from numdev.report.statistics import Interval, ratio, significant, typical
from numdev.report.studies import TEXTS
from numdev.report.studies.attention import FIG4_RATIO, SAME_INPUTS, SYMBOLS, of_output
from numdev.results.manifest import EntryRole

KERNEL, ROLE = f"{LABEL}kernel", f"{ENTRY_ROLE}kernel"
_SHADES = {EntryRole.CONTROL: TILED, EntryRole.EXPECTED: FP32_INSIDE, EntryRole.SUBJECT: BLACK, EntryRole.ASIDE: GREY}


def kernels(rows: pd.DataFrame) -> dict[str, EntryRole]:
    """The entries of the axis `kernel`, in the order of the study, with the role that the study declares of each."""
    if KERNEL not in rows:
        return {}
    own = rows.reindex(columns=[KERNEL, ROLE]).dropna(subset=KERNEL).drop_duplicates()
    return {str(name): EntryRole.SUBJECT if pd.isna(role) else EntryRole(role) for name, role in own.itertuples(index=False)}


def _readable(name: str) -> str:
    return name.replace("_", " ")


def draw_kernels(rows: pd.DataFrame) -> Figure:
    """RMSE of each kernel from golden, between the emulated policies `kernel(F)` and `uniform(F)`."""
    names, fmt = kernels(rows), formats(rows)[0].upper()
    policy = {EntryRole.CONTROL: f"every step in {fmt}", EntryRole.EXPECTED: f"kernel({fmt}), emulated"}

    def dots(own: pd.DataFrame) -> Iterator[marks.Dot]:
        of_golden = compared(own, reference="golden")
        for place, (name, role) in enumerate(names.items()):
            value = marks.replicates(of_golden[of_golden[KERNEL] == name], EVERY)
            yield marks.Dot(place, value, _SHADES[role], look={"marker": "D" if role in policy else "o"})

    shown = [policy.get(role, _readable(name)) for name, role in names.items()]
    return marks.rows_by_scenario(rows, shown, dots, "RMSE of O from golden, absolute (diamonds: emulated policies)", room=0.0)


_MOST = 0.5  # a distance from the emulation below this share of the emulation's own error: most of the error is predicted
_SIZE = 1.1  # the size of the error is predicted if it is right within a factor of this
_LARGEST = "max_u"  # an ulp of its own would tell of elements that cancel to zero in one order of summation


@dataclass(frozen=True)
class Agreement:
    """How well the emulation predicts one kernel.

    Attributes:
        distance: RMSE between kernel and emulation over that of the emulation from golden of the same inputs, by replicate in
            `shares`.
        size: RMSE of the kernel from golden over that of the emulation.
        equal: share of elements that are equal to the bit; `largest` is the largest distance of one, in units of `u max |r|`.
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


def weigh_validate(rows: pd.DataFrame, outputs: Sequence[str] = ()) -> Evidence:
    """Of every kernel most of the arithmetic error of each output is predicted element by element, and the size of the total."""
    control, several = the_entry(rows, "kernel", EntryRole.CONTROL), bool(outputs)
    of_each = {SYMBOLS[name]: of_output(rows, name) for name in outputs} or {"": rows}
    exact = {output: Agreement.of(own, control) for output, own in of_each.items()}
    names = [name for name, role in kernels(rows).items() if role is EntryRole.SUBJECT]
    if not names:
        raise Undecidable("no kernel could be measured here")
    each = {name: {output: Agreement.of(own, name) for output, own in of_each.items()} for name in names}

    def listed(own: dict[str, Agreement]) -> str:
        return ", ".join(f"{output} {one.text(whole=not several)}".strip() for output, one in own.items())

    head = TEXTS["agreement"]["gradients" if several else "output"]
    rounded = f"gradients, rounded once, are at {listed(exact)}" if several else ""
    rounded = rounded or f"attention, rounded once, is at a distance of {exact[''].distance.text()}"
    sentence = f"{head}: {'; '.join(f'{_readable(name)} {listed(own)}' for name, own in each.items())}. Exact {rounded}."
    worst = max((one.distance for own in each.values() for one in own.values()), key=lambda distance: distance.estimate)
    kernel = f"{len(each)} kernel{'s' * (len(each) != 1)}"
    questions = tuple(q for own in each.values() for output, one in own.items() for q in one.questions(exact[output]))
    return Evidence(f"{kernel}, at most {significant(worst.estimate)} of the error not predicted", sentence, questions)


_MARKERS = ("o", "s", "^", "D")  # of formats, the narrowest first
_SHOWN = 1e-3  # what is smaller is told in words: one element that differs would stretch the axis over many decades


def draw_validate(rows: pd.DataFrame, outputs: Sequence[str] = ()) -> Figure:
    """RMSE between kernel and emulation over the emulation's own arithmetic error, for each format and output.

    Left of 1 its error is predicted, 0 is bit-equal.
    """
    names, fmts = kernels(rows), formats(rows)
    lines = [name for name in outputs if (rows["output"] == name).any()] or [""]

    def dots(panel: pd.DataFrame) -> Iterator[marks.Dot]:
        for place, (name, role) in enumerate(names.items()):
            for i, output in enumerate(lines):
                for j, fmt in enumerate(fmts):
                    try:
                        own = of_output(panel, output) if output else panel
                        one = Agreement.of(own[own["format"] == fmt], name)
                    except Undecidable:
                        continue
                    shade = OUTPUT_COLOURS[output] if output else GREY if role is EntryRole.CONTROL else colour(fmt)
                    at = place + 0.26 * (i - (len(lines) - 1) / 2) + (0.08 if output else 0.42) * (j - (len(fmts) - 1) / 2)
                    is_small = one.distance.estimate < _SHOWN
                    words = "bit-equal" if one.distance.estimate == 0 else f"below {_SHOWN}"
                    text = "" if output else f"{100 * one.equal.estimate:.1f} %"
                    look = {"marker": _MARKERS[j % 4] if output else "o", "markersize": 3 if output else 3.5}
                    yield marks.Dot(at, None if is_small else one.distance, shade, text, words, look, f"{output} {fmt}".strip())

    shown = ["control: exact" if role is EntryRole.CONTROL else _readable(name) for name, role in names.items()]
    text = "RMSE between kernel and emulation over that of the emulation from golden"
    keys = {f"{fmt}, with the share of equal elements": marks.swatch(colour(fmt)) for fmt in fmts}
    if outputs:
        keys = {SYMBOLS[name]: marks.swatch(OUTPUT_COLOURS[name]) for name in outputs if name in lines}
        keys |= {fmt: marks.swatch(GREY, _MARKERS[j % 4]) for j, fmt in enumerate(fmts)}
    return marks.rows_by_scenario(rows, shown, dots, text, keys=keys, row=0.42, at={1: "", _MOST: ""})


_FA3_RATIO = 1.0 / 1.7
"""Shah et al. 2024 (FlashAttention-3), section 4.3: FP16 RMSE of FlashAttention-2 and -3 over the baseline's."""
_POLICIES = {"uniform": ("every step in F", TILED), "kernel": ("FP32 inside", FP32_INSIDE)}


def draw_sign(rows: pd.DataFrame) -> Figure:
    """The variant's deviation from golden over the baseline's, by precision policy: right of 1 is worse."""
    names, dots = list[str](), list[marks.Dot]()
    for scenario, fmt, (policy, (words, shade)) in product(ordered(rows), formats(rows), _POLICIES.items()):
        own = of(rows, scenario)
        own = own[(own["format"] == fmt) & (own["policy"] == policy)]
        largest, root = (marks.measured(over_baseline, own, metric) for metric in (DEVIATION, EVERY))
        if largest is not None and root is not None:
            dots.append(marks.Dot(len(names) - 0.15, largest, shade, significant(largest.estimate), name="max difference"))
            dots.append(marks.Dot(len(names) + 0.15, root, shade, look=marks.OPEN, name="RMSE"))
            names.append(f"{scenario.title}: {fmt}, {words}")
    figure = marks.page(1.1 + 0.26 * max(len(names), 1))
    axes = figure.add_subplot()
    papers = {FIG4_RATIO: "Golden et al.: 10", _FA3_RATIO: "FlashAttention-3: 1/1.7"}
    marks.draw_rows(axes, names, dots, at={**papers, 1: ""}, room=0.1)
    axes.set_xlabel(
        "deviation of tiled attention from golden / that of the baseline\n(filled: max difference, open: RMSE; right of 1: worse)"
    )
    return figure


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
    figure = marks.page(2.6, PAGE * 0.75)
    axes, dots = figure.add_subplot(), list[marks.Dot]()
    look: dict[str, Any] = {"marker": "D", **marks.OPEN, "color": GREY, "linestyle": "", "markersize": 5}
    for place, (name, published) in enumerate(FA3_RMSE.items()):
        axes.barh(place, published * _FACTOR - published / _FACTOR, 0.6, left=published / _FACTOR, color=PALE, zorder=0)
        axes.plot(published, place, label="published", **look)
        value = marks.measured(
            lambda method: typical(*(_rmse(rows, method)[column].tolist() for column in ("value", "cluster"))), name
        )
        dots.append(marks.Dot(place, value, TILED, "" if value is None else significant(value.estimate), name="measured"))
    marks.draw_rows(axes, list(FA3_RMSE), dots)
    known = [marks.highest(dot.value) for dot in dots if dot.value is not None]
    axes.set_xlim(min(FA3_RMSE.values()) / 3, 3 * max(*known, *FA3_RMSE.values()))
    keys = {"measured, 95 % interval": marks.swatch(TILED, linestyle="-"), "published": marks.swatch(GREY, **look)}
    marks.legend(figure, keys | {"published ×/÷ 1.5": Patch(color=PALE)}, 3)
    axes.set_xlabel("RMSE of O against FP64, absolute")
    return figure
