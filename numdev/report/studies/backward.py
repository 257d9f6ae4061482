"""Studies of the backward pass: which step makes the error, the direction of the gradients' errors, and the signed bias of delta.

Errors of independent roundings add up in squares. So the share of a step is what its format changes in the squared RMSE from
golden, over what the format of all steps changes; to the first order the shares of all steps add up to 1.

A gradient is added to weights step after step: errors of random directions cancel, one that keeps its direction does not.
`delta = rowsum(dO * O)` enters every element of dS; its bias is the mean of `sign(delta) D` over the mean of `|delta|`, in units
of u: it would be 1 if every element of O were off by u away from zero.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass
from itertools import product, takewhile
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from scipy.special import beta

from numdev.arithmetic.formats import Format
from numdev.report.claims.evidence import EVERY, by_format, left_out, mean_of, over, per_replicate, select
from numdev.report.claims.verdicts import ALIKE, LARGER, Evidence, Question, Region, Undecidable
from numdev.report.figures.marks import no_figure
from numdev.report.figures.plot import draw
from numdev.report.figures.theme import FP32_INSIDE, TILED
from numdev.report.reading.frames import ENTRY_ROLE, FORMATS, LABEL, SCENARIO, TITLE, of_scenario, ordered
from numdev.report.statistics import Interval, mean, ratio, significant
from numdev.report.studies.attention import SAME_INPUTS, SYMBOLS, of_output
from numdev.results.store import EntryRole

GRADIENTS = ("dq", "dk", "dv")
_STEP, _ROLE = f"{LABEL}step", f"{ENTRY_ROLE}step"
_FIXED = ("inputs", "output")
"""Steps whose format is that of the tensors, so that a kernel has no choice."""
_MOST = Region(low=0.5)  # of the squared error: more than all other steps together, to the first order


@dataclass(frozen=True)
class Shares:
    """The share of each step in one output, one scenario, each step alone in the low format (`adds`) or in the high one.

    `total` is the square root of the sum of all shares: the RMSE that they predict over that of all steps.
    """

    adds: bool
    by_seed: pd.DataFrame  # a column for each step
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
    each = pd.DataFrame({name: (_squares(own[own[_STEP] == name])["value"] - none["value"]) / span for name in steps})
    summed = each.sum(axis=1).clip(lower=0.0)
    total = ratio(np.sqrt(summed), np.ones(len(summed)), summed.index, none["cluster"])
    clusters = none["cluster"].tolist()
    by_step = {str(name): mean(one.tolist(), one.index.tolist(), clusters) for name, one in each.items()}
    return Shares(bool((span > 0).all()), each, by_step, total)


def _squares(rows: pd.DataFrame) -> pd.DataFrame:
    """The squared RMSE from golden by replicate; the rounding of the inputs counts."""
    values = per_replicate(select(rows, reference="golden"), EVERY)
    return values.assign(value=values["value"] ** 2)


def _outputs(rows: pd.DataFrame) -> list[str]:
    """The gradients, or the primary output of an operation that has none."""
    own: list[str] = rows["output"][rows["primary"].astype(bool)].unique().tolist()
    return [name for name in GRADIENTS if (rows["output"] == name).any()] or own


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
    listed = []
    for name, one in each.items():
        largest = sorted(one.by_step.items(), key=lambda item: -item[1].estimate)[:4]
        listed.append(f"{name}: {', '.join(f'{_words(step)} {significant(share.estimate)}' for step, share in largest)}")
    return Evidence(figure, f"The largest shares: {'; '.join(listed)}.", tuple(Question(one, _MOST) for one in chief.values()))


def _words(step: str) -> str:
    return step.replace("_", " ")


def draw_attribution(rows: pd.DataFrame) -> Figure:
    """The share of each step, a panel for each problem and output, the largest shares on top."""
    tables = []
    for output, (_, own) in product(_outputs(rows), rows.groupby("pairing", sort=False)):
        for _, each in own.groupby(SCENARIO, sort=False):
            with suppress(Undecidable):
                one = shares(each, output)
                table = one.by_seed.rename(columns=_words).rename_axis("seed").reset_index()
                table = table.melt("seed", var_name="step", value_name="share").dropna()
                words = "alone in the low format: adds" if one.adds else "alone in the high format: removes"
                tables.append(table.assign(of=f"{SYMBOLS.get(output, output)}, {_title(own)}", change=words))
    if not tables:
        return no_figure("no step was measured alone")
    largest = pd.concat(tables).groupby("step")["share"].mean().sort_values(ascending=False)
    table = pd.concat(tables).sort_values("step", key=lambda steps: steps.map(list(largest.index).index), kind="stable")
    text = "", "share of the squared RMSE from golden that all steps make together"
    return draw(table, x="step", y={"share": "share"}, colour=["change"], facet=["of"], text=text, at={0: ""})


def _title(rows: pd.DataFrame) -> str:
    """The parts, between commas, that the titles of a problem's scenarios have in common."""
    parts = [str(title).split(", ") for title in rows[TITLE].unique()]
    same = list(takewhile(lambda each: len(set(each)) == 1, zip(*parts, strict=False)))
    return ", ".join(each[0] for each in same) or ", ".join(parts[0])


