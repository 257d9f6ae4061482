"""Training runs beside their references: in what each differs, how far its weights go, claims on them, and Figures 7 and 8.

Every difference is that of a run from its reference, of all weights together, by replicate, by the Wasserstein distance as in the
source unless a claim says otherwise. Differences grow at rates of their own until they saturate, so a ratio at one step says
little of the next. A claim on a ratio has a horizon, the last part of the steps, and holds if the whole curve there lies in the
region: at each step that has weights.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from operator import attrgetter
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from numdev.report.claims.evidence import left_out
from numdev.report.claims.verdicts import (
    MARGIN,
    TREND,
    Evidence,
    NotMeasured,
    Question,
    Region,
    Undecidable,
    Verdict,
)
from numdev.report.figures import marks
from numdev.report.figures.plot import QUANTITY, draw
from numdev.report.figures.theme import BLACK, CHANGE_COLOURS, GREY, TILED
from numdev.report.reading.frames import ENTRY_ROLE, LABEL, RUN, SCENARIO, TITLE, WHOLE, Results, of_scenario, ordered
from numdev.report.statistics import Interval, mean, ratio, significant, slope, typical
from numdev.report.studies import operation_words
from numdev.results.store import EntryRole

WASSERSTEIN, LARGEST, SIZE = "wasserstein", "max_difference", "relative_frobenius"
METRICS = {WASSERSTEIN: "Wasserstein distance", LARGEST: "max difference", SIZE: "relative Frobenius norm"}
"""The metrics of a difference of weights, as a reader knows them."""
ACTS = 10.0
"""A control acts where the Wasserstein distance of all weights grows by more than this factor in every replicate.

