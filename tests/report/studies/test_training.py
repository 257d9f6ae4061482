"""Chapters on training: what claims say of records with known laws of growth, and what their figures show."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.figure import Figure

from numdev.report.claims.verdicts import Finding, Region, Verdict, judge
from numdev.report.reading.frames import TRAINING, Results, load
from numdev.report.studies.registry import CLAIMS, FIGURES, claims_of
from numdev.report.studies.training import LARGEST, WASSERSTEIN, Group, draw_losses, group_of, rungs, weigh_times
from numdev.results.store import Store
from tests.report.printed import assert_apart, assert_inside, assert_legible, written
from tests.toy_training import SHAPE, STEPS, Law, Trained, ladder, rows_of, stored

pytestmark = pytest.mark.xdist_group("figures of training")  # drawn once, by one worker

HOLDS, FAILS, UNDECIDED, NOT_MEASURED = Verdict.HOLDS, Verdict.FAILS, Verdict.UNDECIDED, Verdict.NOT_MEASURED
OF_TRAINING = [name for name, claim in CLAIMS.items() if claim.words.operation == "training"]
OF_WEIGHTS = [name for name in OF_TRAINING if not CLAIMS[name].table]  # those on what was watched are in test_spikes.py
WILD = Law(1e-4, noise=1.5)  # replicates that say nothing


def find(claim: str, **laws: Law | None) -> Finding:
    """What a claim says of a ladder with some laws of its own; None leaves a rung out."""
    points = [point for point in ladder(**{n: law for n, law in laws.items() if law}) if laws.get(point.label, 1) is not None]
    return CLAIMS[claim].find(rows_of(points))


CASES: list[tuple[str, dict[str, Law | None], Verdict]] = [
    ("fig7", {}, HOLDS),
    ("fig7", {"triton": Law(1e-4, power=0.0)}, FAILS),
    ("fig7", {"triton": WILD}, UNDECIDED),
    ("fig7", {"triton": None, "sdpa_flash": None, "tiled_bf16": None}, NOT_MEASURED),
    ("fig8", {}, HOLDS),
    ("fig8", {"tiled_bf16": Law(4e-3)}, FAILS),
    ("fig8", {"tiled_bf16": Law(1e-3, noise=0.3)}, UNDECIDED),
    ("fig8", {"init_1": None, "init_2": None}, NOT_MEASURED),
    ("fig8_precision", {}, HOLDS),
    ("fig8_precision", {"fp16": Law(4e-3)}, FAILS),
    ("fig8_precision", {"fp16": Law(1e-4)}, FAILS),
    ("fig8_precision", {"fp16": Law(4e-4, 0.0)}, FAILS),  # as far in the end, and 8 times as far before
    ("fig8_precision", {"fp16": None}, FAILS),  # BF16 weights are then what is judged, and they do more
    ("fig8_precision", {"fp16": Law(4.4e-4, 0.6, noise=0.2)}, UNDECIDED),
    ("fig8_precision", {"fp16": None, "bf16_weights": None}, NOT_MEASURED),
    ("fig8_rate", {}, HOLDS),
    ("fig8_rate", {"init_1": Law(0.0, start=1e-3), "init_2": Law(0.0, start=1e-3)}, FAILS),
    ("fig8_rate", {"fp16": Law(1e-5), "bf16_weights": Law(1e-5)}, FAILS),
    ("fig8_rate", {"init_1": None, "init_2": None}, NOT_MEASURED),
    ("fig8_ulp", {}, HOLDS),
    ("fig8_ulp", {"one_ulp": Law(1e-6)}, FAILS),
    ("fig8_ulp", {"one_ulp": Law(1.5e-4, noise=0.6)}, UNDECIDED),
    ("fig8_ulp", {"one_ulp": None}, NOT_MEASURED),
    ("fig8_order", {}, HOLDS),
    ("fig8_order", {"order": Law(1e-6)}, FAILS),
    ("fig8_ranks", {}, HOLDS),
    ("fig8_ranks", {"ranks_2": Law(1e-6)}, FAILS),
    ("restart_exact", {}, HOLDS),
    ("restart_exact", {"exact": Law(1e-9)}, FAILS),
    ("restart_lossy", {}, HOLDS),
    ("restart_lossy", {"lossy": Law(1e-5)}, FAILS),
    ("restart_lossy", {"one_ulp": None}, NOT_MEASURED),
    ("fig8_noise", {}, HOLDS),
    ("fig8_noise", {"noise_1": Law(2e-4)}, FAILS),
    ("fig8_noise", {"noise_1": Law(1e-4, noise=0.4)}, UNDECIDED),
    ("fig8_noise", {"noise_1": None}, NOT_MEASURED),
    ("fig8_dose", {}, HOLDS),
    ("fig8_dose", {"noise_1": Law(0.5e-4), "noise_4": Law(0.5e-4)}, FAILS),
    ("fig8_dose", {"noise_1": None, "noise_4": None, "noise_quarter": None}, NOT_MEASURED),
    ("fig8_dose_end", {}, FAILS),
    ("fig8_dose_end", {"noise_4": Law(1e-4), "noise_quarter": Law(1e-4)}, HOLDS),
    ("fig8_exact", {}, HOLDS),
    ("fig8_exact", {"from_exact_FP32_inside": Law(2e-4)}, FAILS),
    ("fig8_exact", {"from_exact_FP32_inside": None}, NOT_MEASURED),
    ("fig8_exact_bf16", {}, HOLDS),
    ("fig8_exact_bf16", {"golden": Law(2e-4)}, FAILS),
    ("training_fault", {}, HOLDS),
    ("training_fault", {"rate": Law(1e-4)}, FAILS),
    ("training_fault", {"rate": Law(0.0)}, UNDECIDED),
    ("training_sham", {}, HOLDS),
    ("training_sham", {"noise_0": Law(1e-9)}, FAILS),
    ("training_sham", {"sham": Law(1e-9)}, FAILS),
    ("training_sham", {"sham": None, "noise_0": None}, NOT_MEASURED),
]


@pytest.mark.parametrize(("claim", "laws", "verdict"), CASES)
def test_a_verdict_follows_from_the_laws(claim: str, laws: dict[str, Law | None], verdict: Verdict) -> None:
    assert find(claim, **laws).verdict is verdict


@pytest.mark.parametrize("claim", [name for name in OF_WEIGHTS if name != "training_sham"])
def test_a_sham_that_differs_makes_every_claim_void(claim: str) -> None:
    found = find(claim, sham=Law(1e-9))
    assert found.verdict is UNDECIDED
    assert found.sentence.startswith("Void: the sham")


HIDDEN = Law(1e-10, start=1e-10)  # one weight differs as before the first step: the cast to BF16 hides it
SEEN = Trained("one_ulp_of_bf16", Law(1.6e-4), {"ulp": 65536})


@pytest.mark.parametrize("claim", ["fig8_ulp", "restart_lossy"])
def test_a_control_that_does_not_act_divides_nothing(claim: str) -> None:
    found = find(claim, one_ulp=HIDDEN)
    assert found.verdict is UNDECIDED
    assert found.sentence.startswith("The control did not act: one ulp (in 3 of its replicates the Wasserstein")
    assert find(claim, one_ulp=Law(0.0)).sentence.startswith("The control did not act")
    both = CLAIMS[claim].find(rows_of([*ladder(one_ulp=HIDDEN), SEEN]))
    alone = CLAIMS[claim].find(rows_of([*(point for point in ladder() if point.label != "one_ulp"), SEEN]))
    assert (both.verdict, both.figure) == (alone.verdict, alone.figure)
    assert both.verdict is HOLDS
    assert "Left out, because the control did not act: one ulp (in 3 of its" in both.sentence


def test_a_control_that_does_not_act_widens_no_axis() -> None:
    rows = rows_of(ladder(one_ulp=HIDDEN))
    assert Group.ULP.words not in {axes.get_title(loc="left") for axes in FIGURES["training_ratio"](rows).axes}
    last = FIGURES["training_ladder"](rows).axes[0]
    assert last.get_xlim()[0] > 1e-6
    (text,) = (one for one in last.texts if one.get_text().startswith("←"))
    assert last.get_yticklabels()[round(float(text.xy[1]))].get_text() == "one ulp"  # type: ignore[attr-defined]
    assert FIGURES["training_ratio"](rows_of([Trained("one_ulp", HIDDEN, {"ulp": 1})])).axes is not None


@pytest.mark.parametrize("power", [0.3, 1.0])
def test_exponents_and_ratios_are_those_of_the_laws(power: float) -> None:
    own = rungs(rows_of(ladder(triton=Law(2e-4, power, noise=0.0))))
    rung = next(rung for rung in own if rung.name == "triton")
    for metric in (LARGEST, WASSERSTEIN):
        assert math.isclose(rung.exponent(metric).estimate, power, rel_tol=1e-9)
        assert rung.at(metric).to_numpy() == pytest.approx(2e-4 * SHAPE[metric], rel=1e-9)
    if power == 1:
        assert rung.rates().to_numpy() == pytest.approx(2e-4 / STEPS[-1], rel=1e-9)


@pytest.mark.parametrize(("since", "steps"), [(1.0, [256]), (0.25, [64, 128, 256]), (0.26, [128, 256]), (0.0, [*STEPS[1:]])])
def test_a_claim_is_judged_at_every_step_of_its_horizon(since: float, steps: list[int]) -> None:
    """The ratio of step^0.6 to step^0.5 has the same value at the last step, whatever the horizon, and its own at the others."""
    laws = {"triton": Law(1e-4, 0.5, noise=0.0), "fp16": Law(4e-4, 0.6, noise=0.0)}
    rows = rows_of([point for point in ladder(**laws) if point.label in ("sham", *laws)])
    found = weigh_times(rows, Region(2.0, 5.0), "precision", "flash", since=since)
    values = [question.value.estimate for question in found.questions]
    assert values == pytest.approx([4 * (step / 256) ** 0.1 for step in steps])
    assert found.p()[0] == max(question.p[0] for question in found.questions)


@pytest.mark.parametrize("power", [0.5, 1.0, 3.0])
def test_half_of_the_last_distance_is_reached_where_the_law_has_it(power: float) -> None:
    own = rungs(rows_of(ladder(triton=Law(2e-4, power, noise=0.0), sdpa_flash=Law(2e-4, power, until=64))))
    halves = {rung.name: rung.half_time() for rung in own}
    assert halves["triton"].estimate == pytest.approx(256 * 0.5 ** (1 / power))
    assert halves["sdpa flash"].count == 0, "it never reached the last step"


def test_a_claim_on_several_kernels_is_as_certain_as_on_the_least_certain_of_them() -> None:
    """Intersection-union: nothing is adjusted among kernels, and none is left out."""
    kernels = {"triton": Law(1e-4, noise=0.2), "sdpa_flash": Law(4e-4, noise=0.1), "tiled_bf16": Law(1e-4, noise=0.05)}
    each = [find("fig8", **{name: law if name == own else None for name, law in kernels.items()}).p for own in kernels]
    assert find("fig8", **kernels).p == pytest.approx(max(each))
    assert len({round(p, 9) for p in each}) == 3


def test_a_run_that_stopped_is_left_out_and_told() -> None:
    found = find("fig8", init_1=Law(8e-4, until=64))
    assert found.verdict is UNDECIDED
    assert "no run reached step 128" in found.sentence


REFERENCE: dict[str, Any] = {"variant.attention.type": "VanillaBackward", "variant.numerics": "autocast_bf16"}
REFERENCE |= {"variant.init": 0, "variant.order": 0, "variant.ulp": 0, "variant.ranks": 1, "variant.restart": "none"}
REFERENCE |= {"baseline.attention.type": "VanillaBackward", "baseline.numerics": "autocast_bf16"}


@pytest.mark.parametrize(
    ("changes", "group"),
    [
        ({}, Group.SHAM),
        ({"attention.type": "TritonBackward"}, Group.FLASH),
        ({"ulp": 1.0}, Group.ULP),
        ({"init": 2}, Group.INIT),
        ({"order": 1}, Group.ORDER),
        ({"ranks": 2}, Group.RANKS),
        ({"restart": "lossy"}, Group.RESTART),
        ({"numerics": "autocast_fp16"}, Group.PRECISION),
        ({"init": 1, "ulp": 1}, Group.OTHER),
        ({"attention.type": "TiledBackward", "noise": 1.0}, Group.NOISE),
        ({"attention.type": "TiledBackward", "noise": 0.0}, Group.SHAM),
        ({"attention.type": "TiledBackward", "noise": math.nan}, Group.FLASH),
        ({"attention.type": "TiledBackward", "noise": 1.0, "init": 1}, Group.OTHER),
        ({"attention.type": "RoundedBackward"}, Group.GOLDEN),
        ({"rate": 1.001}, Group.FAULT),
    ],
)
def test_a_rung_is_of_the_group_of_what_it_changes(changes: dict[str, Any], group: Group) -> None:
    assert group_of(REFERENCE | {f"variant.{field}": value for field, value in changes.items()}) is group


def test_flash_attention_compared_with_exact_is_of_a_group_of_its_own() -> None:
    exact = REFERENCE | {"baseline.attention.type": "RoundedBackward"}
    assert group_of(exact | {"variant.attention.type": "TiledBackward"}) is Group.FROM_GOLDEN
    assert group_of(exact | {"variant.attention.type": "RoundedBackward"}) is Group.SHAM


def test_a_rung_that_a_study_sets_aside_is_not_judged() -> None:
    aside = [Trained(p.label, Law(1.0), p.rung, p.against, "aside") if p.label == "tiled_bf16" else p for p in ladder()]
    assert CLAIMS["fig8"].find(rows_of(aside)).verdict is HOLDS


def test_replicates_that_are_points_are_read_as_one_point_was(tmp_path: Path) -> None:
    """A store of an earlier version has a point for all replicates."""
    whole, joined = (load(stored(tmp_path / str(apart), ladder(), apart=apart), kind=TRAINING) for apart in (False, True))
    for table in ("", "loss", "run"):
        ours, theirs = (one.study("fig8", table).drop(columns=["key", "seconds"], errors="ignore") for one in (joined, whole))
        pd.testing.assert_frame_equal(ours, theirs)
    assert not joined.missing
    assert joined.environments == whole.environments
    assert joined.points["seeds"].tolist() == [3] * len(ladder())


def test_results_of_an_earlier_version_are_judged_by_the_claims_of_this_one(tmp_path: Path) -> None:
    """Whose manifest states other options of the same function."""
    results = load(stored(tmp_path, ladder(), claims=("fig8",)), kind=TRAINING)
    judge_of = "numdev.report.studies.training:weigh_times"
    earlier = {"claim": "So", "judge": judge_of, "options": {"of": "flash", "to": "init", "is_": "no larger", "pooled": True}}
    results.manifests["fig8"]["stated_claims"] = {"fig8": earlier}
    assert claims_of(results)["fig8"] is CLAIMS["fig8"]
    own = {"claim": "So", "judge": judge_of, "below": 0.01, "options": {"of": "flash", "to": "init"}}
    results.manifests["fig8"]["stated_claims"] = {"fig8": own}
    (found,) = judge(claims_of(results), results)[0].findings.values()
    assert found.verdict is FAILS, "by its own bound"


def test_a_record_that_is_gone_leaves_the_verdict_partial(tmp_path: Path) -> None:
    store = stored(tmp_path, ladder(), claims=("fig8", "fig8_ulp"), apart=True)
    (store.path / "records" / "fig8-1-2.json").unlink()
    (one, _) = judge(CLAIMS, load(store, kind=TRAINING))
    (found,) = one.findings.values()
    assert found.verdict_text.startswith("holds, partial (p")
    assert found.sentence.startswith("Partial: 1 of 63 points are not measured yet: triton (seed 2). The Wasserstein")
    assert one.word == "reproduced, partial"


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> tuple[Store, Results]:
    store = stored(tmp_path_factory.mktemp("training"), ladder(), seeds=2, losses=True)
    return store, load(store, kind=TRAINING)


@pytest.mark.parametrize("name", ["training_ladder", "training_ratio", "training_weights"])
@pytest.mark.parametrize("there", [["sham"], ["sham", "one_ulp"], ["sham", "triton"]])
def test_a_figure_of_a_study_that_has_begun_can_be_drawn(name: str, there: list[str]) -> None:
    assert FIGURES[name](rows_of([point for point in ladder() if point.label in there])).axes is not None


@pytest.fixture(scope="module")
def drawn(toy: tuple[Store, Results]) -> dict[str, Figure]:
    results, figures = toy[1], {}
    for name in (name for name in FIGURES if name.startswith("training_")):
        figures[name] = FIGURES[name](results.study("fig8", FIGURES[name].table))
    return figures


@pytest.mark.parametrize("name", [name for name in FIGURES if name.startswith("training_")])
def test_words_of_a_figure_can_be_read(drawn: dict[str, Figure], name: str) -> None:
    figure = drawn[name]
    assert_legible(figure)
    assert_inside(figure)
    assert figure.get_size_inches()[1] < 9.5, "it is set on one page"
    shown = " ".join(text.get_text() for text in written(figure))
    assert "_" not in shown.replace("\\_", "").replace("^{", "").replace("$", ""), "no internal name is shown"
    for axes in figure.axes:
        assert_apart(axes)


def test_ratios_are_those_to_flash_attention(drawn: dict[str, Figure]) -> None:
    """One panel for each thing that differs, and in that of precision the laws' own ratio: step^0.6 over step^0.5."""
    panels = {axes.get_title(loc="left"): axes for axes in drawn["training_ratio"].axes if axes.get_title(loc="left")}
    assert "flash attention" not in panels
    line = next(one for one in panels["lower precision than FP32"].lines if np.size(one.get_xdata()) > 2)
    flash = (1e-4 * 0.9e-4 * 1.5e-4) ** (1 / 3)
    expected = [4.4e-4 / flash * (step / 256) ** 0.1 for step in STEPS[1:]]
    assert np.asarray(line.get_ydata(), float) == pytest.approx(expected, rel=0.1)  # laws have 1 % of noise, and of exponents
    assert panels["lower precision than FP32"].collections, "with its band"


