"""The study of loss spikes: planted lifts come back, and verdicts follow from them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from numdev.report.claims.verdicts import Verdict
from numdev.report.document.report import make_report
from numdev.report.reading.frames import WATCH
from numdev.report.statistics import significant
from numdev.report.studies.registry import CLAIMS
from numdev.report.studies.registry import FIGURES as PLOTS
from numdev.report.studies.spikes import BEFORE, FIGURES, excursions, lift_at, lifts, spikes, watched
from numdev.results.record import FACTOR, WINDOW, Column, Use
from numdev.results.store import Store
from tests.toy_training import METRICS, ladder, rows_of, stored

STEPS = 200
SPIKES = {0: 71, 1: 101, 2: 131}  # of some seeds, the step; the others have none
INSIDE, OUTSIDE = "BF16 inside", "FP32 inside"


def run(
    seed: int, spike: int | None, *, lift: float = 1.0, lead: int = 3, drift: float = 0.01, label: str = INSIDE
) -> pd.DataFrame:
    """A run whose figures drift by `drift` per step, and are `lift` times as large from `lead` steps before a spike on to it."""
    noise = np.random.default_rng([seed, *label.encode()])
    step = np.arange(1, STEPS + 1)
    loss = 3 + 0.05 * noise.standard_normal(STEPS) + (0 if spike is None else 5.0 * (step == spike))
    lifted = np.ones(STEPS) if spike is None else np.where((step >= spike - lead) & (step <= spike), lift, 1.0)
    rows = {name: np.exp(drift * step + 0.01 * noise.standard_normal(STEPS)) * lifted for name in FIGURES}
    rows["delta_bias"] = -rows["delta_bias"]
    return pd.DataFrame(
        {"key": label, "label.rung": label, "seed": seed, "step": step, "loss": loss, "gradient_norm": 1.0} | rows
    )


def study(spiking: dict[int, int] | None = None, labels: tuple[str, ...] = (INSIDE,), seeds: int = 5, **law: Any) -> pd.DataFrame:
    spiking = SPIKES if spiking is None else spiking
    runs = [run(seed, spiking.get(seed), label=label, **law) for label in labels for seed in range(seeds)]
    head = {"study": "spikes", "scenario": "fast", "scenario.title": "fast", "scenario.role": "beyond"}
    return pd.concat(runs, ignore_index=True).assign(**head)


class TestLift:
    def test_a_planted_one_comes_back_at_its_steps(self) -> None:
        found = spikes(watched(study(lift=3.0, lead=3)))
        assert sorted((spike.run.seed, spike.place + 1) for spike in found) == sorted(SPIKES.items())
        for figure in FIGURES:
            curve = np.exp(lifts(found, figure).mean(axis=0))
            # each is a quotient of values with 1 % of noise, the median of 30 of them aside
            assert curve[BEFORE - 3 : BEFORE + 1] == pytest.approx(3.0, rel=0.05)
            assert curve[: BEFORE - 3] == pytest.approx(1.0, rel=0.05)
            assert curve[BEFORE + 1 :] == pytest.approx(1.0, rel=0.05)

    def test_what_grows_in_every_run_is_none(self) -> None:
        for drift in (0.0, 0.05, -0.02):
            found = spikes(watched(study(drift=drift)))
            assert lift_at(found, "largest_logit", -1).estimate == pytest.approx(1.0, rel=0.05)

    def test_intervals_are_over_seeds(self) -> None:
        one, two = (spikes(watched(study(lift=2.0, labels=labels))) for labels in ((INSIDE,), (INSIDE, OUTSIDE)))
        assert len(two) == 2 * len(one)
        assert lift_at(one, "dq_error", 0).count == lift_at(two, "dq_error", 0).count == len(SPIKES)

    def test_a_spike_without_a_quiet_replicate_is_left_out(self) -> None:
        assert spikes(watched(study(dict.fromkeys(range(5), 100)))) == []

    def test_a_figure_that_is_zero_or_unknown_has_none(self) -> None:
        for value in (0.0, math.nan):
            found = spikes(watched(study().assign(tie_rate=value)))
            assert lift_at(found, "tie_rate", -1).count == 0
            assert not np.isfinite(lifts(found, "tie_rate")).any()


class TestClaims:
    @pytest.mark.parametrize(("lift", "verdict"), [(3.0, Verdict.HOLDS), (1.0, Verdict.FAILS), (1.1, Verdict.UNDECIDED)], ids=str)
    def test_verdicts_are_those_of_the_lift(self, lift: float, verdict: Verdict) -> None:
        for name in ("spikes_logit", "spikes_deviation", "spikes_ties", "spikes_delta") if lift == 3.0 else ("spikes_logit",):
            assert CLAIMS[name].find(study(lift=lift)).verdict is verdict

    def test_one_seed_decides_nothing(self) -> None:
        assert CLAIMS["spikes_logit"].find(study({0: 100}, lift=9.0)).verdict is Verdict.UNDECIDED

    def test_without_a_spike_nothing_is_measured(self) -> None:
        for name in ("spikes_logit", "spikes_inside"):
            found = CLAIMS[name].find(study({}, labels=(INSIDE, OUTSIDE)))
            assert found.verdict is Verdict.NOT_MEASURED
            assert found.sentence == "The loss of none of 10 runs spiked."
            assert CLAIMS[name].find(study().iloc[:0]).verdict is Verdict.NOT_MEASURED

    def test_more_spikes_are_counted_by_seed(self) -> None:
        every = {seed: 60 + 20 * seed for seed in range(5)}
        quiet = study({}, labels=(OUTSIDE,))
        some = study(dict(list(every.items())[:1]), labels=(OUTSIDE,))
        more = CLAIMS["spikes_inside"].find(pd.concat([study(every), quiet]))
        assert more.verdict is Verdict.HOLDS
        assert "BF16 inside 5 in 5 runs, FP32 inside 0 in 5 runs" in more.sentence
        equal = CLAIMS["spikes_inside"].find(pd.concat([study(dict(list(every.items())[:1])), some]))
        assert equal.verdict is Verdict.UNDECIDED, "five seeds with as many spikes each do not exclude a sixth with more"
        assert CLAIMS["spikes_inside"].find(pd.concat([study(dict(list(every.items())[:2])), quiet])).verdict is Verdict.UNDECIDED
        assert CLAIMS["spikes_inside"].find(study(every)).verdict is Verdict.NOT_MEASURED


@pytest.mark.parametrize(
    ("ours", "theirs", "verdict"),
    [
        (range(12), range(12), Verdict.HOLDS),  # the same runs
        (range(12), range(1, 13), Verdict.HOLDS),
        (range(20), range(4), Verdict.FAILS),
        (range(4), range(20), Verdict.FAILS),
        (range(12), range(7), Verdict.UNDECIDED),
    ],
)
def test_the_rate_of_spikes_is_compared_by_pairs(ours: range, theirs: range, verdict: Verdict) -> None:
    """Of 24 pairs; the interval is Student's over seeds, and the least difference that of a t-test with 80 % power."""
    (flash,) = (point for point in ladder() if point.label == "triton")
    head = rows_of([flash], 1).iloc[[0]].drop(columns=["seed", "step", *METRICS])
    runs = [
        head.merge(run(seed, 90 if seed in ours else None)[["step", "loss"]], how="cross").assign(
            seed=seed, baseline_loss=run(seed, 90 if seed in theirs else None, label=OUTSIDE)["loss"]
        )
        for seed in range(24)
    ]
    found = CLAIMS["spikes_rate"].find(pd.concat(runs, ignore_index=True))
    assert found.verdict is verdict, found.sentence
    assert f"triton {len(ours)} and {len(theirs)} of 24" in found.sentence
    differences = [float(seed in ours) - float(seed in theirs) for seed in range(24)]
    if len(set(differences)) > 1:
        error = float(np.std(differences, ddof=1)) / 24**0.5
        least = error * (stats.t.ppf(0.975, 23) + stats.t.ppf(0.8, 23))
        assert f"One of {significant(least)} would have been found" in found.sentence
        low = np.mean(differences) - stats.t.ppf(0.975, 23) * error
        assert f"[{low:.2f}" in found.sentence