It is the sum of all differences over the number of weights. While the forward pass sees nothing of a moved weight, that weight
alone differs and the distance stays what it was; ten times as much cannot be its own rounding.
"""


class Group(Enum):
    """In what a run differs from its reference: words, colour, the field that tells it, and its value where a record lacks it."""

    SHAM = "the reference again (sham)", GREY
    FLASH = "flash attention", TILED, "attention.type", "VanillaBackward"
    ULP = "one weight moved by one ulp", BLACK, "ulp", "0"
    INIT = "other initial weights", CHANGE_COLOURS["init"], "init", "0"
    ORDER = "other order of the data", CHANGE_COLOURS["order"], "order", "0"
    RANKS = "another number of processes", CHANGE_COLOURS["ranks"], "ranks", "1"
    RESTART = "stopped and resumed", CHANGE_COLOURS["restart"], "restart", "none"
    NOISE = "random errors of the size of flash attention's", CHANGE_COLOURS["noise"], "noise", "none"
    GOLDEN = "exact attention, from baseline attention", CHANGE_COLOURS["exact"]
    FROM_GOLDEN = "flash attention, from exact attention", CHANGE_COLOURS["from_exact"]
    FAULT = "another learning rate", CHANGE_COLOURS["fault"], "rate", "1"
    PRECISION = "lower precision than FP32", CHANGE_COLOURS["precision"], "numerics"
    OTHER = "several of these", CHANGE_COLOURS["several"]

    def __init__(self, words: str, shade: str, setting: str = "", usual: str = "") -> None:
        self.words, self.shade, self.setting, self.usual = words, shade, setting, usual


_EXACT = "RoundedBackward"
CONTROLS = (Group.ULP, Group.RANKS, Group.NOISE, Group.FAULT)


def group_of(row: Mapping[str, Any]) -> Group:
    """In what the run of a row differs: the sham in nothing, and what differs in several ways is of no other group.

    Random errors stand in place of the attention that they have the size of, and of dose 0 they are none.
    """
    differing, noise = list[Group](), _text(row, "variant.noise")
    for group in Group:
        if noise and (group is Group.FLASH or (group is Group.NOISE and float(noise) == 0)):
            continue
        own = _text(row, f"variant.{group.setting}") or group.usual
        if group.setting and own != (_text(row, f"baseline.{group.setting}") or group.usual or own):
            differing.append(group)
    if not differing:
        return Group.SHAM
    if differing == [Group.FLASH] and _EXACT in (
        kinds := [_text(row, f"{side}.attention.type") for side in ("variant", "baseline")]
    ):
        return Group.GOLDEN if kinds[0] == _EXACT else Group.FROM_GOLDEN
    return differing[0] if len(differing) == 1 else Group.OTHER


def _text(row: Mapping[str, Any], name: str) -> str:
    """A cell as text; empty where a row has none."""
    value = row.get(name)
    if value is None or pd.isna(value):
        return ""
    return f"{value:g}" if isinstance(value, (int, float)) else str(value)


def _first(rows: pd.DataFrame) -> dict[str, Any]:
    """The cells of the first row."""
    return {str(name): value for name, value in rows.head(1).to_dict("records")[0].items()}


@dataclass(frozen=True)
class Rung:
    """The runs of one point: every replicate of one difference from the reference, of all weights together."""

    name: str  # its labels in the study, no two alike in a scenario
    group: Group
    is_judged: bool  # whether claims speak of it, which a study may decline
    rows: pd.DataFrame
    end: int  # the last step of its scenario

    def has(self, setting: str, value: str) -> bool:
        """Whether a setting has a value in every run."""
        name = f"variant.{setting}"
        return name in self.rows and bool((self.rows[name] == value).all())

    @property
    def attention(self) -> tuple[str, ...]:
        """What its runs state of their attention: equal where it is the same."""
        cells = _first(self.rows)
        return tuple(_text(cells, name) for name in cells if name.startswith("variant.attention."))

    @property
    def dose(self) -> float:
        """That of random errors; NaN without."""
        return float(_text(_first(self.rows), "variant.noise") or math.nan)

    @property
    def trained(self) -> pd.DataFrame:
        """The rows after the first step."""
        return self.rows[self.rows["step"] > 0]

    def at(self, metric: str = WASSERSTEIN, step: int | None = None) -> pd.Series[float]:
        """A metric at one step, the last unless given, by replicate, but for runs that stopped before it.

        Raises:
            Undecidable: if none got there, or one holds NaN or Inf.
        """
        step = self.end if step is None else step
        here = self.rows[self.rows["step"] == step].set_index("seed")[metric].astype(float)
        if here.empty:
            raise Undecidable(f"{self.name}: no run reached step {step}")
        if not np.isfinite(here).all():
            raise Undecidable(f"{self.name}: {METRICS[metric]} is not finite at step {step}")
        return here

    def horizon(self, since: float, until: float = 1.0) -> list[int]:
        """The steps with weights from one share of all steps to another, the last of them at least."""
        own = sorted(
            {int(step) for step in self.trained["step"] if step <= until * self.end} | ({self.end} if until == 1 else set())
        )
        return [step for step in own if step >= since * self.end or step == own[-1]]

    def half_time(self) -> Interval:
        """The step at which the Wasserstein distance reaches half of that at the last step, between steps on log axes.

        A distance that grows in proportion to the steps gets there after half of them, and one that saturates sooner.
        """
        halves = []
        for _, run in self.trained.sort_values("step").groupby("seed"):
            own = run[run[WASSERSTEIN] > 0]
            if len(own) and own["step"].iloc[-1] == self.end:
                grown = np.maximum.accumulate(np.log(own[WASSERSTEIN].to_numpy(dtype=float)))
                half = math.log(0.5 * own[WASSERSTEIN].iloc[-1])
                halves.append(math.exp(np.interp(half, grown, np.log(own["step"].to_numpy(dtype=float)))))
        return typical(halves)

    def exponent(self, metric: str) -> Interval:
        """The exponent of the step in a metric, over all steps after the first."""
        return slope(self.trained["step"], self.trained[metric], self.trained["seed"])

    def rates(self) -> pd.Series[float]:
        """How much the Wasserstein distance grows per step, by replicate: the slope of a least-squares line through all steps."""
        own = {seed: run[["step", WASSERSTEIN]].dropna() for seed, run in self.rows.groupby("seed")}
        return pd.Series({seed: np.polyfit(run["step"], run[WASSERSTEIN], 1)[0] for seed, run in own.items() if len(run) > 1})


def over(above: pd.Series[float], *below: pd.Series[float]) -> Interval:
    """The ratio of a series to others, paired by replicate; pairs of one replicate are averaged."""
    pairs = pd.concat([pd.DataFrame({"above": above, "below": each}).dropna() for each in below])
    return ratio(pairs["above"], pairs["below"], pairs.index)


def rungs(rows: pd.DataFrame) -> list[Rung]:
    """The rungs of one scenario in the order of `Group`, of a table of weights the rows of all weights together.

    The labels of a point are its name, or the words of its group where it has none; names that are alike are numbered.
    """
    own = rows[rows["tensor"] == WHOLE] if "tensor" in rows else rows
    end = int(own["step"].max()) if "step" in own and len(own) else 0
    every = list[Rung]()
    for _, runs in own.groupby("key", sort=False):
        cells = _first(runs)
        group, labels = group_of(cells), [_text(cells, name) for name in cells if name.startswith(LABEL)]
        is_judged = EntryRole.ASIDE.value not in [_text(cells, name) for name in cells if name.startswith(ENTRY_ROLE)]
        every.append(Rung(", ".join(filter(None, labels)) or group.words, group, is_judged, runs, end))
    counts, seen = Counter(rung.name for rung in every), Counter[str]()
    for place, rung in enumerate(every):
        seen[rung.name] += 1
        every[place] = replace(rung, name=f"{rung.name} {seen[rung.name]}") if counts[rung.name] > 1 else rung
    return sorted(every, key=lambda rung: list(Group).index(rung.group))


def in_scenarios(rows: pd.DataFrame) -> list[Rung]:
    """The rungs of every scenario, with its title before their names where there are several."""
    scenarios = ordered(rows)
    before = {one.name: f"{one.title}: " if len(scenarios) > 1 else "" for one in scenarios}
    each = {one: rungs(of_scenario(rows, one)) for one in scenarios}
    return [replace(rung, name=before[one.name] + rung.name) for one, own in each.items() for rung in own]


def of_group(every: Iterable[Rung], name: str) -> list[Rung]:
    """The rungs of a group of which claims speak; of restarts the `exact` or the `lossy` ones.

    Raises:
        NotMeasured: if there are none.
    """
    group = Group.RESTART if name in ("exact", "lossy") else Group[name.upper()]
    own = [rung for rung in every if rung.group is group and rung.is_judged]
    if group is Group.RESTART:
        own = [rung for rung in own if rung.has("restart", "exact") == (name == "exact")]
    if not own:
        raise NotMeasured(f"no run was trained with {group.words}{f' ({name})' if group is Group.RESTART else ''}")
    return own


def _largest(rows: pd.DataFrame, rung: Rung) -> float:
    """The largest difference of any tensor of a rung, at any step; infinite where one is not finite."""
    own = rows[rows["key"].isin(rung.rows["key"].unique())][LARGEST].astype(float)
    return float(own.fillna(math.inf).max())


def _sound(rows: pd.DataFrame) -> list[Rung]:
    """The rungs, where every sham is its reference to the bit.

    Raises:
        Undecidable: if a sham differs, which makes every other difference void.
    """
    every = rungs(rows)
    for sham in every:
        if sham.group is Group.SHAM and (most := _largest(rows, sham)) != 0:
            raise Undecidable(
                f"void: the sham, which repeats the reference, differs from it by up to {significant(most)}, so that no "
                "difference can be put down to its cause"
            )
    return every


def _idle(every: Iterable[Rung]) -> dict[str, int]:
    """The controls that do not act in some replicates, with their number: what has no effect is no measure of an effect."""
    controls = {one.name: (one.at(), one.at(step=0)) for one in every if one.group in CONTROLS}
    counts = {name: int((last <= ACTS * first.reindex(last.index)).sum()) for name, (last, first) in controls.items()}
    return {name: count for name, count in counts.items() if count}


def _acting(every: list[Rung]) -> tuple[list[Rung], str]:
    """The rungs without controls that do not act, and a sentence on those.

    Raises:
        Undecidable: if none acts.
    """
    idle = _idle(every)
    listed = ", ".join(
        f"{name} (in {count} of its replicates the Wasserstein distance at the last step is at most {ACTS:g} times the first)"
        for name, count in idle.items()
    )
    acting = [one for one in every if one.name not in idle]
    if not acting:
        raise Undecidable(f"the control did not act: {listed}")
    return acting, f" Left out, because the control did not act: {listed}." if listed else ""


def _stopped(every: Iterable[Rung]) -> str:
    """A sentence on runs that ended before the last step, or nothing."""
    counts = {rung.name: int((rung.rows.groupby("seed")["step"].max() < rung.end).sum()) for rung in every}
    listed = ", ".join(f"{name} ({count})" for name, count in counts.items() if count)
    return f" Runs that ended before the last step, and are left out: {listed}." if listed else ""


def _halves(own: Iterable[Rung]) -> str:
    """A sentence on when the distances of some runs saturate, but of those that were there before the first step."""
    listed = {rung.name: half for rung in own if (half := rung.half_time()).estimate > 1}
    return f" Half of the distance at the last step is reached at step {_listed(listed)}." if listed else ""


_estimate = attrgetter("estimate")


def _listed(values: Mapping[str, Interval]) -> str:
    """The one value, or each behind its name."""
    if len(values) == 1:
        return next(iter(values.values())).text()
    return " and ".join(f"{name} {one.text()}" for name, one in values.items())  # names have commas


def _span(values: Sequence[Interval]) -> str:
    """The one ratio, or the least and the greatest."""
    low, high = (end(values, key=_estimate).text() for end in (min, max))
    return low if len(values) == 1 else f"{low} to {high}"


def weigh_growth(rows: pd.DataFrame, region: Region) -> Evidence:
    """The difference between flash and baseline attention grows over training, by both metrics."""
    flash = of_group(_sound(rows), "flash")
    powers = {metric: {rung.name: rung.exponent(metric) for rung in flash} for metric in (LARGEST, WASSERSTEIN)}
    for rung in flash:
        rung.at()  # nothing is said of the growth of runs that all stopped early
    every = [power for own in powers.values() for power in own.values()]
    largest, distance = (min(own.values(), key=_estimate).text() for own in powers.values())
    which = "" if len(flash) == 1 else f" (the slowest of {len(flash)} kernels)"
    listed = "; ".join(f"of the {METRICS[metric]} {_listed(own)}" for metric, own in powers.items())
    sentence = f"The exponent of the step in the difference from baseline attention: {listed}.{_halves(flash)}"
    sentence += f"{left_out(*every)}{_stopped(flash)}"
    figure = f"max difference step^{largest}, Wasserstein step^{distance}{which}"
    return Evidence(figure, sentence, tuple(Question(power, region) for power in every))


def weigh_times(
    rows: pd.DataFrame,
    region: Region,
    of: str,
    to: str,
    *,
    since: float = 1.0,
    until: float = 1.0,
    pooled: bool = False,
    dose: float | None = None,
    only: str = "",
) -> Evidence:
    """From one share of the steps to another, the Wasserstein distance of a group over that of another lies in a region.

    Each run of the first is compared with each of the second, or with all as one where they are `pooled`, at each step. Of lower
    precisions FP16 is judged, where it was trained; of random errors those of a `dose`, each with the attention whose size they
    have. `only` is in the names of the first runs.
    """
    every = _sound(rows)
    (above, idle), (below, rest) = (_acting(of_group(every, name)) for name in (of, to))
    above = [rung for rung in above if only in rung.name]
    if dose is not None:
        below = [rung for rung in below if rung.dose == dose]
        above = [rung for rung in above if rung.attention in [each.attention for each in below]]
    if not above:
        raise NotMeasured(f"no run of {Group[of.upper()].words} that the claim is about was trained")
    groups = [below] if pooled else [[rung] for rung in below]

    def times(metric: str, rungs: Iterable[Rung], step: int | None = None) -> dict[str, Interval]:
        pairs = [(one, group) for one in rungs for group in groups if dose is None or one.attention == group[0].attention]
        ratios = [over(one.at(metric, step), *(each.at(metric, step) for each in group)) for one, group in pairs]
        names = [one.name if len(groups) == 1 else f"{one.name} over {group[0].name}" for one, group in pairs]
        return dict(zip(names, ratios, strict=True))

    fp16 = [one for one in above if of == "precision" and one.has("numerics", "autocast_fp16")]
    steps = above[0].horizon(since, until)
    judged = {(name, step): own for step in steps for name, own in times(WASSERSTEIN, fp16 or above, step).items()}
    (least, low), (most, high) = (end(judged.items(), key=lambda item: item[1].estimate) for end in (min, max))
    figure = f"at most {high.text()}{_where(most, judged)}" if pooled else _span([*judged.values()])
    beside = ", ".join(f"{_span(list(times(metric, above).values()))} by {METRICS[metric]}" for metric in (LARGEST, SIZE))
    sentence = f"The {METRICS[WASSERSTEIN]} with {above[0].group.words} over that with {below[0].group.words} at the last step: "
    sentence += f"{_listed(times(WASSERSTEIN, above))}; {beside}."
    if steps[1:]:
        ends = f"{low.text()}{_where(least, judged)} to {high.text()}{_where(most, judged)}"
        sentence += f" At steps {', '.join(map(str, steps))} it is {ends}."
    sentence += f"{_halves([*above, *below])}{left_out(*judged.values())}{idle}{rest}{_stopped([*above, *below])}"
    return Evidence(figure, sentence, tuple(Question(own, region) for own in judged.values()))


def _where(place: tuple[str, int], judged: Iterable[tuple[str, int]]) -> str:
    """In parentheses, of which run and at which step a ratio is; nothing where there is one."""
    names, steps = map(set, zip(*judged, strict=True))
    words = [place[0]] * (len(names) > 1) + [f"step {place[1]}"] * (len(steps) > 1)
    return f" ({', '.join(words)})" if words else ""


def weigh_dose(rows: pd.DataFrame, region: Region, *, since: float = 1.0, until: float = 1.0) -> Evidence:
    """From one share of the steps to another, the exponent of the dose of random errors in the Wasserstein distance."""
    noise, idle = _acting(of_group(_sound(rows), "noise"))
    exponents = dict[str, Interval]()
    for step in noise[0].horizon(since, until):
        pairs = pd.concat([pd.DataFrame({"dose": one.dose, "at": one.at(step=step)}) for one in noise])
        exponents[f"step {step}"] = slope(pairs["dose"], pairs["at"], pairs.index)
    sizes = {one.name: typical(one.at().tolist()) for one in noise}
    sentence = (
        f"The exponent of the dose in the {METRICS[WASSERSTEIN]}: {_listed(exponents)}. That at the last step: {_listed(sizes)}."
    )
    sentence += f"{left_out(*exponents.values())}{idle}{_stopped(noise)}"
    return Evidence(_span([*exponents.values()]), sentence, tuple(Question(own, region) for own in exponents.values()))


def weigh_rate(rows: pd.DataFrame, region: Region) -> Evidence:
    """Per step, flash attention moves weights no faster than other initial weights, and slower than lower precision."""
    every = _sound(rows)
    flash = of_group(every, "flash")
    margins = {Group.INIT: MARGIN, Group.PRECISION: 1 / MARGIN}
    others = {group: pd.concat([rung.rates() for rung in of_group(every, group.name)], axis=1).mean(axis=1) for group in margins}
    excess = [rung.rates() - margins[group] * rates for rung in flash for group, rates in others.items()]
    own = {rung.name: mean(rung.rates().tolist()) for rung in flash}
    rest = {group.words: mean(rates.tolist()) for group, rates in others.items()}
    short = {Group.FLASH.words: max(own.values(), key=_estimate)} | rest
    figure = "; ".join(f"{words} {significant(each.estimate)}" for words, each in short.items())
    sentence = f"Growth of the {METRICS[WASSERSTEIN]} per step, the slope of a straight line: {_listed(own | rest)}."
    questions = tuple(Question(mean(each.dropna().tolist()), region) for each in excess)
    return Evidence(f"{figure} per step", sentence, questions)


def weigh_same_bits(rows: pd.DataFrame, group: str) -> Evidence:
    """No weight of the sham, or of runs resumed from their checkpoints, ever differs from the reference's."""
    own = of_group(rungs(rows) if group == "sham" else _sound(rows), group)
    most = max(_largest(rows, rung) for rung in own)
    count = len({(rung.name, seed) for rung in own for seed in rung.rows["seed"]})
    text = "exactly 0" if most == 0 else significant(most)
    sentence = f"The largest difference of any weight at any step is {text}, over {count} {'run' if count == 1 else 'runs'}."
    return Evidence(f"max difference {text}", sentence, seen=Verdict.FAILS if most else Verdict.HOLDS)