@pytest.mark.parametrize(("steps", "block"), [(300, 1), (301, 2), (2000, 7)])
def test_the_losses_of_a_long_run_are_drawn_as_means_of_blocks(steps: int, block: int) -> None:
    rows = rows_of(ladder()[:1], seeds=1).iloc[:1].loc[lambda one: one.index.repeat(steps)]
    loss = np.random.default_rng(0).uniform(1.0, 2.0, steps)
    rows = rows.assign(step=np.arange(steps), loss=loss, baseline_loss=2 * loss)
    reference, run = draw_losses(rows).axes[0].lines
    starts = np.arange(0, steps, block)
    means = np.add.reduceat(loss, starts) / np.diff([*starts, steps])
    assert np.asarray(run.get_ydata(), float) == pytest.approx(means)
    assert np.asarray(reference.get_ydata(), float) == pytest.approx(2 * means)
    assert float(np.asarray(run.get_xdata())[0]) == (block - 1) / 2


def test_figure_8_shows_every_rung_and_that_an_exact_restart_is_zero(
    drawn: dict[str, Figure], toy: tuple[Store, Results]
) -> None:
    last, rate = drawn["training_ladder"].axes
    names = [label.get_text() for label in last.get_yticklabels()]
    assert names == [rung.name for rung in rungs(toy[1].study("fig8")) if rung.group is not Group.SHAM]
    assert len(last.containers) == len(rate.containers) == len(names) - 1
    (absent,) = (text for text in last.texts if text.get_text() == "0")
    assert names[round(float(absent.xy[1]))] == "exact"  # type: ignore[attr-defined]
