"""The tests behind the claims on real kernels: the emulation predicts them, and they keep FP32 inside."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from numdev.report.claims.evidence import clustered, over_baseline, per_replicate
from numdev.report.claims.finding import Evidence, Question, Region, Undecidable, about, select
from numdev.report.statistics.estimates import Interval, mean, ratio, significant

KERNEL = "label.kernel"
METRIC = "rmse"  # over all elements: what the order of a sum does to one of them is chance
LARGEST = "max_u"  # an ulp of its own would tell of elements that cancel to zero in one order of summation
SMALL = 0.5  # a distance from the emulation below this share of the emulation's own error: most of the error is predicted
SIZE = 1.1  # the size of the error is predicted if it is right within a factor of this
UNIFORM, INSIDE = "uniform_bf16", "kernel_bf16"  # the emulated policies of the study, by label
CONTROL = "exact_rounded"  # golden rounded once: it errs as little as can be, and not as any kernel does
UNFUSED = ("vanilla", "sdpa_math")  # scores in memory: no kernel of which the claim speaks
NEAR = 1.25  # an RMSE within this factor of kernel(F)'s is kernel(F)'s


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
        return Question(self.distance, Region(high=SMALL)), nearer, Question(self.size, about(1.0, SIZE))

    def text(self) -> str:
        parts = (significant(self.distance.estimate), f"{100 * self.equal.estimate:.1f} %", significant(self.largest))
        return f"{', '.join(parts)}, {self.size.text()}"


def kernels(rows: pd.DataFrame) -> list[str]:
    """The kernels that ran, in the order of the study, the control among them.

    Raises:
        Undecidable: if none did.
    """
    found = [str(name) for name in rows[KERNEL].dropna().unique()] if KERNEL in rows else []
    if not set(found) - {CONTROL}:
        raise Undecidable("no kernel could be measured here")
    return found


def agreement(rows: pd.DataFrame, name: str) -> Agreement:
    """Of one kernel, over everything else that the rows vary, paired by point and seed."""
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


def validate(rows: pd.DataFrame) -> Evidence:
    """For every kernel most of the arithmetic error is predicted element by element, and the size of the total error is."""
    names = kernels(rows)
    if CONTROL not in names:
        raise Undecidable("without its control, exact attention rounded once, nearness to the emulation says little")
    control = agreement(rows, CONTROL)
    found = {name: agreement(rows, name) for name in names if name != CONTROL}
    told = "; ".join(f"{name.replace('_', ' ')} {a.text()}" for name, a in found.items())
    worst = max(found.values(), key=lambda a: a.distance.estimate).distance
    counted = "1 kernel" if len(found) == 1 else f"{len(found)} kernels"
    figure = f"{counted}, at most {significant(worst.estimate)} of the error unpredicted"
    note = (
        "Distance from the emulation over the emulation's own error, share of elements that are equal, largest distance in "
        f"u max |r|, error over the emulation's: {told}. "
        f"Exact attention, rounded once, is at a distance of {control.distance.text()}."
    )
    return Evidence(figure, note, tuple(question for a in found.values() for question in a.questions(control)))


def over_policy(rows: pd.DataFrame, name: str, policy: str) -> Interval:
    """The RMSE of a kernel from golden over that of an emulated policy, paired by problem and seed."""
    own, other = (clustered(select(rows, "variant", "golden", **{KERNEL: which})) for which in (name, policy))
    columns = ["pairing", "seed", METRIC]
    pairs = own[[*columns, "cluster"]].merge(other[columns], on=["pairing", "seed"], suffixes=("", "_policy"))
    return ratio(pairs[METRIC], pairs[f"{METRIC}_policy"], pairs["seed"], pairs["cluster"])


def inside(rows: pd.DataFrame) -> Evidence:
    """Every fused kernel deviates from golden as much as `kernel(F)` does.

    That says something of `uniform(F)` only if it deviates more, which is a condition.
    """
    names = [name for name in kernels(rows) if name not in (UNIFORM, INSIDE, *UNFUSED)]
    if not names:
        raise Undecidable("no kernel could be measured here")
    times = {name: over_policy(rows, name, INSIDE) for name in names}
    strict = over_policy(rows, UNIFORM, INSIDE)
    near = tuple(Question(t, about(1.0, NEAR)) for t in times.values())
    questions = (*near, Question(strict, Region(low=NEAR), is_condition=True))
    told = ", ".join(f"{name.replace('_', ' ')} {t.text()}" for name, t in times.items())
    low, high = min(t.estimate for t in times.values()), max(t.estimate for t in times.values())
    uniform = significant(strict.estimate)
    figure = f"{significant(low, 3)} to {significant(high, 3)} times kernel(F), uniform(F) {uniform} times"
    return Evidence(figure, f"RMSE from golden over that of kernel(F): {told}; uniform(F) {strict.text()}.", questions)