_FIGURES = {"held-out loss": "held_out_loss", "score": "score", "s per step": "seconds_per_step"}


def run_table(results: Results, study: str) -> pd.DataFrame:
    """A row per rung: held-out loss and score, means over replicates with those of the reference behind them, as text."""
    lines = []
    for rung in in_scenarios(results.study(study, RUN)):
        cells, own = {"run": rung.name}, rung.rows
        for words, column in _FIGURES.items():
            run, reference = (own[side].dropna().astype(float).tolist() for side in (column, f"baseline_{column}"))
            cells[f"{words} (reference)"] = mean(run).text().replace(" in every replicate", "") if run else "none"
            if reference:
                cells[f"{words} (reference)"] += f" ({significant(math.fsum(reference) / len(reference), 3)})"
        stops = "; ".join(str(reason) for reason in own["stopped"].dropna().unique() if str(reason))
        lines.append(cells | {"same bits": f"{int(own['same_bits'].sum())} of {len(own)}", "stopped": stops or "no"})
    return pd.DataFrame(lines)


WORDS = operation_words(
    "training",
    inputs=lambda rows: "the initial weights and of the order of the data",
    describe=lambda rows: f"{int(rows['step'].max()):,} steps" if "step" in rows and len(rows) else "",
    rules=(
        ("is it nearer, or farther? (ratio)", "lies below, or above, 1", "lies above, or below, 1"),
        ("does a larger dose move the weights farther? (exponent)", f"lies above {TREND:g}", f"lies below {TREND:g}"),
        ("do errors 16 times as large move them less than twice as far? (exponent)", "lies below 0.25", "lies above 0.25"),
        ("is it as much within a factor of 1.5? (ratio)", "lies between 0.667 and 1.5", "lies outside them"),
        ("is it farther? (ratio)", f"lies above {MARGIN:g}", f"lies below {MARGIN:g}"),
        ("is it no more than another? (ratio)", f"lies below {MARGIN:g}", f"lies above {MARGIN:g}"),
        ("is it at least half as much as another? (ratio)", "lies above 0.5", "lies below 0.5"),
        ("is it 2 to 5 times as much? (ratio)", "lies between 2 and 5", "lies outside them"),
        ("is it no faster? (difference of growth per step)", "lies below 0", "lies above 0"),
        ("is it the same run? (largest difference)", "is 0", "is not 0"),
    ),
)


