"""Claims in the file of a study: what is wrong with one is told when the study is loaded, by the field and the hint."""

from __future__ import annotations

from typing import Any

import pytest

from numdev.cli.compose import composer, config_folder, study_fields
from numdev.cli.expand import Expander, claims_of, plot_of
from numdev.errors import BadInput
from numdev.results.claim import BASELINE, ClaimKind, ClaimStatement
from numdev.results.record import Reference, plain
from numdev.results.study import Study

AXES: dict[str, list[Any]] = {"problem.n": [64, 128], "step": ["none", "scores"], "flag": [True, False]}
FIGURES = ("out.max_difference", "out.rmse", "lse.rmse")
RMSE: dict[str, Any] = {"claim": "It is so", "metric": "out.rmse"}
SLOPE = RMSE | {"kind": "slope", "over": "problem.n", "above": 0.1}
RATIO = RMSE | {"kind": "ratio", "of": {"step": "scores"}, "to": {"step": "none"}, "above": 2}
ORDER = RMSE | {"kind": "order", "over": "step", "order": ["scores", "none"]}
SAME = RMSE | {"kind": "same", "of": {"step": "scores"}, "to": "baseline", "margin": 1.2}


def read(*claims: Any) -> tuple[str | ClaimStatement, ...]:
    return claims_of(claims, AXES, FIGURES)


def test_a_name_is_a_claim_of_another_study_and_fields_make_one() -> None:
    same, name = read(SAME | {"reference": "golden_same_inputs", "source": "A paper"}, "fig5a")
    own: dict[str, Any] = {"of": {"step": "scores"}, "to": BASELINE, "margin": 1.2, "source": "A paper"}
    assert same == ClaimStatement("It is so", ClaimKind.SAME, "out.rmse", Reference.GOLDEN_SAME_INPUTS, **own)
    assert name == "fig5a"


PARTS = RMSE | {"kind": "ratio", "to": "baseline", "result": "{far}"}
PARTS |= {"parts": {"far": {"of": {"step": "scores"}, "above": 2}, "beside": {"metric": "lse.rmse", "also": "It is {value}."}}}
ROLES = RMSE | {"kind": "same", "each": "step", "to": {"step": {"role": "control"}}}
JUDGED = {"claim": "So", "judge": "mine.study:weigh", "options": {"most": 2}, "name": "mine", "says": {"fails": "No."}}


@pytest.mark.parametrize("own", [SLOPE, RATIO, ORDER, SAME, PARTS, ROLES, JUDGED])
def test_a_manifest_keeps_all_of_it(own: dict[str, Any]) -> None:
    (claim,) = read(own)
    assert isinstance(claim, ClaimStatement)
    assert ClaimStatement.read(plain(claim)) == claim


