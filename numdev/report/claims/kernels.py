"""The tests behind the claims on real kernels: the emulation predicts them, and they keep FP32 inside."""

from __future__ import annotations

from dataclasses import dataclass

import pandas as pd

from numdev.report.claims.evidence import clustered, over_baseline, per_replicate
from numdev.report.claims.finding import Evidence, Question, Region, Undecidable, about, select
from numdev.report.reading.scenarios import ENTRY_ROLE
from numdev.report.statistics.estimates import Interval, mean, ratio, significant
from numdev.results.scenario import EntryRole

KERNEL, ROLE = "label.kernel", f"{ENTRY_ROLE}kernel"
METRIC = "rmse"  # over all elements: what the order of a sum does to one of them is chance
LARGEST = "max_u"  # an ulp of its own would tell of elements that cancel to zero in one order of summation
SMALL = 0.5  # a distance from the emulation below this share of the emulation's own error: most of the error is predicted
SIZE = 1.1  # the size of the error is predicted if it is right within a factor of this
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


def kernels(rows: pd.DataFrame) -> dict[str, EntryRole]:
    """What was measured along the axis `kernel`, in the order of the study, with the role that the study declares of each."""
    if KERNEL not in rows:
        return {}
    found = rows.reindex(columns=[KERNEL, ROLE]).dropna(subset=KERNEL).drop_duplicates()
    return {str(name): EntryRole.SUBJECT if pd.isna(role) else EntryRole(role) for name, role in found.itertuples(index=False)}


def subjects(rows: pd.DataFrame) -> list[str]:
    """The kernels of which the claims speak.

    Raises:
        Undecidable: if none was measured.
    """
    found = [name for name, role in kernels(rows).items() if role is EntryRole.SUBJECT]
    if not found:
        raise Undecidable("no kernel could be measured here")
    return found


def the(rows: pd.DataFrame, role: EntryRole) -> str:
    """The one entry that the study declares to have a role.

    Raises:
        Undecidable: if none was measured, or several.
    """
    found = [name for name, own in kernels(rows).items() if own is role]
    if len(found) != 1:
        told = ", ".join(found) or "none"
        raise Undecidable(f"the claim needs one kernel with the role {role.value} in the study, and there is {told}")
    return found[0]


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
    names = subjects(rows)
    control = agreement(rows, the(rows, EntryRole.CONTROL))
    found = {name: agreement(rows, name) for name in names}
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
    """Every fused kernel deviates from golden as much as `kernel(F)`, the expected entry, does.

    That says something of `uniform(F)`, the control, only if it deviates more, which is a condition.
    """
    names, like = subjects(rows), the(rows, EntryRole.EXPECTED)
    times = {name: over_policy(rows, name, like) for name in names}
    strict = over_policy(rows, the(rows, EntryRole.CONTROL), like)
    near = tuple(Question(t, about(1.0, NEAR)) for t in times.values())
    questions = (*near, Question(strict, Region(low=NEAR), is_condition=True))
    told = ", ".join(f"{name.replace('_', ' ')} {t.text()}" for name, t in times.items())
    low, high = min(t.estimate for t in times.values()), max(t.estimate for t in times.values())
    uniform = significant(strict.estimate)
    figure = f"{significant(low, 3)} to {significant(high, 3)} times kernel(F), uniform(F) {uniform} times"
    return Evidence(figure, f"RMSE from golden over that of kernel(F): {told}; uniform(F) {strict.text()}.", questions)