def _table(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of all weights after the first step of every run but the sham, with its name as `run`, and `group`."""
    every = [rung for scenario in ordered(rows) for rung in rungs(of_scenario(rows, scenario)) if rung.group is not Group.SHAM]
    tables = [own.trained.assign(run=own.name, group=own.group.words, is_last=own.trained["step"] == own.end) for own in every]
    tables = [table.assign(growth=table["seed"].map(own.rates())) for own, table in zip(every, tables, strict=True)]
    return pd.concat(tables) if tables else rows.iloc[:0].assign(run="", group="", is_last=False, growth=math.nan)


_SHADES = {group.words: group.shade for group in Group}


def draw_weights(rows: pd.DataFrame) -> Figure:
    """Max difference and Wasserstein distance from the reference over the steps, a line for each run."""
    y = {"Max difference of a weight": LARGEST, "Wasserstein distance": WASSERSTEIN}
    facet = [TITLE, QUANTITY] if rows[TITLE].nunique() > 1 else [QUANTITY]
    text, table = ("training steps", "difference from the weights of the reference"), _table(rows)
    shades = {run: _SHADES[group] for run, group in zip(table["run"], table["group"], strict=True)} if len(table) else {}
    return draw(table, x="step", y=y, colour=["run"], facet=facet, text=text, shades=shades, banded=True)


def draw_ratio(rows: pd.DataFrame) -> Figure:
    """The Wasserstein distance of every run that acts over that with flash attention, over the steps, by what differs."""
    table = _table(rows)
    table = table[table[WASSERSTEIN] > 0].assign(log=lambda own: np.log(own[WASSERSTEIN].astype(float)))
    place = [SCENARIO, "seed", "step"]
    flash = table[table["group"] == Group.FLASH.words].groupby(place)["log"].mean().rename("flash").reset_index()
    table = table[table["group"] != Group.FLASH.words].merge(flash, on=place)
    table = table.assign(ratio=np.exp(table["log"] - table["flash"]))
    table = table[~table["run"].isin([name for own in ordered(rows) for name in _idle(rungs(of_scenario(rows, own)))])]
    facet = [TITLE, "group"] if rows[TITLE].nunique() > 1 else ["group"]
    shades = {run: _SHADES[group] for run, group in zip(table["run"], table["group"], strict=True)}
    text = "training steps", "Wasserstein distance over that with flash attention"
    how: dict[str, Any] = {"text": text, "shades": shades, "at": {1: ""}, "banded": True}
    return draw(table, x="step", y={"ratio": "ratio"}, colour=["run"], facet=facet, **how)


def draw_ladder(rows: pd.DataFrame) -> Figure:
    """The Wasserstein distance of every run at the last step, and how fast it grows, a row for each run."""
    table = _table(rows)
    table = table[table["is_last"]]
    y = {"At the last step": WASSERSTEIN, "Growth per step": "growth"}
    facet = [TITLE, QUANTITY] if rows[TITLE].nunique() > 1 else [QUANTITY]
    text = "", "Wasserstein distance of all weights from those of the reference"
    return draw(table, x="run", y=y, colour=["group"], facet=facet, text=text, shades=_SHADES, floor=1e-6)


_ACROSS = 4  # panels beside one another
_POINTS = 300  # of a line, which is a few hundred pixels wide


def draw_losses(rows: pd.DataFrame) -> Figure:
    """A panel for each rung: the loss of every replicate over the steps, and that of its reference in grey.

    Runs of more than `_POINTS` steps are drawn as means of blocks of steps.
    """
    every = in_scenarios(rows)
    figure, panels = marks.grid([(rung.name, "") for rung in every], _ACROSS, 1.45, ("training steps", "training loss"))
    values = rows[["loss", "baseline_loss"]].to_numpy(dtype=float)
    finite = values[(values > 0) & (values < math.inf)]
    for place, (axes, rung) in enumerate(zip(panels, every, strict=True)):
        shade = "black" if rung.group is Group.SHAM else rung.group.shade  # which can be seen on grey
        for _, own in rung.rows.groupby("seed", sort=True):
            blocks = np.arange(len(own)) // math.ceil(len(own) / _POINTS)
            run = own[["step", "loss", "baseline_loss"]].astype(float).groupby(blocks).mean()
            axes.plot(run["step"], run["baseline_loss"], color=GREY, linewidth=0.9, alpha=0.7)
            axes.plot(run["step"], run["loss"], color=shade, linewidth=0.45)
        if len(finite):
            marks.log_y(axes, float(finite.min()) / 1.1, float(finite.max()) * 1.1)
        axes.tick_params(labelleft=not place % _ACROSS)
    keys = {"the reference": marks.swatch(GREY, "", linestyle="-", linewidth=1.2)}
    keys["the run, in the colour of what differs; a line per replicate"] = marks.swatch("black", "", linestyle="-", linewidth=0.6)
    figure.legend(list(keys.values()), list(keys), loc="outside upper center", ncols=2, frameon=False)
    return figure