@pytest.mark.parametrize(
    ("own", "field", "hint"),
    [
        (7, ": 7", "give the fields of a claim, claim, kind, metric, "),
        (SLOPE | {"abov": 1}, "abov: 1", "ClaimStatement takes no such argument; did you mean above"),
        (SLOPE | {"metric": "out.rsme"}, "metric: 'out.rsme'", "did you mean out.rmse"),
        (SLOPE | {"metric": None}, "metric: None", "use one of out.max_difference, out.rmse, lse.rmse"),
        (SLOPE | {"kind": "trend"}, "kind: 'trend'", "use one of slope, ratio, order, same"),
        (SLOPE | {"kind": None}, "kind: None", "use one of slope, ratio, order, same"),
        (SLOPE | {"claim": ""}, "claim: ''", "give the claim as a sentence"),
        (SLOPE | {"over": "problem.m"}, "over: 'problem.m'", "did you mean problem.n"),
        (SLOPE | {"over": "step"}, "over: 'step'", "a slope is over positive numbers, and its entries are "),
        (SLOPE | {"above": None}, "above: None", "give a number from which on the claim holds"),
        (SLOPE | {"below": 0.1}, "below: 0.1", "nothing lies between above and below"),
        (SLOPE | {"below": float("nan")}, "below: nan", "give a finite number"),
        (SLOPE | {"margin": 1.1}, "margin: 1.1", "a claim of the kind slope has over, above, below"),
        (SLOPE | {"where": {"steps": "none"}}, "where: 'steps'", "did you mean step"),
        (SLOPE | {"where": {"step": "non"}}, "where.step: 'non'", "did you mean none"),
        (SLOPE | {"where": {"problem.n": 64}}, "where: {'problem.n': 64}", "it leaves one entry of problem.n"),
        (SLOPE | {"where": "none"}, "where: 'none'", "give names with values"),
        (RATIO | {"above": -1}, "above: -1.0", "a ratio of deviations is positive"),
        (RATIO | {"to": None}, "to: ''", "give entries of axes, {axis: entry}, or baseline"),
        (RATIO | {"to": {"flag": True}}, "of: {'step': 'scores'}", "name the same axes as in to, which are fl"),
        (RATIO | {"to": {"step": "scores"}}, "to: {'step': 'scores'}", "it is the same as of"),
        (RATIO | {"where": {"step": "none"}}, "where: {'step': 'none'}", "of states step too"),
        (SAME | {"reference": "baseline"}, "reference: 'baseline'", "a baseline does not deviate from itself"),
        (SAME | {"margin": 0.9}, "margin: 0.9", "give the factor within which two are the same, above 1"),
        (ORDER | {"order": ["none"]}, "order: ['none']", "give two or more different entries of step"),
        (ORDER | {"order": "none"}, "order: 'none'", "give a list"),
        ({"claim": "So", "judge": "weigh"}, "judge: 'weigh'", "give a function as module:name"),
        (SLOPE | {"result": "N^{valu}"}, "result: 'N^{valu}'", "it may name value, list, low"),
        (SLOPE | {"finding": "N^{value"}, "finding: 'N^{value'", "give every brace a partner"),
        (RATIO | {"above": None, "parts": {"far": {"above": "2"}}}, "parts.far.above: '2'", "give a number"),
        (RATIO | {"parts": {"far": {"metric": "out.rsme"}}}, "parts.far.metric: 'out.rsme'", "did you mean out.rmse"),
        (
            RATIO | {"parts": {"far": {"claim": "It is"}}},
            "parts.far.claim: 'It is'",
            "a part of a claim has no claim; use",
        ),
        (RATIO | {"to": {"step": {"role": "controls"}}}, "to.step.role: 'controls'", "did you mean control"),
        (ORDER | {"order": ["none", "score"]}, "order: 'score'", "did you mean scores"),
    ],
)
def test_a_mistake_is_told_by_its_field_with_the_mend(own: Any, field: str, hint: str) -> None:
    with pytest.raises(BadInput) as raised:
        read(SLOPE, own)
    whole = str(raised.value).removeprefix("claims[1]").removeprefix(".")
    assert whole.startswith(f"{field} cannot be used; {hint}")


def loaded(**parts: Any) -> Study:
    axes = {"problem.n": [32, 64], "step": {"none": None, "scores": {"precision.scores": "fp32"}}}
    base = {"problem.head_dim": 8, "seeds": 2}
    fields = study_fields("mine", {"title": "Mine", "base": base, "axes": axes} | parts)
    return Expander(composer((config_folder(),))).study("mine", fields)


def test_a_study_has_its_question_and_its_claims() -> None:
    made = loaded(claims=["fig5a", SLOPE], question="Does it grow?", measured="On toys.", source="A paper says so.", place=7)
    manifest = made.manifest(["k"] * len(made.points), "deviation")
    words = [manifest[name] for name in ("question", "measured", "source", "place")]
    assert words == ["Does it grow?", "On toys.", "A paper says so.", 7]
    assert manifest["claims"] == ["fig5a", "mine_2"]
    assert list(manifest["stated_claims"]) == ["mine_2"]
    assert ClaimStatement.read(manifest["stated_claims"]["mine_2"]) == made.claims[1]