_SHARE, _STAYS = "top_share", "step_alignment"


def weigh_direction(rows: pd.DataFrame) -> Evidence:
    """The top singular vector of every gradient's error stays from one draw of the inputs to the next, more than by chance."""

    def judge(own: pd.DataFrame) -> Evidence:
        each = {SYMBOLS[name]: select(of_output(own, name), reference=SAME_INPUTS) for name in GRADIENTS}
        times = {name: _alignment(one) for name, one in each.items()}
        figure = ", ".join(f"{name} {value.text()}" for name, value in times.items())
        shares = ", ".join(f"{name} {_mean(one, _SHARE).text()}" for name, one in each.items())
        sentence = (
            f"the |cosine| of the top singular vector with that of the seed before, over that of chance, is {figure}; "
            f"the share of the error's energy in that vector is {shares}.{left_out(*times.values())}"
        )
        return Evidence(f"{figure} times chance", sentence, tuple(Question(value, LARGER) for value in times.values()))

    return by_format(rows, judge)


def _alignment(rows: pd.DataFrame) -> Interval:
    """The alignment of the error's top singular vector with that of the seed before, over what it is by chance."""
    own = rows.dropna(subset=_STAYS)
    if own.empty:
        raise Undecidable("the direction of an error is compared between seeds, and there is one")
    values = per_replicate(own.assign(times=own[_STAYS] / own["problem.shape.head_dim"].map(by_chance)), "times")
    return ratio(values["value"], [1.0] * len(values), values.index, values["cluster"])


def by_chance(dim: int) -> float:
    """The mean |cosine| of a random unit vector of so many numbers with any other: `Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))`."""
    return float(beta(dim / 2, 0.5)) / math.pi


def _mean(rows: pd.DataFrame, metric: str) -> Interval:
    return mean_of(per_replicate(rows.dropna(subset=metric), metric))


LEAST = 0.025
"""Of u. If half of the sums of P V are halfway cases, as sums of two numbers with one exponent are, and all of these are rounded
to one side, by u / 2 at least, then O is off by u / 4 at least on average. Below a tenth of that there is no bias."""
_FORM, _READ = "variant.recompute.delta", "variant.recompute.output"
_ACCUMULATES = ("variant.forward.precision.values", "variant.forward.precision.accumulator")
_WIDE = ("fp32", "fp64")


class Made(NamedTuple):
    """How delta is made: F, whether O is accumulated in FP32 or FP64, `DeltaForm` and `OutputForDelta`."""

    fmt: str
    wide: bool
    form: str
    read: str

    @property
    def text(self) -> str:
        """For a reader."""
        form = f"dO·O, O {'before' if self.read == 'unrounded' else 'after'} its cast" if self.form == "output" else "dP·P"
        return f"{self.fmt}, PV in {'FP32' if self.wide else self.fmt}: {form}"


