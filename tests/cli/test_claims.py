"""Claims in the file of a study: what is wrong with one is told when the study is loaded, by the field and the hint."""

from __future__ import annotations

from typing import Any

import pytest

from numdev.cli.claims import claims_of, plot_of
from numdev.cli.compose import composer, config_folder, study_fields
from numdev.cli.expand import Expander
from numdev.errors import BadInput
from numdev.results.claim import BASELINE, ClaimKind, ClaimStatement
from numdev.results.manifest import plain
from numdev.results.record import Reference
from numdev.results.study import Study

AXES: dict[str, list[Any]] = {"problem.n": [64, 128], "step": ["none", "scores"], "flag": [True, False]}
FIGURES = ("out.max_difference", "out.rmse", "lse.rmse")
SLOPE = {"claim": "It grows", "kind": "slope", "metric": "out.rmse", "over": "problem.n", "above": 0.1}
RATIO: dict[str, Any] = {
    "claim": "It is larger",
    "kind": "ratio",
    "metric": "out.rmse",
    "of": {"step": "scores"},
    "to": {"step": "none"},
}
RATIO |= {"above": 2}
ORDER = {"claim": "In order", "kind": "order", "metric": "out.rmse", "over": "step", "order": ["scores", "none"]}
SAME = {"claim": "Alike", "kind": "same", "metric": "out.rmse", "of": {"step": "scores"}, "to": "baseline", "margin": 1.2}


def read(*claims: Any) -> tuple[str | ClaimStatement, ...]:
    return claims_of(claims, AXES, FIGURES)


def test_every_kind_is_read() -> None:
    slope, ratio, order, same, name = read(SLOPE, RATIO, ORDER, SAME, "fig5a")
    assert slope == ClaimStatement("It grows", ClaimKind.SLOPE, "out.rmse", over="problem.n", above=0.1)
    assert ratio == ClaimStatement(
        "It is larger", ClaimKind.RATIO, "out.rmse", of={"step": "scores"}, to={"step": "none"}, above=2.0
    )
    assert order == ClaimStatement("In order", ClaimKind.ORDER, "out.rmse", over="step", order=("scores", "none"))
    assert same == ClaimStatement("Alike", ClaimKind.SAME, "out.rmse", of={"step": "scores"}, to=BASELINE, margin=1.2)
    assert name == "fig5a"
    (rest,) = read(SLOPE | {"reference": "baseline", "source": "A paper", "where": {"step": "none"}})
    assert isinstance(rest, ClaimStatement)
    assert (rest.reference, rest.source, rest.where) == (Reference.BASELINE, "A paper", {"step": "none"})


PARTS: dict[str, Any] = {"claim": "Both", "kind": "ratio", "metric": "out.rmse", "to": "baseline", "result": "{far}"}
PARTS |= {"parts": {"far": {"of": {"step": "scores"}, "above": 2}, "beside": {"metric": "lse.rmse", "also": "It is {value}."}}}
ROLES: dict[str, Any] = {
    "claim": "Alike",
    "kind": "same",
    "metric": "out.rmse",
    "each": "step",
    "to": {"step": {"role": "control"}},
}
JUDGED: dict[str, Any] = {
    "claim": "So",
    "judge": "mine.study:weigh",
    "options": {"most": 2},
    "name": "mine",
    "says": {"fails": "No."},
}


@pytest.mark.parametrize("own", [SLOPE, RATIO, ORDER, SAME, PARTS, ROLES, JUDGED])
def test_a_manifest_keeps_all_of_it(own: dict[str, Any]) -> None:
    (claim,) = read(own)
    assert isinstance(claim, ClaimStatement)
    assert ClaimStatement.read(plain(claim)) == claim