def test_the_axes_are_those_of_any_scenario() -> None:
    own = {"plain": {"title": "plain"}, "more": {"title": "more", "axes": {"tiling.bc": [8, 16]}}}
    made = loaded(claims=[SLOPE | {"over": "tiling.bc"}], scenarios=own)
    assert isinstance(made.claims[0], ClaimStatement)
    with pytest.raises(BadInput, match=r"claims\[0\]\.where\.tiling\.bc: 32 cannot be used; use one of 8, 16"):
        loaded(claims=[SLOPE | {"where": {"tiling.bc": 32}}], scenarios=own)


@pytest.mark.parametrize(
    ("program", "operation", "metrics", "lacks"),
    [
        ("speed", "attention", ["latency", "tflops", "rmse", "out.rmse"], "lse.rmse"),
        ("speed", "attention_backward", ["dq.rmse"], "out.rmse"),
        ("train", "training", ["relative_frobenius", "held_out_loss"], "out.rmse"),
    ],
)
def test_claims_on_speed_and_training_compare_what_these_have(
    program: str, operation: str, metrics: list[str], lacks: str
) -> None:
    entries = {"a": {"seeds": 1}, "b": {"seeds": 2}}
    own = {"claim": "So", "kind": "ratio", "of": {"rung": "a"}, "to": {"rung": "b"}, "above": 2}
    expander = Expander(composer((config_folder(),), program, operation), program=program)
    fields = study_fields("mine", {"title": "Mine", "axes": {"rung": entries}})
    made = expander.study("mine", fields | {"claims": [{**own, "metric": metric} for metric in metrics]})
    assert [claim.metric for claim in made.claims if isinstance(claim, ClaimStatement)] == metrics
    with pytest.raises(BadInput, match=rf"^claims\[0\]\.metric: '{lacks}' .* \(study mine\)$"):
        expander.study("mine", fields | {"claims": [{**own, "metric": lacks}]})


@pytest.mark.parametrize(
    ("figure", "error"),
    [
        ({"draw": "draw", "about": "It."}, "draw: 'draw' cannot be used; give a function"),
        ({"draw": "m:draw"}, "about: None cannot be used; describe it for those who cannot"),
        ({"drawn": "m:draw"}, "drawn: 'm:draw' cannot be used; a figure has no drawn; "),
    ],
)
def test_a_mistake_in_what_draws_a_study_is_told(figure: dict[str, str], error: str) -> None:
    with pytest.raises(BadInput) as raised:
        loaded(figures={"mine": figure})
    assert str(raised.value).startswith(f"figures.mine.{error}")


SHOWN = {"x": "problem.n", "y": "out.rmse"}


def test_a_figure_in_words_and_as_a_mapping_says_the_same() -> None:
    full = {**SHOWN, "colour": "step", "facet": ["scenario.title"], "reference": "baseline"}
    text = "x: problem.n, y: out.rmse, colour: step, facet: [scenario.title], reference: baseline"
    assert plot_of(full, AXES, FIGURES) == plot_of(text, AXES, FIGURES) == {**full, "colour": ["step"]}
    assert plot_of({**SHOWN, "colour": []}, AXES, FIGURES) == SHOWN


@pytest.mark.parametrize(
    ("plot", "error"),
    [
        ("x: problem.m, y: out.rmse", "plot.x: 'problem.m' cannot be used; did you mean problem.n"),
        ("x: problem.n, y: out.rsme", "plot.y: 'out.rsme' cannot be used; did you mean out.rmse"),
        ("x: problem.n", "plot.y: None cannot be used; name what stands on this axis"),
        ({**SHOWN, "color": "step"}, "plot.color: 'step' cannot be used; a figure has no color; did you mean colour"),
        ({**SHOWN, "facet": ["stp"]}, "plot.facet: 'stp' cannot be used; did you mean step"),
        ("x: [problem.n, y: out.rmse", "plot: 'x: [problem.n, y: out.rmse' cannot be used; give it as in x: problem.n"),
        (7, "plot: 7 cannot be used; give it as in x: problem.n, y: out.rmse"),
    ],
)
def test_a_mistake_in_a_figure_is_named_by_its_part(plot: Any, error: str) -> None:
    with pytest.raises(BadInput) as raised:
        plot_of(plot, AXES, FIGURES)
    assert str(raised.value).startswith(error)