def test_the_figure_is_drawn_also_without_a_spike() -> None:
    for rows, panels in ((study(lift=2.0), 6), (study({}), 0)):
        assert len(PLOTS["spikes_aligned"](rows).axes) == panels


def test_the_band_is_the_t_interval_of_the_logarithms() -> None:
    """A bootstrap of three replicates misses the mean in 27 of 100."""
    rows = study({seed: 71 + 30 * seed for seed in range(3)}, lift=2.0)
    (band,) = PLOTS["spikes_aligned"](rows).axes[0].collections
    logs = lifts(spikes(watched(rows)), next(iter(FIGURES)))
    drawn = np.concatenate([np.array(path.vertices) for path in band.get_paths()])
    for offset in (-1, 0):
        expected = stats.ttest_1samp(logs[:, BEFORE + offset], 0.0).confidence_interval(0.95)
        heights = drawn[drawn[:, 0] == offset, 1]
        assert (heights.min(), heights.max()) == pytest.approx((math.exp(expected.low), math.exp(expected.high)), rel=1e-9)


@pytest.fixture
def store(tmp_path: Path) -> Store:
    """One point of training with the table `watch`, and one without."""
    found = stored(tmp_path, ladder()[:2], "spikes", seeds=5)
    rows = study(lift=2.0).drop(columns=["study", "scenario", "scenario.title", "scenario.role", "key", "label.rung"])
    columns = tuple(Column(str(name), use=Use.PLACE if name in ("seed", "step") else Use.FIGURE) for name in rows)
    record = found.get("spikes-1")
    assert record is not None
    watch: Any = {WATCH: rows.to_dict("records")}
    found.put(replace(record, tables=record.tables | watch, columns=record.columns | {WATCH: columns}))
    manifest = found.studies()["spikes"] | {"figure": "spikes_aligned", "more": [], "claims": ["spikes_logit"]}
    found.put_study("spikes", manifest)
    return found


