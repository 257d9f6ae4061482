"""`numdev compare`: which points match, what is called a change, how surely, and how the command ends."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from numdev.arithmetic.formats import FP32
from numdev.attention.operation import ATTENTION
from numdev.attention.problem import Distribution, Problem, Shape
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import BadInput
from numdev.measurement.deviation import COLUMNS as DEVIATION
from numdev.measurement.metrics import METRICS, NONFINITE
from numdev.measurement.runner import Runner
from numdev.measurement.speed import Budget, Speeds
from numdev.measurement.studies import run
from numdev.report.comparison import COLUMNS, COMPARABLE, Criterion, compare
from numdev.report.reading.columns import meaning
from numdev.report.reading.frames import load
from numdev.report.statistics import Floats, holm, ratio
from numdev.results.record import Column, Record, Status
from numdev.results.store import Scenario, Store
from numdev.results.study import Study, StudyPoint
from tests.cli.commands import Command, refusal

CLOSE = 1e-9  # the same test in FP64 by another route: logs of size 10 to 1e-15, over standard errors of 0.05
BASE = (1.0, 1.1, 0.9, 1.05, 0.95)
SLIGHT = (1.001, 0.998, 1.002, 0.999, 1.001)  # ratios around 1
Point = tuple[dict[str, Any], Record]


def rows(values: Sequence[float], **place: Any) -> list[dict[str, Any]]:
    head = {"cluster": "", "subject": "variant", "output": "out", "primary": True, "reference": "golden"} | place
    rest: dict[str, Any] = dict.fromkeys(METRICS, 1.0) | dict.fromkeys(NONFINITE, 0) | {"max_index": [0]}
    return [{"seed": seed} | head | rest | {"rmse": value, "max_ulp": 3 * value} for seed, value in enumerate(values)]


def point(
    values: Sequence[float] = BASE, machine: str = "one", labels: dict[str, Any] | None = None, n: int = 8, **changes: Any
) -> Point:
    """A point with these figures of rmse; its key holds its labels and its machine."""
    labels = {"precision": "bf16"} if labels is None else labels
    config = {"problem": {"shape": {"keys": n}}, "variant": {"type": "Tiled"}, "baseline": None, "seeds": len(values)}
    key = f"{machine}-{n}-" + "-".join(str(value) for value in labels.values())
    tables = {"deviation": changes.pop("rows", rows(values)), "counters": []}
    columns = {"deviation": DEVIATION, "counters": (Column("seed"),)}
    stated = "deviation", "attention", ("out", "lse"), columns, config, {"device": machine, "python": "3.12"}
    return labels, dataclasses.replace(Record(key, *stated, Status.OK, "", tables, 1.0), **changes)


def scaled(factors: Sequence[float] | float) -> list[float]:
    return (np.array(BASE) * factors).tolist()


def failed(status: Status, reason: str, **changes: Any) -> Point:
    return point(status=status, reason=reason, rows=[], **changes)


UNIFORM = (Scenario("uniform", "uniform inputs"),)


def store_of(path: Path, *points: Point, study: str = "s") -> Store:
    store = Store(path)
    for _, made in points:
        store.put(made)
    listed = tuple(StudyPoint(None, None, None, 1, "uniform", labels) for labels, _ in points)
    manifest = Study(study, "t", points=listed, scenarios=UNIFORM).manifest([made.key for _, made in points], "deviation")
    store.put_study(study, manifest)
    return store


def changes(path: Path, a: Sequence[Point], b: Sequence[Point], **question: Any) -> pd.DataFrame:
    return compare(load(store_of(path / "a", *a)), load(store_of(path / "b", *b)), Criterion(**question))


def judged(a: Floats, b: Floats, tolerance: float = 1.0) -> dict[str, Any]:
    return Criterion(tolerance=tolerance).test(a, b)


class TestChange:
    @pytest.mark.parametrize(
        ("factors", "tolerance", "change"),
        [
            ([1.2, 1.21, 1.19, 1.2, 1.22], 1.0, "worse"),
            ([1.2, 1.21, 1.19, 1.2, 1.22], 1.1, "worse"),
            ([1.2, 1.21, 1.19, 1.2, 1.22], 1.3, "same"),
            ([0.8, 0.81, 0.79, 0.8, 0.82], 1.0, "better"),
            ([0.8, 0.81, 0.79, 0.8, 0.82], 1.3, "same"),
            (SLIGHT, 1.0, "not shown"),
            (SLIGHT, 1.01, "same"),
            ([0.5, 1.0, 2.0, 90.0, 9.0], 1.1, "not shown"),
            (1.0 + 1e-13, 1.0, "same"),  # another order of summation in the metric itself
            (1.0, 1.0, "equal bits"),
        ],
    )
    def test_is_judged_on_the_ratio(self, tmp_path: Path, factors: Any, tolerance: float, change: str) -> None:
        (row,) = changes(tmp_path, [point()], [point(scaled(factors), "two")], tolerance=tolerance).to_dict("records")
        assert (row["change"], row["replicates"]) == (change, 5)
        assert (row["study"], row["scenario"], row["point"], row["output"]) == ("s", "uniform", "precision=bf16", "out")
        assert row["a"] == pytest.approx(stats.gmean(BASE))
        assert row["ratio"] == pytest.approx(stats.gmean(np.ones(5) * factors), rel=1e-12)
        assert (row["key_a"], row["key_b"]) == ("one-8-bf16", "two-8-bf16")

    @pytest.mark.parametrize(
        ("a", "b", "expected", "note"),
        [
            (point(), point(machine="two", rows=[row | {"p99": 2.0} for row in rows(BASE)]), ("same", 1.0), ""),
            (point([1.0]), point([9.0], "two"), ("unknown", 9.0), "one replicate alone has no interval"),
            (point(), point(scaled(3.0), "two", n=16), ("unknown", 3.0), "are no pairs"),
            (point(), point([*BASE, 50.0, 60.0], "two"), ("equal bits", 1.0), ""),  # of the seeds that both have
            (point([0.0] * 10), point([1e-9] * 10, "two"), ("worse", math.nan), "10 of 10 pairs have no finite ratio"),
            (point([0.0, 1.0, 1.0]), point([1e-9, 1.0, 1.0], "two"), ("not shown", 1.0), "1 of 3 pairs have no finite"),
        ],
        ids=["another metric", "one replicate", "other inputs", "more seeds", "from exact", "one from exact"],
    )
    def test_says_what_it_rests_on(self, tmp_path: Path, a: Point, b: Point, expected: tuple[Any, ...], note: str) -> None:
        (row,) = changes(tmp_path, [a], [b]).to_dict("records")
        assert (row["change"], row["ratio"]) == pytest.approx(expected, nan_ok=True)
        assert note in row["note"]
        if "10 of 10" in note:
            assert row["p"] == 2.0**-9  # the sign test: ten of ten, two-sided

    def test_is_judged_for_each_output_and_never_for_the_baseline(self, tmp_path: Path) -> None:
        def made(factor: float, machine: str) -> Point:
            found = rows(BASE) + rows(scaled(factor), output="lse") + rows(scaled(factor), subject="baseline")
            return point(machine=machine, rows=found)

        found = changes(tmp_path, [made(1.0, "one")], [made(2.0, "two")])
        assert dict(zip(found["output"], found["change"], strict=True)) == {"out": "equal bits", "lse": "worse"}

    @pytest.mark.parametrize(
        ("before", "after", "change"),
        [
            (Status.OK, Status.ERROR, "broken"),
            (Status.OK, Status.NONFINITE, "broken"),
            (Status.OK, Status.ZERO, "broken"),
            (Status.OK, Status.INVALID, "broken"),
            (Status.NONFINITE, Status.NONFINITE, "equal bits"),
            (Status.ERROR, Status.OK, "mended"),
            (Status.ERROR, Status.UNSUPPORTED, "in neither"),
        ],
    )
    def test_of_status(self, tmp_path: Path, before: Status, after: Status, change: str) -> None:
        def made(status: Status, machine: str) -> Point:
            measured = status in (Status.OK, Status.NONFINITE, Status.ZERO)
            return point(machine=machine, status=status) if measured else failed(status, f"as {machine} says", machine=machine)

        (row,) = changes(tmp_path, [made(before, "one")], [made(after, "two")]).to_dict("records")
        assert (row["change"], row["status_a"], row["status_b"]) == (change, before.value, after.value)
        assert ("says" in row["note"]) == (Status.ERROR in (before, after) or after.value.startswith(("un", "out", "invalid")))

    @pytest.mark.parametrize(("nan", "change"), [((3, 1), "unknown"), ((3, 3), "unknown"), ((1, 3), "broken")])
    def test_of_nan_on_both_sides_is_never_for_the_better(self, tmp_path: Path, nan: tuple[int, int], change: str) -> None:
        """The figures are of the elements that are left."""
        sides = [
            point(machine=machine, status=Status.NONFINITE, rows=[row | {"nan_count": count} for row in rows(scaled(factor))])
            for machine, count, factor in zip(("one", "two"), nan, (1.0, 0.1), strict=True)
        ]
        (row,) = changes(tmp_path, sides[:1], sides[1:]).to_dict("records")
        assert row["change"] == change
        assert row["note"].startswith(f"elements that are NaN or Inf: {5 * nan[1]} in B, {5 * nan[0]} in A")


class TestMatching:
    def test_is_by_labels_whatever_their_order_and_type(self, tmp_path: Path) -> None:
        """Beside 0.5, B's 4 becomes 4.0 in a column of numbers, and beside `auto` text in A's."""
        a = [point(labels={"x": 4, "y": "z"}), point(labels={"x": "auto", "y": "z"})]
        b = [point(machine="two", labels={"y": "z", "x": 4}), point(machine="two", labels={"y": "z", "x": 0.5})]
        found = changes(tmp_path, a, b)
        assert list(zip(found["point"], found["change"], strict=True)) == [
            ("x=4 y=z", "equal bits"),
            ("x=auto y=z", "only in A"),
            ("x=0.5 y=z", "only in B"),
        ]

    def test_takes_points_that_labels_do_not_tell_apart_in_order(self, tmp_path: Path) -> None:
        twins = [point(BASE, "one", {}), point(scaled(2.0), "one", {}, n=16)]
        again = [point(BASE, "two", {}), point(scaled(2.0), "two", {}, n=16)]
        assert changes(tmp_path, twins, again)["change"].tolist() == ["equal bits", "equal bits"]

    def test_of_nothing_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"B: 's' cannot be used; no point of it is one of A, which holds s"):
            changes(tmp_path, [point()], [point(machine="two", labels={"precision": "fp16"})])

    def test_a_point_without_the_reference_is_unknown(self, tmp_path: Path) -> None:
        both = [*rows(BASE), *rows(BASE, reference="baseline")]
        sides = [[point(machine=name, rows=both), point(machine=name, labels={"i": 0})] for name in ("one", "two")]
        of_baseline = changes(tmp_path, *sides, reference="baseline")
        assert of_baseline["change"].tolist() == ["equal bits", "unknown"]
        assert "no figure against baseline" in of_baseline["note"][1]


class TestManyTests:
    @given(st.lists(st.floats(0, 1), min_size=1, max_size=30))
    def test_holm_lies_between_none_and_bonferroni_and_keeps_the_order(self, p: list[float]) -> None:
        adjusted = holm(p)
        assert all(one <= after <= min(1.0, len(p) * one) + CLOSE for one, after in zip(p, adjusted, strict=True))
        order = np.argsort(p, kind="stable")
        assert (np.diff(np.array(adjusted)[order]) >= 0).all()

    def test_a_change_that_is_significant_alone_is_not_so_among_many(self, tmp_path: Path) -> None:
        """Alone p = 0.02; with 19 others that did not change it is 0.4."""
        doubtful = scaled([1.05, 1.01, 1.04, 1.03, 1.07])
        alone = changes(tmp_path / "alone", [point()], [point(doubtful, "two")])
        assert alone["change"].tolist() == ["worse"]
        a = [point(labels={"i": i}) for i in range(20)]
        b = [point(scaled(SLIGHT) if i else doubtful, "two", {"i": i}) for i in range(20)]
        a, b = [*a, point(labels={"i": 20})], [*b, point(machine="two", labels={"i": 20})]  # equal bits do not count
        among = changes(tmp_path / "among", a, b)
        assert among["change"].tolist() == ["not shown"] * 20 + ["equal bits"]
        assert among["p"][0] == alone["p"][0] < 0.05
        assert among["p_adjusted"][0] == pytest.approx(20 * among["p"][0])
        assert among["note"][0] == "significant alone, not among 20 tests"


class TestTests:
    @given(st.integers(0, 1000), st.integers(2, 12), st.floats(-0.5, 0.5))
    def test_paired_is_that_of_scipy(self, seed: int, count: int, shift: float) -> None:
        draws = np.random.default_rng(seed)
        a, b = draws.lognormal(0.0, 0.3, count), draws.lognormal(shift, 0.3, count)
        row, times = judged(a, b), ratio(b, a)
        assert row["p"] == pytest.approx(stats.ttest_rel(np.log(b), np.log(a)).pvalue, rel=CLOSE)
        assert (row["ratio"], row["ratio_low"], row["ratio_high"]) == (times.estimate, times.low, times.high)
        assert row["is_larger"] == (times.estimate > 1)

    @given(st.integers(0, 1000), st.floats(-0.8, 0.8), st.floats(1.0, 2.0))
    def test_p_says_what_the_interval_says(self, seed: int, shift: float, tolerance: float) -> None:
        draws = np.random.default_rng(seed)
        row = judged(draws.lognormal(0.0, 0.2, 6), draws.lognormal(shift, 0.2, 6), tolerance)
        assert (row["p"] < 0.05) == (row["ratio_low"] > tolerance or row["ratio_high"] < 1 / tolerance)

    @pytest.mark.parametrize(("b", "p"), [([2.0, 2.0, 2.0], 0.5**3), ([1.0, 1.0, 1.0], 1.0)])
    def test_three_that_agree_leave_the_doubt_of_a_sign_test(self, b: list[float], p: float) -> None:
        assert judged(np.ones(3), np.array(b))["p"] == p


class TestCommand:
    def test_a_regression_ends_with_1_and_is_shown(self, numdev: Command, tmp_path: Path) -> None:
        """Broken points come first, then worse ones by their ratio; what cannot be tested is never called worse."""
        labels = [{"precision": name} for name in ("bf16", "fp16", "fp32", "tf32", "fp64")]
        store_of(tmp_path / "a", *(point(labels=each) for each in labels[:4]), point([1.0], labels=labels[4]))
        gone = failed(Status.ERROR, "it fell [over]", machine="two", labels=labels[1])
        worse = [point(scaled([x * f for f in (1.2, 1.21, 1.19, 1.2, 1.22)]), "two", labels[i]) for x, i in ((1.0, 0), (2.0, 3))]
        others = point(machine="two", labels=labels[2]), point([9.0], "two", labels[4])
        store_of(tmp_path / "b", gone, *worse, *others)
        ran = numdev("compare", "a", "b", "out=o")
        assert ran.code == 1
        worst_first = ["Changes for the worse", "it fell", "precision=tf32", "1.204 ["]
        ordered = ["Environments differ", "one", "two", *worst_first, "Changes that cannot be tested", "precision=fp64"]
        places = [ran.out.index(words) for words in ordered]
        assert places == sorted(places)
        assert "3 regressions in 5 comparisons" in ran.out
        assert "python" not in ran.out
        assert "precision=fp32" not in ran.out
        assert numdev("compare", "a", "b", "tolerance=3").code == 1  # one point is broken still
        found = pd.read_csv("o/compare.csv")
        assert found["change"].tolist() == ["worse", "broken", "equal bits", "worse", "unknown"]
        assert not [name for name in (*COMPARABLE, *COLUMNS) if meaning(name) is None]

    def test_a_tolerance_lets_it_pass_and_a_study_is_named_in_any_form(self, numdev: Command, tmp_path: Path) -> None:
        worse = scaled([1.2, 1.21, 1.19, 1.2, 1.22])
        for name, values in (("a", BASE), ("run=b", worse)):
            store_of(tmp_path / name, point(machine=name), study="one")
            store_of(tmp_path / name, point(values, name, {"precision": "fp16"}), study="two")
        assert numdev("compare", "a", "run=b", "metric=max_ulp").code == 1
        assert numdev("compare", "a", "run=b", "metric=max_ulp", "tolerance=1.3").code == 0
        assert numdev("compare", "a", "--study", "one", "run=b").code == 0
        assert numdev("compare", "a", "run=b", "study=one,two").code == 1

    def test_points_missing_are_noted(self, numdev: Command, tmp_path: Path) -> None:
        store_of(tmp_path / "a", point(), point(labels={"precision": "fp16"}))
        store_of(tmp_path / "b", point(machine="two"), point(machine="two", labels={"precision": "fp16"}))
        (tmp_path / "b" / "records" / "two-8-fp16.json").unlink()
        same = numdev("compare", "a", "a", "out=o")
        assert (same.code, "Environments differ" in same.out) == (0, False), same.err
        assert list(compared := pd.read_csv("o/compare.csv")) == COLUMNS
        assert set(compared["change"]) == {"equal bits"}
        ran = numdev("compare", "a", "b")
        assert ran.code == 1
        assert "note: B: s: 1 of 2 points are not measured yet" in ran.out
        assert "1 regression in 2 comparisons" in ran.out
        assert "Changes for the worse" in ran.out
        assert "precision=fp16" in ran.out
        assert "only in A" in ran.out
        back = numdev("compare", "b", "a")
        assert (back.code, "only in B" in back.out) == (0, True)

    @pytest.mark.parametrize(
        ("a", "b", "code", "sentence"),
        [
            (point(), point(scaled(9.0), "two", n=16), 2, "problem, baseline or seeds differ"),
            (point([1.0]), point([9.0], "two"), 2, "one replicate alone has no interval; measure more seeds"),
            (failed(Status.ERROR, "it fell"), failed(Status.ERROR, "it fell again", machine="two"), 2, "it fell again"),
            (failed(Status.ERROR, "it fell"), point(machine="two"), 0, ""),
            (point([1.0]), failed(Status.ERROR, "it fell", machine="two"), 1, ""),
        ],
        ids=["no pairs", "one replicate", "in neither", "mended", "broken"],
    )
    def test_that_could_test_nothing_ends_with_2(
        self, numdev: Command, tmp_path: Path, a: Point, b: Point, code: int, sentence: str
    ) -> None:
        store_of(tmp_path / "a", a)
        store_of(tmp_path / "b", b, point(machine="two", labels={"precision": "fp32"}))  # only in B
        ran = numdev("compare", "a", "b")
        assert ran.code == code
        expected = f"nothing could be tested in 2 comparisons: {sentence}" if sentence else "regression"
        assert expected in ran.out.splitlines()[-1]
        assert "cluster" not in ran.out

    def test_speed_is_compared_by_its_own_figures(self, numdev: Command, tmp_path: Path) -> None:
        place = Problem(Distribution(), Shape(queries=8, keys=8, head_dim=8))
        study = Study("toy", "A toy", None, (), (StudyPoint(place, Vanilla(FP32), None, 3, "normal", {"kernel": "vanilla"}),))
        run(study, Runner(Speeds(ATTENTION, Budget(1e-4, 3, 3)), "cpu"), Store(tmp_path / "a"))
        slow = Store(tmp_path / "b")
        for made in Store(tmp_path / "a").records():
            rows = [row | {"latency": (3 + 0.01 * i) * row["latency"]} for i, row in enumerate(made.rows)]
            slow.put(dataclasses.replace(made, tables={"speed": rows}))
        slow.put_study("toy", Store(tmp_path / "a").studies()["toy"])
        assert numdev("compare", "a", "b").code == 0
        assert numdev("compare", "a", "b", "metric=latency", "tolerance=1.2").code == 1
        assert "cannot be used" in numdev("compare", "a", "b", "metric=wasserstein").err

    @pytest.mark.parametrize(
        ("arguments", "words"),
        [
            ((), "numdev compare: the following arguments are required: A, B; see --help"),
            (("a",), "numdev compare: the following arguments are required: B; see --help"),
            (("a", "nowhere"), "B: 'nowhere' cannot be used; there is no such folder"),
            (("a", "a", "study=fig9"), "study: 'fig9' cannot be used; a holds s"),
            (("a", "a", "metric=rsme"), "metric: 'rsme' cannot be used"),
            (("a", "a", "reference=baseline"), "reference: 'baseline' cannot be used; both must have it; one has golden"),
            (("a", "a", "metric=latency"), "metric: 'latency' cannot be used; both must have it; one has max_difference, rmse"),
            (("a", "a", "metric=agreement_bits"), "metric: 'agreement_bits' cannot be used; use a metric of which larger is"),
            (("a", "a", "tolerance=0.9"), "tolerance: 0.9 cannot be used"),
            (("a", "a", "tolerance=nan"), "tolerance: nan cannot be used"),
            (("a", "a", "tolerance=5%"), "argument --tolerance: invalid float value: '5%'"),
            (("a", "a", "metrc=rmse"), "numdev compare: 'metrc=rmse' cannot be used; did you mean metric, or another of study"),
            (("a", "a", "--bogus"), "numdev compare: '--bogus' cannot be used"),
        ],
    )
    def test_names_what_cannot_be_used(self, numdev: Command, tmp_path: Path, arguments: tuple[str, ...], words: str) -> None:
        store_of(tmp_path / "a", point())
        assert words in refusal(numdev("compare", *arguments))