@pytest.mark.parametrize(
    ("own", "error"),
    [
        (7, "claims[1]: 7 cannot be used; give the fields of a claim, claim, kind, metric, "),
        (SLOPE | {"abov": 1}, "claims[1].abov: 1 cannot be used; ClaimStatement takes no such argument; did you mean above"),
        (SLOPE | {"metric": "out.rsme"}, "claims[1].metric: 'out.rsme' cannot be used; did you mean out.rmse"),
        (SLOPE | {"metric": None}, "claims[1].metric: None cannot be used; use one of out.max_difference, out.rmse, lse.rmse"),
        (SLOPE | {"kind": "trend"}, "claims[1].kind: 'trend' cannot be used; use one of slope, ratio, order, same"),
        (SLOPE | {"kind": None}, "claims[1].kind: None cannot be used; use one of slope, ratio, order, same"),
        (SLOPE | {"reference": "gold"}, "claims[1].reference: 'gold' cannot be used; did you mean golden"),
        (SLOPE | {"claim": ""}, "claims[1].claim: '' cannot be used; give the claim as a sentence"),
        (SLOPE | {"claim": 7}, "claims[1].claim: 7 cannot be used; give text"),
        (SLOPE | {"over": "problem.m"}, "claims[1].over: 'problem.m' cannot be used; did you mean problem.n"),
        (
            SLOPE | {"over": "step"},
            "claims[1].over: 'step' cannot be used; a slope is over positive numbers, and its entries are ",
        ),
        (SLOPE | {"above": None}, "claims[1].above: None cannot be used; give a number from which on the claim holds"),
        (SLOPE | {"above": "0,1"}, "claims[1].above: '0,1' cannot be used; give a number"),
        (SLOPE | {"below": 0.1}, "claims[1].below: 0.1 cannot be used; nothing lies between above and below"),
        (SLOPE | {"below": float("nan")}, "claims[1].below: nan cannot be used; give a finite number"),
        (SLOPE | {"margin": 1.1}, "claims[1].margin: 1.1 cannot be used; a claim of the kind slope has over, above, below"),
        (
            SLOPE | {"where": {"steps": "none"}},
            "claims[1].where: 'steps' cannot be used; it is no axis of the study; did you mean s",
        ),
        (SLOPE | {"where": {"step": "non"}}, "claims[1].where.step: 'non' cannot be used; did you mean none"),
        (
            SLOPE | {"where": {"problem.n": 64}},
            "claims[1].where: {'problem.n': 64} cannot be used; it leaves one entry of problem.n",
        ),
        (SLOPE | {"where": "none"}, "claims[1].where: 'none' cannot be used; give names with values"),
        (RATIO | {"above": -1}, "claims[1].above: -1.0 cannot be used; a ratio of deviations is positive"),
        (RATIO | {"to": None}, "claims[1].to: '' cannot be used; give entries of axes, {axis: entry}, or baseline"),
        (
            RATIO | {"to": {"flag": True}},
            "claims[1].of: {'step': 'scores'} cannot be used; name the same axes as in to, which are fl",
        ),
        (RATIO | {"to": {"step": "scores"}}, "claims[1].to: {'step': 'scores'} cannot be used; it is the same as of"),
        (RATIO | {"where": {"step": "none"}}, "claims[1].where: {'step': 'none'} cannot be used; of states step too"),
        (
            SAME | {"reference": "baseline"},
            "claims[1].reference: 'baseline' cannot be used; a baseline does not deviate from itself",
        ),
        (SAME | {"margin": 0.9}, "claims[1].margin: 0.9 cannot be used; give the factor within which two are the same, above 1"),
        (ORDER | {"order": ["none"]}, "claims[1].order: ['none'] cannot be used; give two or more different entries of step"),
        (ORDER | {"order": "none"}, "claims[1].order: 'none' cannot be used; give a list"),
        ({"claim": "So", "judge": "weigh"}, "claims[1].judge: 'weigh' cannot be used; give a function as module:name"),
        (SLOPE | {"result": "N^{valu}"}, "claims[1].result: 'N^{valu}' cannot be used; it may name value, list, low"),
        (SLOPE | {"finding": "N^{value"}, "claims[1].finding: 'N^{value' cannot be used; give every brace a partner"),
        (SLOPE | {"rmse": 1}, "claims[1].rmse: 1 cannot be used; give true or false"),
        (
            RATIO | {"above": None, "parts": {"far": {"above": "2"}}},
            "claims[1].parts.far.above: '2' cannot be used; give a number",
        ),
        (
            RATIO | {"parts": {"far": {"metric": "out.rsme"}}},
            "claims[1].parts.far.metric: 'out.rsme' cannot be used; did you mean out.rmse",
        ),
        (
            RATIO | {"parts": {"far": {"claim": "It is"}}},
            "claims[1].parts.far.claim: 'It is' cannot be used; a part of a claim has no such field",
        ),
        (
            RATIO | {"to": {"step": {"role": "controls"}}},
            "claims[1].to.step.role: 'controls' cannot be used; did you mean control",
        ),
        (ORDER | {"order": ["none", "score"]}, "claims[1].order: 'score' cannot be used; did you mean scores"),
    ],
)
def test_a_mistake_is_told_by_its_field_with_the_mend(own: Any, error: str) -> None:
    with pytest.raises(BadInput) as raised:
        read(SLOPE, own)
    assert str(raised.value).startswith(error)