def test_a_report_has_table_figure_and_verdict(store: Store, tmp_path: Path) -> None:
    make_report(store.path, tmp_path / "report")
    assert len(pd.read_csv(tmp_path / "report/watch.csv")) == 5 * STEPS
    assert (tmp_path / "report/figures/spikes.svg").is_file()
    claims = pd.read_csv(tmp_path / "report/claims.csv")
    assert claims["verdict"].tolist() == ["holds"]
    assert "3 spikes of 3 seeds; 3 of 5 runs spiked" in claims["sentence"][0]


def noise(count: int, seed: int = 0) -> list[float]:
    found: list[float] = np.random.default_rng(seed).standard_normal(count).tolist()
    return found


def beyond(values: list[float], window: int, factor: float) -> np.ndarray:
    """Which values lie beyond the range of all those before, by NumPy at once."""
    x = np.array(values)
    before = np.lib.stride_tricks.sliding_window_view(x, window)[:-1]
    middle = np.median(before, axis=1)
    spread = np.median(np.abs(before - middle[:, None]), axis=1) / 0.674489750196
    return x[window:] > middle + factor * spread


def test_noise_has_no_spikes_and_the_rate_of_false_alarms_is_as_stated() -> None:
    alarms = int(beyond(noise(300_000), WINDOW, FACTOR).sum())
    assert alarms <= 8  # of a Poisson count of mean 3, 0.4 % exceed it
    assert excursions(noise(600)) == []


class TestPlanted:
    @given(st.lists(st.tuples(st.integers(1, 40), st.integers(1, 15)), min_size=1, max_size=3), st.integers(0, 5))
    @settings(max_examples=15, deadline=None)
    def test_they_are_found_to_the_step(self, planted: list[tuple[int, int]], seed: int) -> None:
        """Each after some ordinary values, and higher than the one before."""
        values, expected = noise(230, seed), list[tuple[int, int]]()
        for height, (gap, length) in enumerate(planted, 1):
            place = gap + (expected[-1][1] + 1 if expected else WINDOW)
            values[place : place + length] = [x + 40 * height for x in values[place : place + length]]
            expected.append((place, place + length - 1))
        assert excursions(values) == expected

    def test_a_new_level_is_one(self) -> None:
        values = [x + 40 * (place >= 100) for place, x in enumerate(noise(300))]
        assert excursions(values) == [(100, 99 + WINDOW)]

    def test_what_is_not_finite_is_out_of_range(self) -> None:
        values = noise(100)
        values[60], values[61], values[5] = math.nan, math.inf, math.nan
        assert excursions(values) == [(60, 61)]