def ways(rows: pd.DataFrame) -> dict[Made, pd.DataFrame]:
    """The rows of delta by how it is made, with `bias` in units of u of the study's format and relative to the mean |delta|."""
    own = of_output(rows, "delta")
    lacking = [name for name in (_FORM, _READ, *_ACCUMULATES) if name not in own]
    if lacking:
        raise Undecidable(f"the points do not say {', '.join(lacking)}")
    units = own["format"].map({name: Format.parse(name).u for name in own["format"].unique()}).astype(float)
    size = (own["mean_absolute"] / own["relative_l1"]).where(own["relative_l1"] > 0, 1.0)  # mean |delta|
    wide = own[list(_ACCUMULATES)].apply(lambda each: each.str.partition("@")[0].isin(_WIDE)).all(axis=1)
    grouped = own.assign(bias=own["bias"] / size / units, wide=wide).groupby(["format", "wide", _FORM, _READ], sort=False)
    each = {Made(str(fmt), bool(wide), str(form), str(read)): group for (fmt, wide, form, read), group in grouped}
    return dict(sorted(each.items(), key=lambda item: (FORMATS.index(item[0].fmt), *item[0][1:])))


def _judged(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without those that the study declares to be controls."""
    roles = [name for name in rows if str(name).startswith(ENTRY_ROLE)]
    return rows[~(rows[roles] == EntryRole.CONTROL.value).any(axis=1)]


def weigh_bias(rows: pd.DataFrame, *, wide: bool) -> Evidence:
    """Delta from O is biased away from zero where P V is rounded tile by tile, and not biased where O is accumulated in FP32."""

    def judge(own: pd.DataFrame) -> Evidence:
        chosen = {made: of for made, of in ways(own).items() if made.wide == wide and made.form == "output"}
        each = {made: _mean(select(of, reference=SAME_INPUTS), "bias") for made, of in chosen.items()}
        if not each:
            raise Undecidable(f"nothing was measured with O accumulated in {'FP32' if wide else 'a low format'}")
        listed = "; ".join(f"{value.text()} u with {made.text}" for made, value in each.items())
        region = Region(-LEAST, LEAST) if wide else Region(low=LEAST)
        questions = tuple(Question(value, region) for value in each.values())
        return Evidence(
            ", ".join(f"{value.text()} u" for value in each.values()), f"the signed bias of delta is {listed}.", questions
        )

    return by_format(_judged(rows), judge)


def weigh_delta_forms(rows: pd.DataFrame) -> Evidence:
    """With O accumulated in FP32, delta computed from the rounded O is farther from the exact one than delta computed from P."""

    def judge(own: pd.DataFrame) -> Evidence:
        each = {made: of for made, of in ways(own).items() if made.wide}
        rounded = [of for made, of in each.items() if made.form == "output" and made.read == "rounded"]
        recomputed = [of for made, of in each.items() if made.form != "output"]
        if not (rounded and recomputed):
            raise Undecidable("it compares delta from the rounded O with delta from P, both with O accumulated in FP32")
        times = over(*(per_replicate(select(of, reference=SAME_INPUTS), EVERY) for of in (rounded[0], recomputed[0])))
        sentence = f"the RMSE of delta computed from the rounded O is {times.text()} times that of delta computed from P."
        return Evidence(times.text(), sentence + left_out(times), (Question(times, LARGER),))

    return by_format(_judged(rows), judge)


def draw_delta(rows: pd.DataFrame) -> Figure:
    """The signed bias of delta, a row for each way to make it, a panel for each scenario."""
    tables = [
        here.assign(way=made.text, accumulates="FP32" if made.wide else "the low format")
        for scenario in ordered(rows)
        for made, here in ways(of_scenario(rows, scenario)).items()
    ]
    text = "", f"signed bias of delta in u: mean of sign(delta) D / mean |delta|; grey: within {LEAST:g} u"
    look: dict[str, Any] = {"colour": ["accumulates"], "shades": {"FP32": FP32_INSIDE, "the low format": TILED}}
    look |= {"reference": SAME_INPUTS, "at": {0: ""}, "band": (-LEAST, LEAST), "text": text}
    return draw(pd.concat(tables), x="way", y={"bias": "delta.bias"}, **look)