def loaded(**parts: Any) -> Study:
    axes = {"problem.n": [32, 64], "step": {"none": None, "scores": {"precision.scores": "fp32"}}}
    base = {"problem.head_dim": 8, "seeds": 2}
    fields = study_fields("mine", {"title": "Mine", "base": base, "axes": axes} | parts)
    return Expander(composer((config_folder(),))).study("mine", fields)


def test_a_study_has_its_question_and_its_claims() -> None:
    made = loaded(claims=["fig5a", SLOPE], question="Does it grow?")
    manifest = made.manifest(["k"] * len(made.points), "deviation")
    assert manifest["question"] == "Does it grow?"
    assert manifest["claims"] == ["fig5a", "mine_2"]
    assert list(manifest["stated_claims"]) == ["mine_2"]
    assert ClaimStatement.read(manifest["stated_claims"]["mine_2"]) == made.claims[1]


def test_the_outputs_and_metrics_are_the_operations() -> None:
    with pytest.raises(BadInput, match=r"claims\[0\]\.metric: 'dq\.rmse' cannot be used; .* \(study mine\)$"):
        loaded(claims=[SLOPE | {"metric": "dq.rmse"}])


def test_the_axes_are_those_of_any_scenario() -> None:
    own = {"plain": {"title": "plain"}, "more": {"title": "more", "axes": {"tiling.bc": [8, 16]}}}
    made = loaded(claims=[SLOPE | {"over": "tiling.bc"}], scenarios=own)
    assert isinstance(made.claims[0], ClaimStatement)
    with pytest.raises(BadInput, match=r"claims\[0\]\.where\.tiling\.bc: 32 cannot be used; use one of 8, 16"):
        loaded(claims=[SLOPE | {"where": {"tiling.bc": 32}}], scenarios=own)


def test_the_command_line_may_leave_one_value_of_an_axis_that_a_claim_compares() -> None:
    axes = {"problem.n": [32, 64]}
    fields = study_fields("mine", {"title": "Mine", "axes": axes, "claims": [SLOPE | {"where": {}}]})
    made = Expander(composer((config_folder(),)), {"problem.n": 32}).study("mine", fields)
    assert len(made.points) == 1
    assert len(made.claims) == 1


