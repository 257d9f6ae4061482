"""Claims that a study's file states, on rows whose truth is known."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import pytest

from numdev.report.claims.evidence import claim_of
from numdev.report.claims.verdicts import Finding, Verdict
from numdev.results.claim import ClaimKind, ClaimStatement
from numdev.results.record import Reference, plain
from tests.report.claims.test_claims import SEEDS, replicates, table

HOLDS, FAILS, UNDECIDED, NOT_MEASURED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.NOT_MEASURED
SIZES = (128, 256, 512, 1024)
GOLDEN: dict[str, Any] = {"reference": "golden"}


def find(rows: pd.DataFrame, kind: str, metric: str = "out.rmse", /, **fields: Any) -> Finding:
    stated = ClaimStatement("It is so", ClaimKind(kind), fields.pop("metric", metric), **fields)
    return claim_of("mine_1", ClaimStatement.read(plain(stated))).find(rows)


def lines(heights: Mapping[str, float], exponent: Any = 0.5, noise: float = 0.02, **columns: Any) -> pd.DataFrame:
    """Over N, a line of each step that starts at a height; the exponent may be one for each."""
    powers = exponent if isinstance(exponent, dict) else dict.fromkeys(heights, exponent)
    return table(
        replicates(height * n ** powers[step], noise, **GOLDEN, **{"label.step": step, "label.problem.n": n}, **columns)
        for step, height in heights.items()
        for n in SIZES
    )


def steps(noise: float = 0.02, **values: float) -> pd.DataFrame:
    return table(replicates(value, noise, **GOLDEN, **{"label.step": step}) for step, value in values.items())


def beside(**other: Any) -> pd.DataFrame:
    """What is alike, and beside it another output or reference in which it is not."""
    return pd.concat([steps(a=1.0, b=1.0), steps(a=3.0, b=1.0).assign(**other)])


SLOPE: dict[str, Any] = {"over": "problem.n", "above": 0.1}
OF: dict[str, Any] = {"of": {"step": "a"}, "to": {"step": "b"}}
ORDER: dict[str, Any] = {"over": "step", "order": ("a", "b", "c")}
LARGER: dict[str, Any] = {"metric": "relative_frobenius", "of": {"rung": "a"}, "to": {"rung": "b"}, "above": 2.0}
LIKE: dict[str, Any] = {"to": {"step": {"role": "expected"}}, "by_format": False}
LIKE |= {"parts": {"each": {"each": "step", "margin": 1.2}}, "result": "{low:2} to {high:2}", "finding": "It is {list}."}
APART = {"kind": "ratio", "of": {"step": {"role": "control"}}, "above": 1.2, "condition": True}

CASES: list[tuple[str, dict[str, Any], Callable[[], pd.DataFrame], Verdict]] = [  # what no claim of a paper has
    ("slope", SLOPE, lambda: lines({"a": 1.0}, 0.1, 0.9), UNDECIDED),
    ("slope", {"over": "problem.n", "above": 0.4, "below": 0.6}, lambda: lines({"a": 1.0}, 0.7), FAILS),
    ("slope", SLOPE, lambda: lines({"a": 1.0}).query("`label.problem.n` == 128"), UNDECIDED),
    ("slope", SLOPE, lambda: steps(a=1.0), NOT_MEASURED),
    ("ratio", OF | {"above": 2.0}, lambda: steps(0.3, a=2.1, b=1.0), UNDECIDED),
    ("ratio", OF | {"below": 0.5}, lambda: steps(a=0.2, b=1.0), HOLDS),
    ("ratio", OF | {"above": 2.0, "below": 4.0}, lambda: steps(a=5.0, b=1.0), FAILS),
    ("ratio", OF | {"above": 2.0}, lambda: steps(a=3.0, c=1.0), NOT_MEASURED),
    ("order", ORDER, lambda: steps(a=3.0, b=2.0, c=1.0), HOLDS),
    ("order", ORDER, lambda: steps(a=3.0, b=1.0, c=2.0), FAILS),
    ("order", ORDER, lambda: steps(0.4, a=3.0, b=1.1, c=1.0), UNDECIDED),
    ("order", ORDER, lambda: steps(a=3.0, b=2.0), NOT_MEASURED),
    ("same", OF | {"margin": 1.5}, lambda: steps(a=1.3, b=1.0), HOLDS),
    ("same", OF | {"margin": 1.01}, lambda: steps(0.002, a=1.02, b=1.0), FAILS),
    ("same", OF, lambda: steps(0.5, a=1.0, b=1.0), UNDECIDED),
    # the points, outputs and references that the claim names
    ("slope", SLOPE | {"where": {"step": "a"}}, lambda: lines({"a": 1.0, "b": 1.0}, {"a": 0.5, "b": -0.5}), HOLDS),
    ("slope", SLOPE | {"where": {"step": "b"}}, lambda: lines({"a": 1.0, "b": 1.0}, {"a": 0.5, "b": -0.5}), FAILS),
    ("slope", SLOPE | {"where": {"step": "c"}}, lambda: lines({"a": 1.0}), NOT_MEASURED),
    ("same", OF, lambda: beside(output="lse", primary=False), HOLDS),
    ("same", OF | {"metric": "lse.rmse"}, lambda: beside(output="lse", primary=False), FAILS),
    ("same", OF | {"metric": "dq.rmse"}, lambda: beside(output="lse", primary=False), NOT_MEASURED),
    ("same", OF, lambda: beside(reference="golden_same_inputs"), HOLDS),
    ("same", OF | {"reference": Reference.GOLDEN_SAME_INPUTS}, lambda: beside(reference="golden_same_inputs"), FAILS),
    ("slope", SLOPE, lambda: lines({"a": 1.0}).astype({"label.problem.n": str}), HOLDS),  # as another study's axis has names
    ("same", LIKE | {"parts": LIKE["parts"] | {"apart": APART}}, lambda: kernels(exact=1.0, fast=1.02, rough=5.0), HOLDS),
    ("same", LIKE | {"parts": LIKE["parts"] | {"apart": APART}}, lambda: kernels(exact=1.0, fast=1.02, rough=1.0), UNDECIDED),
    # of all weights after the last step
    ("ratio", LARGER, lambda: trained({"a": 3.0, "b": 1.0}), HOLDS),
    ("ratio", LARGER, lambda: trained({"a": 3.0, "b": 1.9}), FAILS),
]


@pytest.mark.parametrize(
    ("kind", "fields", "rows", "verdict"), CASES, ids=[f"{c[0]}-{c[3].value}-{i}" for i, c in enumerate(CASES)]
)
def test_verdict(kind: str, fields: dict[str, Any], rows: Callable[[], pd.DataFrame], verdict: Verdict) -> None:
    found = find(rows(), kind, **fields)
    assert found.verdict is verdict, found
    assert found.sentence.endswith(".")
    assert found.sentence[0].isupper()


@pytest.mark.parametrize(("a", "verdict"), [(1.0, HOLDS), (1.0 + 1e-9, FAILS)])
def test_a_margin_of_1_asks_for_equal_numbers_of_the_measured_replicates(a: float, verdict: Verdict) -> None:
    """What is equal by construction holds in a single replicate, without a test."""
    rows = steps(0.0, a=a, b=1.0)
    for own in (rows, rows[rows["seed"] == 0]):
        found = find(own, "same", "out.max_difference", margin=1.0, **OF)
        assert (found.verdict, found.verdict_text, found.over) == (verdict, verdict.value, "over no runs but these")
        assert found.beside is not None
        assert found.beside.verdict is verdict


def test_a_line_that_lacks_a_point_does_not_tilt_the_slope() -> None:
    """Two flat lines of different heights, the higher one measured at the least N alone and at the next."""
    rows = lines({"low": 1.0, "high": 100.0}, 0.0, 0.0)
    rows = rows[(rows["label.step"] == "low") | (rows["label.problem.n"] <= 256)]
    assert find(rows, "slope", **SLOPE).figure == "exponent 0.00 in every replicate"


def test_points_are_paired_by_replicate_and_by_what_the_claim_leaves_open() -> None:
    """Lines over N, seeds apart by decades: only pairs at the same N and seed have the ratio 3 in every replicate."""
    rows = lines({"a": 3.0, "b": 1.0}, 1.0, 0.0)
    rows["rmse"] *= rows["seed"].map(lambda seed: 10.0**seed)
    rows = rows[(rows["label.step"] == "a") | (rows["label.problem.n"] != 1024)]
    found = find(rows, "ratio", **OF, above=1.5)
    assert (found.verdict, found.figure) == (HOLDS, "ratio 3.00 in every replicate")
    assert found.sentence == (
        "The ratio of the RMSE of out from golden with step = a to that with step = b is 3.00 in every replicate, "
        "averaged over problem.n. Where all 5 replicates are equal, at most 45% of others differ (95 %)."
    )


def test_the_points_beside_their_baselines() -> None:
    own: dict[str, Any] = {"label.step": "a", "reference": "golden"}
    rows = table([replicates(3.0, **own), replicates(1.0, 0.0, subject="baseline", **own)])
    found = find(rows, "ratio", to="baseline", above=2.0)
    assert found.verdict is HOLDS
    assert found.sentence.startswith("The ratio of the RMSE of out from golden to that of the baseline is 3.0")
    assert find(rows, "same", to="baseline", of={"step": "a"}).verdict is FAILS
    assert find(rows, "same", to="baseline", of={"step": "b"}).verdict is NOT_MEASURED


def test_formats_are_judged_as_everywhere() -> None:
    """At BF16, the others told; but not where the formats are what is compared."""
    rows = pd.concat([lines({"a": 1.0}), lines({"a": 1.0}, -0.5, format="fp64")])
    found = find(rows, "slope", **SLOPE)
    assert found.verdict is HOLDS
    assert found.sentence.startswith("At bf16: the exponent of problem.n in the RMSE of out from golden is 0.50")
    assert "Other formats: fp64 exponent -0.50" in found.sentence
    both = {"bf16": 3.0, "fp16": 1.0}
    of_each = (table([replicates(v, **GOLDEN, format=f)]).assign(**{"label.precision": f}) for f, v in both.items())
    rows = pd.concat(of_each)
    found = find(rows, "ratio", of={"precision": "bf16"}, to={"precision": "fp16"}, above=2.0)
    assert (found.verdict, found.sentence[:8]) == (HOLDS, "The rati")


def test_a_nan_and_a_zero_are_told() -> None:
    rows = steps(a=3.0, b=1.0)
    zero = rows.assign(rmse=rows["rmse"].where(rows["seed"] > 0, 0.0) * (rows["label.step"] == "a") + rows["rmse"])
    zero.loc[(zero["seed"] == 0) & (zero["label.step"] == "b"), "rmse"] = 0.0
    assert "Left out because a deviation is zero: 1." in find(zero, "ratio", **OF, above=2.0).sentence
    rows.loc[(rows["seed"] == 1) & (rows["label.step"] == "a"), "nan_count"] = 1
    found = find(rows, "ratio", **OF, above=2.0)
    assert (found.verdict, found.sentence) == (UNDECIDED, f"1 of {SEEDS} replicates hold NaN or infinite values.")


def trained(end: Mapping[str, float], until: int = 8) -> pd.DataFrame:
    """Rows of weights as training keeps them: the difference of all weights is what `end` says after step 8, of a tensor 9."""
    rows = [
        {"key": rung, "seed": seed, "step": step, "tensor": tensor, "label.rung": rung, "problem.steps": 8}
        | {"relative_frobenius": (value * step / 8 if tensor == "model" else 9.0) * (1 + 0.001 * seed * (rung == "a"))}
        for rung, value in end.items()
        for seed in range(SEEDS)
        for step in (0, 4, 8)
        if step <= until or rung != "a"
        for tensor in ("model", "one")
    ]
    return pd.DataFrame(rows).assign(scenario="default", study="s", status="ok")


def test_a_run_that_stopped_leaves_the_claim_undecided() -> None:
    found = find(trained({"a": 3.0, "b": 1.0}, until=4), "ratio", **LARGER)
    assert found.verdict is UNDECIDED
    assert found.sentence == f"{SEEDS} of {SEEDS} runs stopped before the last step."


@pytest.mark.parametrize(("share", "verdict"), [(1.0, HOLDS), (1.3, FAILS), (float("nan"), UNDECIDED)])
def test_what_both_runs_have_is_compared_within_its_row(share: float, verdict: Verdict) -> None:
    rows = [
        {"key": "k", "seed": seed, "label.rung": "a", "held_out_loss": share * (2 + seed), "baseline_held_out_loss": 2.0 + seed}
        for seed in range(SEEDS)
    ]
    rows = [row | {"held_out_loss": row["held_out_loss"] * (1 + 0.001 * i)} for i, row in enumerate(rows)]  # type: ignore[operator]
    found = find(pd.DataFrame(rows), "same", "held_out_loss", to="baseline")
    assert found.verdict is verdict


def test_rows_that_a_kind_of_ones_own_tells_apart_count_once() -> None:
    rows = [
        {"key": str(n), "seed": seed, "label.n": n, "input": name, "largest": n * factor * (1 + 0.001 * seed * n)}
        for n in (1, 2, 4)
        for seed in range(SEEDS)
        for name, factor in (("q", 1.0), ("k", 3.0))
    ]
    found = find(pd.DataFrame(rows), "slope", "largest", over="n", above=0.9, below=1.1)
    assert found.verdict is HOLDS


def kernels(noise: float = 0.02, **values: float) -> pd.DataFrame:
    """Kernels beside a control and what they are claimed to be like."""
    roles = {"exact": "expected", "rough": "control"}
    each = (replicates(v, noise, **GOLDEN, **{"label.step": n, "role.step": roles.get(n)}) for n, v in values.items())
    return table(each)


def test_each_subject_is_held_against_the_entry_with_a_role() -> None:
    rows = kernels(exact=1.0, fast=1.02, faster=1.05, rough=5.0)
    found = find(rows, "same", **LIKE)
    assert (found.verdict, found.figure) == (HOLDS, "1.0 to 1.1")
    assert found.sentence.startswith("It is fast 1.0")
    assert ", faster 1.0" in found.sentence
    assert find(kernels(exact=1.0, fast=1.02, faster=1.5, rough=5.0), "same", **LIKE).verdict is FAILS
    assert find(kernels(exact=1.0, rough=5.0), "same", **LIKE).sentence == "No step could be measured here."
    assert find(kernels(fast=1.0), "same", **LIKE).sentence.startswith("The claim needs one step with the role expected")


def test_a_claim_on_several_values_holds_if_each_does() -> None:
    rows = steps(a=3.0, b=1.0).assign(std=lambda own: own["rmse"] ** 2, other=1.0)
    parts = {"rmse": {"metric": "out.rmse", "above": 2.0}, "std": {"metric": "out.std", "above": 5.0}}
    texts = {"result": "{rmse:2} and {std:2}", "finding": "It is {rmse:1} and {std:1}{also}"}
    found = find(rows, "ratio", parts=parts, **OF, **texts)
    assert (found.verdict, found.figure, found.sentence) == (HOLDS, "3.0 and 9.0", "It is 3 and 9")
    assert find(rows, "ratio", parts=parts | {"std": parts["std"] | {"above": 20.0}}, **OF, **texts).verdict is FAILS
    beside = {"of": {"step": "c"}, "metric": "out.rmse", "also": "Of c it is {value}."}
    assert find(rows, "ratio", parts=parts | {"c": beside}, **OF, **texts).sentence == "It is 3 and 9"
    more = pd.concat([rows, steps(0.0, c=2.0).assign(std=1.0)])
    assert find(more, "ratio", parts=parts | {"c": beside}, **OF, **texts).sentence.startswith("It is 3 and 9 Of c it is 2.0")


def test_pairs_of_one_and_the_same_point_are_left_out() -> None:
    apart = lines({"a": 3.0, "b": 1.0}).query("`label.problem.n` == 128")
    same = lines({"a": 1.0, "b": 1.0}, noise=0.0).query("`label.problem.n` == 256")
    rows = pd.concat([apart.assign(key=apart["label.step"]), same.assign(key="same")])
    words = {"same_point": "{} more are the same", "result": "{value:2}", "finding": "It is {value:1}: {value.pairs}"}
    found = find(rows, "ratio", above=2.0, **OF, **words)
    assert (found.figure, found.verdict) == ("3.0", HOLDS)
    assert found.sentence == "It is 3: larger in 5, equal in 0 of 5 replicates (sign test p = 0.062); 1 more are the same."
