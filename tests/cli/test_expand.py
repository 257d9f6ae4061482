"""Studies: their points, and what is wrong with a file of one, in its grid, a claim or a figure, by the field and the hint."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest

from numdev.attention.captured import Captured
from numdev.attention.instrumented import Instrumented
from numdev.attention.problem import BackwardProblem, Problem
from numdev.attention.softmax import Normalise
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.vendor.sdpa import Sdpa
from numdev.cli import build
from numdev.cli.compose import composer, study_fields
from numdev.cli.expand import Expander, claims_of, plot_of
from numdev.errors import BadInput
from numdev.measurement.deviation import Deviations
from numdev.measurement.invariance import KIND, Invariances
from numdev.measurement.runner import Runner
from numdev.results.claim import BASELINE, ClaimKind, ClaimStatement
from numdev.results.record import Reference, plain
from numdev.results.store import EntryRole, Role, Scenario
from numdev.results.study import Study, StudyPoint
from numdev.sources import config_folder
from numdev.training.mismatch import Mismatches
from numdev.training.mismatch import Problem as Predicted
from numdev.training.rung import Rung
from numdev.training.weights import WeightsOverTraining
from tests.training.toy import Toy

LIBRARY = composer((config_folder(),))


def study(task: dict[str, Any] | None = None, /, **parts: Any) -> Study:
    return Expander(LIBRARY, task or {}).study("toy", study_fields("toy", {"title": "Toy"} | parts))


def tiled(point: StudyPoint) -> Tiled:
    assert isinstance(point.variant, Tiled)
    return point.variant


class TestGrid:
    def test_is_the_product_of_the_axes_in_order(self) -> None:
        made = study(axes={"precision": ["bf16", "fp16"], "tiling.bc": [16, 32]})
        labels = [point.labels for point in made.points]
        assert labels == [{"precision": p, "tiling.bc": bc} for p in ("bf16", "fp16") for bc in (16, 32)]
        assert [tiled(point).tiling.bc for point in made.points] == [16, 32, 16, 32]
        assert [point.variant.precision.name for point in made.points] == ["bf16", "bf16", "fp16", "fp16"]

    def test_scenarios_replace_and_add_axes(self) -> None:
        own = {"problem": "captured", "axes": {"tiling.bc": [8], "problem.n": [64, 128, 256]}}
        axes = {"precision": ["bf16", "fp16"], "tiling.bc": [16, 32, 64]}
        made = study(base={"problem.n": 1024}, scenarios={"plain": {"softmax": "fa1"}, "own": own}, axes=axes)
        plain, captured = made.points[:6], made.points[6:]
        assert {(tiled(point).softmax.normalise, point.problem.shape.keys) for point in plain} == {(Normalise.EACH, 1024)}
        assert {(tiled(point).tiling.bc, point.problem.shape.keys) for point in captured} == {(8, 64), (8, 128), (8, 256)}
        assert {type(point.problem.source) for point in captured} == {Captured}
        assert {point.scenario: len(captured) for point in made.points} == {"plain": 6, "own": 6}

    def test_names_with_settings(self) -> None:
        steps = {"scores": {"precision.scores": "bf16"}, "both": {"precision.scores": "bf16", "precision.values": "bf16"}}
        made = study(base={"precision": "kernel_bf16"}, axes={"step": {"none": None} | steps})
        assert [point.labels for point in made.points] == [{"step": "none"}, {"step": "scores"}, {"step": "both"}]
        steps_of = [tiled(point).precision.steps() for point in made.points]
        assert [(each["scores"], each["values"]) for each in steps_of] == [("fp32", "fp32"), ("bf16", "fp32"), ("bf16", "bf16")]

    def test_names_with_like_settings_share_an_entry(self) -> None:
        step = {"none": None, "steps": {"each": ["scores", "values"], "precision.@": "fp16"}}
        own = {"none": None, "scores": {"precision.scores": "fp16"}, "values": {"precision.values": "fp16"}}
        assert study(axes={"step": step}).points == study(axes={"step": own}).points
        like = {"tile @": {"each": [16, 32], "tiling.bc": "@", "precision.values": "e8m@", "precision.row_sum": "bf16@16"}}
        each = {f"tile {n}": {"tiling.bc": n, "precision.values": f"e8m{n}", "precision.row_sum": "bf16@16"} for n in (16, 32)}
        assert study(axes={"tile": like}).points == study(axes={"tile": each}).points

    @pytest.mark.parametrize(("own", "folder"), [(None, ""), ("my own", "--config-dir 'my own' ")])
    def test_carries_the_command_that_measures_it(self, own: str | None, folder: str) -> None:
        expander = Expander(composer((config_folder(),)), {"seeds": 2}, "speed", own)
        assert expander.study("s", study_fields("s", {"title": "t"})).command == f"numdev speed {folder}study=s seeds=2"

    def test_equal_points_are_one(self) -> None:
        assert len(study(axes={"tiling.bc": [16, 16, 32]}).points) == 2


class TestPrecedence:
    def test_later_layers_stand_above_earlier_ones(self) -> None:
        parts = {"base": {"tiling.bc": 1}, "scenarios": {"s": {"tiling.bc": 2}}, "axes": {"tiling.bc": [3]}}
        found = []
        for keep in ((), ("base",), ("base", "scenarios"), ("base", "scenarios", "axes")):
            found.append(tiled(study(**{name: parts[name] for name in keep}).points[0]).tiling.bc)
        assert found == [64, 1, 2, 3]
        assert tiled(study({"tiling.bc": 4}, **parts).points[0]).tiling.bc == 4

    def test_the_command_line_leaves_one_value_of_an_axis(self) -> None:
        made = study({"precision": "fp64", "tiling.bc": 8}, axes={"precision": ["bf16", "fp16"], "tiling.bc": [16, 32]})
        assert [point.labels for point in made.points] == [{"precision": "fp64", "tiling.bc": 8}]
        assert tiled(made.points[0]).precision.name == "fp64"

    def test_the_command_line_denies_no_name(self) -> None:
        size = {"small": {"tiling.bc": 16}, "large": {"tiling.bc": 64, "tiling.br": 32}, "own": {"tiling.br": 8}}
        made = study({"tiling.bc": 16}, axes={"size": size})
        small, large, own = made.points
        assert (tiled(small).tiling.bc, tiled(own).tiling.bc) == (16, 16)
        assert large.refused.startswith("tiling.bc: 16 cannot be used; the points size=large stand for tiling.bc=64")
        assert small.refused == own.refused == ""

    def test_no_variant_goes_under_the_name_of_another(self) -> None:
        kernel = {"simple": {"attention": "vanilla"}, "theirs": {"attention": "sdpa"}}
        simple, theirs = study({"attention": "sdpa"}, axes={"kernel": kernel}).points
        assert "the points kernel=simple stand for attention" in simple.refused
        assert (theirs.refused, theirs.variant) == ("", Sdpa())

    def test_references_follow_the_axes(self) -> None:
        made = study(base={"tiling.bc": "${problem.n}"}, axes={"problem.n": [32, 64]})
        assert [tiled(point).tiling.bc for point in made.points] == [32, 64]


class TestBadStudies:
    @pytest.mark.parametrize(
        ("parts", "words"),
        [
            ({"axes": {"tiling.bcc": [1]}}, r"tiling\.bcc: 1 .*did you mean tiling\.bc.*\(study toy, scenario default\)"),
            ({"axes": {"precision": ["bf17"]}}, r"precision: 'bf17' .*did you mean bf16"),
            ({"axes": {"precision": []}}, r"study: 'toy' .*no points"),
            ({"axes": {"problem.n": 64}}, r"axes\.problem\.n: 64 .*a list"),
            ({"axes": {"step": {"one": 3}}}, r"axes\.step\.one: 3 .*setting: value"),
            ({"scenarios": {"s": ["uniform"]}}, r"study\.scenarios\.s: \['uniform'\]"),
            ({"scenarios": {"s": {"role": "papers"}}}, r"study\.scenarios\.s\.role: 'papers' .*paper"),
            ({"axes": {"step": {"one": {"role": "star"}}}}, r"axes\.step\.one\.role: 'star' .*control"),
            ({"scenarios": {"s": {"title": " "}}}, r"study\.scenarios\.s\.title: ' ' .*in words"),
            ({"axess": {}, "claim": []}, r"study: 'toy' .*no field axess; did you mean axes"),
            ({"base": {"device": "cpu"}}, r"device: 'cpu' .*command line"),
            ({"base": {"tiling": {"bc": 0}}}, r"tiling: "),
            ({"base": {"tiling.bc": 0}}, r"tiling\.bc: 0 .*at least 1 \(study toy, scenario default\)"),
            ({"title": "???"}, r"study: 'toy' .*title"),
        ],
    )
    def test_name_what_cannot_be_used(self, parts: dict[str, Any], words: str) -> None:
        with pytest.raises(BadInput, match=words):
            study(**parts)


# fig7 and fig8 have as much; routers and kernels have tests of their own
LONG = ("fig7_full", "fig8_full", "router", "validate", "validate_backward")


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[pytest.mark.slow] * (each in LONG)) for each in LIBRARY.options("study")]
)
def test_every_study_runs_at_toy_size(name: str, tmp_path: Path) -> None:
    from numdev.measurement.studies import run
    from numdev.results.record import Status
    from numdev.results.store import Store

    expander = Expander(LIBRARY, {"seeds": 2}).of(name)
    made = expander.study(name, LIBRARY.study(name))
    assert [point.refused for point in made.points if point.refused] == [], "its variants honour all that it states"
    operation = build.node({"operation": expander.composer.of}, "operation")
    trains = operation.golden is None
    kinds = {KIND: Invariances, "mismatch": Mismatches}
    kind = WeightsOverTraining if trains else kinds.get(str(LIBRARY.study(name).get("kind")), Deviations)
    bench = Runner(kind(operation), "cpu")
    by_scenario = {key: [p for p in made.points if p.scenario == key] for key in LIBRARY.study(name)["scenarios"]}
    assert all(by_scenario.values())
    last = 2 if trains else -1  # behind it lie processes of several ranks, and kernels that an interpreter runs
    ends = tuple(small(point) for points in by_scenario.values() for point in (points[0], points[last]))
    store = Store(tmp_path)
    outcome = run(replace(made, points=ends), bench, store)
    assert Status.ERROR not in outcome.statuses
    assert outcome.measured == len(list(store.records()))
    for record in store.records():
        lacks = record.status is Status.UNSUPPORTED and re.search("CUDA|compute capability|not installed", record.reason)
        assert record.status is Status.OK or lacks, record.reason
    assert Status.OK in {record.status for record in store.records()} or name in (
        "fp8_kernel",
        "fa3_table3_kernel",
    )  # of a GPU alone
    assert store.studies()[name]["title"] == made.title


def small(point: StudyPoint) -> StudyPoint:
    """The point with one KV head and 32 tokens, and of several tiles where its variant is given a tiling; a run of four steps.

    Of another operation no size is above 128.
    """
    if isinstance(point.variant, Rung):
        return replace(point, problem=Toy(steps=4), seeds=1)
    if isinstance(point.problem, Predicted):
        task = replace(point.problem.task, steps=1, warmup=0, batch=1, length=16, width=16, depth=2, heads=2, experts=4)
        return replace(point, problem=replace(point.problem, task=task, sequences=2), seeds=1)
    if not isinstance(point.problem, Problem | BackwardProblem):  # of another operation
        sizes = {each.name: getattr(point.problem, each.name) for each in fields(point.problem)}
        small = {name: min(size, 128) for name, size in sizes.items() if type(size) is int}
        return replace(point, problem=replace(point.problem, **small))
    shape = point.problem.shape
    one = replace(shape, batch=min(shape.batch, 2), heads=shape.heads // shape.kv_heads, kv_heads=1)
    tokens = replace(one, queries=min(shape.queries, 32), keys=min(shape.keys, 32))
    point = replace(point, problem=replace(point.problem, shape=tokens))
    if not isinstance(point.variant, (Tiled, Instrumented, TiledBackward)):
        return point
    return replace(point, variant=replace(point.variant, tiling=replace(point.variant.tiling, br=16, bc=16)))


def test_a_scenario_has_a_title_and_a_role() -> None:
    made = study(scenarios={"one": {"title": "as in the book", "role": "paper", "problem": "normal"}, "two": None})
    assert made.scenarios == (Scenario("one", "as in the book", Role.PAPER), Scenario("two", "two", Role.BEYOND))
    assert [point.problem.source.kind.value for point in made.points] == ["normal", "uniform"]
    assert study().scenarios == (Scenario("default", study().title, Role.BEYOND),)


def test_an_entry_of_an_axis_may_state_its_role() -> None:
    made = study(axes={"step": {"one": {"role": "control", "tiling.bc": 16}, "two": {"tiling.bc": 32}}, "problem.n": [32]})
    assert [point.roles for point in made.points] == [{"step": EntryRole.CONTROL}, {}]
    points = made.manifest(["a", "b"], "deviation")["points"]
    assert [point["roles"] for point in points] == [{"step": "control"}, {}]


@pytest.mark.parametrize(
    ("task", "overrides"),
    [
        ({}, ()),
        ({"seeds": 3}, ()),
        ({"precision": "bf16"}, ()),  # a value of an axis: some of the study's own points
        ({"problem.n": 64}, ("problem.n=64",)),
        ({"problem": "normal", "seeds": 3}, ("problem=normal",)),
        ({"precision": "fp8"}, ("precision=fp8",)),
        ({"baseline": "none"}, ("baseline=none",)),
        ({"problem.n": 128}, ()),  # what the file states already
    ],
)
def test_a_study_knows_what_the_command_line_changed(task: dict[str, Any], overrides: tuple[str, ...]) -> None:
    made = study(task, base={"problem.n": 128}, axes={"precision": ["bf16", "fp16"]})
    assert made.overrides == overrides
    assert made.manifest(["k"] * len(made.points), "deviation")["overrides"] == list(overrides)


def _scenarios(name: str, **task: Any) -> tuple[set[str], Study]:
    made = Expander(LIBRARY, {key.replace("__", "."): value for key, value in task.items()}).study(name, LIBRARY.study(name))
    return {point.scenario for point in made.points}, made


class TestScenariosThatTheCommandLineContradicts:
    @pytest.mark.parametrize("option", ["normal", "captured", "normal_logits"])
    def test_every_scenario_that_is_measured_has_the_inputs_of_its_title(self, option: str) -> None:
        plain = Expander(LIBRARY).study("fig3", LIBRARY.study("fig3"))
        source = {point.scenario: point.problem.source for point in plain.points}
        own = build.point(LIBRARY.request({"problem": option})).problem.source
        if own not in source.values():
            with pytest.raises(BadInput, match=rf"^study: 'fig3' .*other settings than problem={option}; .*a copy"):
                _scenarios("fig3", problem=option)
            return
        scenarios, made = _scenarios("fig3", problem=option)
        assert scenarios == {one for one, its in source.items() if its == own} == {one.name for one in made.scenarios}
        assert {point.scenario: point.problem.source for point in made.points} == dict.fromkeys(scenarios, own)
        assert set(made.left_out) == {one.title for one in plain.scenarios if one.name not in scenarios}
        assert made.overrides == ()  # its points are some of the study's own, and so are its titles

    @pytest.mark.parametrize(
        ("name", "task", "left"),
        [
            ("fig3", {"tiling__bc": 32}, 9),  # no scenario states it: the title says what was changed
            ("fig3", {"problem__n": 64}, 6),  # captured inputs state the length of their file
            ("fig3", {"softmax__maximum": "running"}, 6),  # the file of fa1 states another one
            ("fig3", {"precision": "bf16"}, 6),  # the others have FP32 inside
            ("fig3", {"precision": "kernel_bf16"}, 3),
            ("fig3", {"precision": "e4m3fn"}, 6),  # every step in F, of another F
            ("delta", {"problem__source__copies": 1}, 3),
        ],
    )
    def test_are_left_out(self, name: str, task: dict[str, Any], left: int) -> None:
        stated = {key.replace("__", "."): value for key, value in task.items()}
        made = replace(Expander(LIBRARY).of(name), task=stated).study(name, LIBRARY.study(name))
        assert len(made.scenarios) == left
        assert len(made.left_out) == len(LIBRARY.study(name)["scenarios"]) - left

    def test_a_group_replaces_the_settings_that_a_scenario_states_of_it(self) -> None:
        parts: dict[str, Any] = {
            "base": {"problem": "tied"},
            "scenarios": {"ties": {"problem.source.copies": 2}, "any": {"tiling.bc": 16}},
        }
        assert [point.scenario for point in study({"problem": "normal"}, **parts).points] == ["any"]
        assert len(study({"problem": "tied"}, **parts).points) == 1  # four copies again
        assert len(study({"problem": "tied", "problem.source.copies": 2}, **parts).scenarios) == 2


def test_captured_heads_are_all_measured_unless_a_number_is_given() -> None:
    whole = study(scenarios={"s": {"problem": "captured"}, "t": {"problem": "normal"}})
    assert [point.seeds for point in whole.points] == [24, 10]
    assert [point.seeds for point in study({"seeds": 3}, scenarios={"s": {"problem": "captured"}}).points] == [3]
    (layer,) = study(
        base={"problem": "captured", "problem.source.layer": "layer5", "problem.heads": 4, "problem.kv_heads": 4}
    ).points
    assert layer.seeds == 3


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
    return study(base={"problem.head_dim": 8, "seeds": 2}, axes=axes, **parts)


def test_a_study_has_its_question_and_its_claims() -> None:
    made = loaded(claims=["fig5a", SLOPE], question="Does it grow?", measured="On toys.", source="A paper says so.", place=7)
    manifest = made.manifest(["k"] * len(made.points), "deviation")
    words = [manifest[name] for name in ("question", "measured", "source", "place")]
    assert words == ["Does it grow?", "On toys.", "A paper says so.", 7]
    assert manifest["claims"] == ["fig5a", "toy_2"]
    assert list(manifest["stated_claims"]) == ["toy_2"]
    assert ClaimStatement.read(manifest["stated_claims"]["toy_2"]) == made.claims[1]


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