def of_command(claim: dict[str, Any], program: str, operation: str) -> tuple[str | ClaimStatement, ...]:
    """The claims of a study with two entries on an axis, as a command loads it."""
    entries = (
        {"a": {"rung.repeat": 1}, "b": {}} if program == "train" else {"a": {"precision": "bf16"}, "b": {"precision": "fp16"}}
    )
    fields = study_fields("mine", {"title": "Mine", "axes": {"rung": entries}, "claims": [{"claim": "So", **claim}]})
    name = {"train": "train", "speed": "speed"}[program]
    return Expander(composer((config_folder(),), name, operation), program=program).study("mine", fields).claims


OF = {"kind": "ratio", "of": {"rung": "a"}, "to": {"rung": "b"}, "above": 2}


@pytest.mark.parametrize(
    ("program", "operation", "claim"),
    [
        ("speed", "attention", {**OF, "metric": "latency"}),
        ("speed", "attention", {**OF, "metric": "tflops"}),
        ("speed", "attention", {**OF, "metric": "rmse"}),
        ("speed", "attention", {**OF, "metric": "out.rmse"}),
        ("speed", "attention_backward", {**OF, "metric": "dq.rmse"}),
        ("train", "training", {**OF, "metric": "relative_frobenius"}),
        ("train", "training", {**OF, "metric": "held_out_loss"}),
    ],
)
def test_claims_on_speed_and_training_compare_what_these_have(program: str, operation: str, claim: dict[str, Any]) -> None:
    (found,) = of_command(claim, program, operation)
    assert isinstance(found, ClaimStatement)
    assert found.metric == claim["metric"]


@pytest.mark.parametrize(
    ("program", "operation", "metric"), [("speed", "attention", "lse.rmse"), ("train", "training", "out.rmse")]
)
def test_a_metric_that_they_lack_is_refused_when_the_study_is_loaded(program: str, operation: str, metric: str) -> None:
    with pytest.raises(BadInput, match=rf"^claims\[0\]\.metric: '{metric}' .* \(study mine\)$"):
        of_command({**OF, "metric": metric}, program, operation)


@pytest.mark.parametrize(
    ("parts", "error"),
    [
        (
            {"figures": {"mine": {"draw": "draw", "about": "It."}}},
            "figures.mine.draw: 'draw' cannot be used; give a function",
        ),
        ({"figures": {"mine": {"draw": "m:draw"}}}, "figures.mine.about: None cannot be used; describe it for those who cannot"),
        (
            {"figures": {"mine": {"drawn": "m:draw"}}},
            "figures.mine.drawn: 'm:draw' cannot be used; a figure has no such part",
        ),
        ({"table": "mine"}, "table: 'mine' cannot be used; give a function as module:name"),
    ],
)
def test_a_mistake_in_what_draws_a_study_is_told(parts: dict[str, Any], error: str) -> None:
    with pytest.raises(BadInput) as raised:
        loaded(**parts)
    assert str(raised.value).startswith(error)


def test_a_manifest_has_what_a_report_says_of_a_study() -> None:
    drawn = {"mine": {"draw": "mine.study:draw", "about": "Lines."}}
    made = loaded(figure="mine", figures=drawn, measured="On toys.", source="A paper says so.", place=7)
    manifest = made.manifest(["k"] * len(made.points), "deviation")
    assert [manifest[name] for name in ("figures", "measured", "source", "place")] == [drawn, "On toys.", "A paper says so.", 7]


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
        ({**SHOWN, "color": "step"}, "plot.color: 'step' cannot be used; a figure has no such part; did you mean colour"),
        ({**SHOWN, "facet": ["stp"]}, "plot.facet: 'stp' cannot be used; did you mean step"),
        ("x: [problem.n, y: out.rmse", "plot: 'x: [problem.n, y: out.rmse' cannot be used; give it as in x: problem.n"),
        (7, "plot: 7 cannot be used; give it as in x: problem.n, y: out.rmse"),
    ],
)
def test_a_mistake_in_a_figure_is_named_by_its_part(plot: Any, error: str) -> None:
    with pytest.raises(BadInput) as raised:
        plot_of(plot, AXES, FIGURES)
    assert str(raised.value).startswith(error)
