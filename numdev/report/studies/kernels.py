"""What the emulation predicts of kernels, and FlashAttention-3's Table 3."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

import pandas as pd
from matplotlib.figure import Figure

from numdev.report.claims.evidence import EVERY, mean_of, over, over_baseline, per_replicate, select, the_entry
from numdev.report.claims.verdicts import ABOVE, Evidence, Question, Region, Undecidable, Verdict, about
from numdev.report.figures.plot import draw
from numdev.report.reading.frames import ENTRY_ROLE, LABEL, STANDS_FOR
from numdev.report.statistics import Interval, ratio, significant
from numdev.report.studies import TEXTS
from numdev.report.studies.attention import SAME_INPUTS, SYMBOLS, of_output
from numdev.results.store import EntryRole

KERNEL, ROLE = f"{LABEL}kernel", f"{ENTRY_ROLE}kernel"


def kernels(rows: pd.DataFrame) -> dict[str, EntryRole]:
    """The entries of the axis `kernel`, in the order of the study, with the role that the study declares of each."""
    if KERNEL not in rows:
        return {}
    own = rows.reindex(columns=[KERNEL, ROLE]).dropna(subset=KERNEL).drop_duplicates()
    return {str(name): EntryRole.SUBJECT if pd.isna(role) else EntryRole(role) for name, role in own.itertuples(index=False)}


_MOST = 0.5  # a distance from the emulation below this share of the emulation's own error: most of the error is predicted
_SIZE = 1.1  # the size of the error is predicted if it is right within a factor of this
_LARGEST = "max_u"  # an ulp of its own would tell of elements that cancel to zero in one order of summation


@dataclass(frozen=True)
class Agreement:
    """How well the emulation predicts one kernel."""

    # RMSE between kernel and emulation over that of the emulation from golden of the same inputs, by replicate in `shares`
    distance: Interval
    size: Interval  # RMSE of the kernel from golden over that of the emulation
    # Share of elements that are equal to the bit; `largest` is the largest distance of one, in units of `u max |r|`
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
    each = {n.replace("_", " "): {output: Agreement.of(own, n) for output, own in of_each.items()} for n in names}

    def listed(own: dict[str, Agreement]) -> str:
        return ", ".join(f"{output} {one.text(whole=not several)}".strip() for output, one in own.items())

    head = TEXTS["agreement"]["gradients" if several else "output"]
    rounded = f"gradients, rounded once, are at {listed(exact)}" if several else ""
    rounded = rounded or f"attention, rounded once, is at a distance of {exact[''].distance.text()}"
    sentence = f"{head}: {'; '.join(f'{name} {listed(own)}' for name, own in each.items())}. Exact {rounded}."
    worst = max((one.distance for own in each.values() for one in own.values()), key=lambda distance: distance.estimate)
    kernel = f"{len(each)} kernel{'s' * (len(each) != 1)}"
    questions = tuple(q for own in each.values() for output, one in own.items() for q in one.questions(exact[output]))
    return Evidence(f"{kernel}, at most {significant(worst.estimate)} of the error not predicted", sentence, questions)


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
    of_method = {name: select(rows, reference="golden", **{STANDS_FOR: name}) for name in FA3_RMSE}
    each = {name: per_replicate(own, EVERY) for name, own in of_method.items()}
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


def draw_table3(rows: pd.DataFrame) -> Figure:
    """RMSE against FP64 of each method over the published one, with a factor 1.5 around that."""
    text = "", "RMSE of O against FP64, measured / published (grey: within a factor of 1.5)"
    own = rows.assign(rmse=rows[EVERY] / rows[STANDS_FOR].map(FA3_RMSE))
    return draw(own, x=STANDS_FOR, y={"RMSE": EVERY}, text=text, facet=[], at={1: ""}, band=(1 / _FACTOR, _FACTOR))
