"""The backward pass on the command line: what its groups make, what each variant honours, and its studies."""

from __future__ import annotations

import re
from dataclasses import fields, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.base import Implementation
from numdev.attention.exact import ExactBackward, RoundedBackward
from numdev.attention.groups import BACKWARD_GROUPS, GROUPS
from numdev.attention.instrumented import InstrumentedBackward
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import BackwardProblem
from numdev.attention.softmax import DeltaForm, Exponential, OnlineSoftmax, OutputForDelta, Recompute
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Products, Triton, TritonBackward
from numdev.cli import build
from numdev.cli.compose import Library, config_folder
from numdev.cli.expand import Expander
from numdev.errors import BadInput, NotHonoured
from numdev.results.manifest import EntryRole
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint
from numdev.settings import declared
from tests.cli.test_cli import Command, numdev

__all__ = ["numdev"]  # the fixture

LIBRARY = Library((config_folder(),))
EXPANDER = Expander(LIBRARY, operation="attention_backward")
STEPS = [field.name for field in fields(BackwardPrecision)]
KINDS = {
    "exact": ExactBackward,
    "rounded": RoundedBackward,
    "naive": NaiveBackward,
    "tiled": TiledBackward,
    "instrumented": InstrumentedBackward,
    "triton": TritonBackward,
}


def point(**settings: Any) -> StudyPoint:
    return build.point(EXPANDER.request({name.replace("__", "."): value for name, value in settings.items()}))


def variant(**settings: Any) -> Any:
    return point(**settings).variant


@cache
def study(name: str) -> Study:
    return Expander(LIBRARY).of(name).study(name, LIBRARY.study(name))


class TestWhatIsMade:
    def test_by_default(self) -> None:
        """Both passes under one preset, tile and recurrence; the baseline is autograd in the format of the gradients."""
        made = point()
        forward = Tiled(Precision.uniform(BF16), Tiling(), OnlineSoftmax(), count=False)
        assert made.variant == TiledBackward(forward, BackwardPrecision.uniform(BF16))
        assert made.baseline == NaiveBackward.eager(BF16)
        assert isinstance(made.problem, BackwardProblem)

    @pytest.mark.parametrize("name", LIBRARY.options("backward"))
    def test_every_variant(self, name: str) -> None:
        if name in KINDS:
            assert type(variant(backward=name)) is KINDS[name]

    @pytest.mark.parametrize(
        "preset", ["golden", *(f"{family}{fmt}" for family, fmt in product(["", "kernel_", "eager_"], ["bf16", "fp32"]))]
    )
    def test_a_preset_is_of_both_passes_unless_the_forward_pass_has_one(self, preset: str) -> None:
        both = variant(precision=preset)
        assert (both.precision, both.forward.precision) == (BackwardPrecision.parse(preset), Precision.parse(preset))
        own = variant(precision=preset, forward_precision__preset="fp16")
        assert (own.precision, own.forward.precision) == (BackwardPrecision.parse(preset), Precision.parse("fp16"))

    @pytest.mark.parametrize("step", STEPS)
    def test_one_step(self, step: str) -> None:
        made = variant(**{"precision": "kernel_bf16", f"precision.{step}": "e5m7:toward_zero"})
        base = BackwardPrecision.kernel(BF16)
        assert made.precision == base.with_step(**{step: "e5m7:toward_zero"})
        assert made.forward.precision == Precision.kernel(BF16)

    @pytest.mark.parametrize("step", ["scores", "accumulator", "output"])
    def test_one_step_of_the_forward_pass(self, step: str) -> None:
        made = variant(**{"precision": "kernel_bf16", f"forward_precision.{step}": "fp16"})
        assert made.precision == BackwardPrecision.kernel(BF16)
        assert made.forward.precision == Precision.kernel(BF16).with_step(**{step: "fp16"})

    @pytest.mark.parametrize(("delta", "output"), [("output", "rounded"), ("output", "unrounded"), ("probabilities", None)])
    def test_recompute(self, delta: str, output: str | None) -> None:
        own = {} if output is None else {"recompute__output": output}
        made = variant(recompute__delta=delta, **own).recompute
        assert made == Recompute(DeltaForm(delta), OutputForDelta(output or "rounded"))

    def test_the_exponential_is_that_of_the_forward_pass_unless_given(self) -> None:
        assert variant(softmax="fa2_kernel").recompute.exponential == Exponential.EXP2
        assert variant(softmax="fa2_kernel", recompute__exp="exp").recompute.exponential == Exponential.EXP
        assert variant(backward="triton").recompute.exponential == Exponential.EXP2
        assert variant(backward="triton", recompute__exp="exp").recompute.exponential == Exponential.EXP
        assert variant(backward="triton", softmax__exp="exp").recompute.exponential == Exponential.EXP
        assert variant(backward="triton", recompute__exp="exp").forward.softmax.exp == Exponential.EXP2

    @pytest.mark.parametrize("kind", ["tiled", "instrumented", "triton"])
    @pytest.mark.parametrize("share", [None, 0.5])
    def test_a_polynomial_stated_in_either_way_is_that_of_both_passes(self, kind: str, share: float | None) -> None:
        cubic = Exponential.parse("exp2_poly3")
        by_name = variant(backward=kind, softmax__exp="exp2_poly3", softmax__exp_share=share)
        by_numbers = variant(backward=kind, softmax__exp_coefficients=list(cubic.coefficients), softmax__exp_share=share)
        assert by_name == by_numbers
        assert by_name.recompute.exponential == by_name.forward.softmax.exp
        assert by_name.recompute.exponential == Exponential.polynomial(cubic.coefficients, share or 1.0)

    def test_the_backward_pass_can_have_a_polynomial_of_its_own(self) -> None:
        made = variant(softmax="fa4", recompute__exp_coefficients=[1.0, 0.7], recompute__exp_share=0.25)
        assert made.forward.softmax.exp == Exponential.parse("exp2_fa4")
        assert made.recompute.exponential == Exponential.polynomial((1.0, 0.7), 0.25)
        assert variant(softmax="fa4", recompute__exp="exp2").recompute.exponential == Exponential.EXP2

    def test_one_polynomial_stated_in_two_ways_gives_the_same_bits(self) -> None:
        problem = point(problem__n=24, problem__head_dim=8).problem
        inputs = ATTENTION_BACKWARD.draw(problem, 0, torch.device("cpu"))
        linear = {"softmax__exp": "exp2_poly1"}, {"softmax__exp_coefficients": list(Exponential.parse("exp2_poly1").coefficients)}
        first, second = (variant(tiling__bc=8, **stated) for stated in linear)
        rounded = first.round_inputs(*inputs)
        one, other = (each(*rounded, problem.mask, problem.scale).tensors() for each in (first, second))
        assert all(torch.equal(one[name], other[name]) for name in one)

    def test_tiles_of_both_passes(self) -> None:
        made = variant(tiling__br=16, tiling__bc=32, tiling__order="reverse", backward__query_order="forward")
        assert made.tiling == made.forward.tiling == Tiling(16, 32, Order.REVERSE)
        assert made.query_order is Order.FORWARD

    def test_kernels(self) -> None:
        made = variant(backward="triton", precision="fp32", tiling__bc=32, tiling__order="reverse", backward__products="tf32")
        softmax = OnlineSoftmax(exp=Exponential.EXP2)
        forward = Triton(FP32, softmax=softmax, products=Products.TF32)
        recompute = Recompute(exponential=Exponential.EXP2)
        assert made == TritonBackward(forward, FP32, None, 32, Order.REVERSE, recompute, tf32=True)

    @pytest.mark.parametrize(
        ("settings", "expected"),
        [
            ({"baseline": "uniform"}, NaiveBackward(BackwardPrecision.uniform(BF16), Precision.uniform(BF16))),
            (
                {"baseline__precision": "kernel_fp16"},
                NaiveBackward(BackwardPrecision.parse("kernel_fp16"), Precision.parse("kernel_fp16")),
            ),
            ({"baseline": "none"}, None),
            ({"precision": "e4m3fn"}, NaiveBackward.eager(FP32)),
        ],
    )
    def test_baseline(self, settings: dict[str, Any], expected: NaiveBackward | None) -> None:
        assert point(**settings).baseline == expected

    def test_means(self) -> None:
        """`do` and `v` are shifted, and nothing else is drawn otherwise."""
        plain, shifted = point(problem__n=8).problem, point(problem__n=8, problem__v_mean=2, problem__do_mean=-3).problem
        assert shifted == replace(plain, v_mean=2.0, do_mean=-3.0)
        drawn = (ATTENTION_BACKWARD.draw(one, 1, torch.device("cpu")) for one in (plain, shifted))
        apart = [b - a for a, b in zip(*drawn, strict=True)]
        assert [float(x.mean().round(decimals=12)) for x in apart] == [0.0, 0.0, 2.0, -3.0]

    def test_settings_are_the_fields_of_the_objects(self) -> None:
        settings = {group: {one.name for one in declared(kind)} for group, kind in BACKWARD_GROUPS.items()}
        assert settings["precision"] == {"preset", *STEPS}
        assert settings["recompute"] == {"delta", "output", "exp", "exp_coefficients", "exp_share"}
        assert settings["forward_precision"] == {one.name for one in declared(GROUPS["precision"])}


REFUSED: list[tuple[dict[str, Any], str, str]] = [
    # settings, the one that the sentence names, what else it says
    ({"backward": "naive", "recompute.delta": "probabilities"}, "recompute.delta", "backward=naive does not read it"),
    ({"backward": "naive", "precision.scores": "fp32"}, "precision.scores", "backward=naive does not read it"),
    ({"backward": "naive", "forward_precision.values": "fp32"}, "forward_precision.values", "backward=naive does not read"),
    ({"backward": "naive", "tiling.bc": 32}, "tiling.bc", "take backward=flex, instrumented, tiled or triton"),
    ({"backward": "exact", "precision.ds": "fp32"}, "precision.ds", "backward=exact does not read it"),
    ({"backward": "triton", "precision.ds": "fp32"}, "precision.ds", "arithmetic of its own"),
    ({"backward": "triton", "precision": "eager_bf16"}, "precision.preset", "backward=triton has an arithmetic of its own"),
    ({"backward": "triton", "forward_precision.preset": "bf16"}, "forward_precision.preset", "does not read it"),
    ({"backward": "triton", "backward.products": "tf32"}, "backward.products", "only products of fp32"),
    ({"backward": "instrumented", "backward.query_order": "reverse"}, "backward.query_order", "take backward=tiled"),
    ({"tiling.splits": 2}, "tiling.splits", "backward=tiled does not read it"),
    ({"tiling.stride": 3}, "tiling.stride", "only with tiling.order=strided"),
    (
        {"recompute.delta": "probabilities", "recompute.output": "unrounded"},
        "recompute.output",
        "only with recompute.delta=output",
    ),
    (
        {"recompute.delta": "probabilities", "forward_precision.values": "bf16"},
        "forward_precision.values",
        "recompute.delta=output",
    ),
    (
        {"recompute.output": "unrounded", "forward_precision.output": "bf16"},
        "forward_precision.output",
        "recompute.output=rounded",
    ),
    ({"backward": "exact", "baseline": "emulation"}, "tiling.br", "it has no tiles"),
    ({"baseline.normalise": "end"}, "baseline.normalise", "P is stored"),
    ({"precision.dss": "bf16"}, "precision.dss", "did you mean precision.ds"),
    ({"precision.dk": "bf16@65"}, "precision.dk", "a sum of 64 terms is never rounded after 65; give bf16"),
    ({"forward_precision.row_sum": "bf16@65"}, "forward_precision.row_sum", "at most 64 behind @"),
    ({"recompute.exp": "exp2_fa4", "tiling.bc": 32}, "recompute.exp", "give tiling.bc of at least 45"),
    ({"recompute.detla": "output"}, "recompute.detla", "did you mean recompute.delta"),
    ({"recompute.delta": "outptu"}, "recompute.delta", "did you mean output"),
    ({"recompute.exp": "exp3"}, "recompute.exp", "did you mean exp or exp2"),
    ({"softmax": "fa4", "recompute.exp_share": 0.5}, "recompute.exp_share", "give the polynomial too, as recompute.exp"),
    ({"recompute.exp": "exp2_poly3", "recompute.exp_share": 2.0}, "recompute.exp_share", "give a fraction"),
    ({"recompute.exp": "exp", "recompute.exp_coefficients": [1.0, 0.7]}, "recompute.exp_coefficients", "recompute.exp=exp2"),
    ({"precision": "fa3_fp8"}, "precision.preset", "use golden, or a format"),
    ({"precision.ds": "bf17"}, "precision.ds", "use one of fp64"),
    ({"forward_precision.scores": "bf17"}, "forward_precision.scores", "use one of fp64"),
    ({"forward_precision.preset": "bf17"}, "forward_precision.preset", "use golden"),
]


@pytest.mark.parametrize(("settings", "field", "hint"), REFUSED, ids=[" ".join(map(str, one[0].values())) for one in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(settings: dict[str, Any], field: str, hint: str) -> None:
    with pytest.raises(BadInput) as error:
        build.point(EXPANDER.request(settings))
    assert error.value.field == field
    assert hint in str(error.value)


def test_the_baseline_may_be_the_emulation_of_the_variant() -> None:
    settings = {"backward": "tiled", "tiling.br": 32, "tiling.bc": 16, "precision": "kernel_bf16", "baseline": "emulation"}
    emulated = build.point(EXPANDER.request(settings)).baseline
    assert isinstance(emulated, TiledBackward)
    assert (emulated.tiling.br, emulated.tiling.bc) == (32, 16)
    assert emulated.precision == BackwardPrecision.kernel(BF16)


class TestEmulation:
    """`baseline=emulation`: with the forward pass emulated, or the variant's own."""

    def test_our_kernels_have_one_where_both_passes_have_one_kernel(self) -> None:
        asked = {"backward": "triton", "baseline": "emulation", "problem.causal": True}
        with pytest.raises(BadInput, match=r"^backward\.kernel: 'auto'"):
            build.point(EXPANDER.request(asked))
        hopper = build.point(EXPANDER.request(asked | {"backward.kernel": "hopper"}))
        assert hopper.variant.forward.kernel is hopper.variant.kernel is Kernel.HOPPER
        assert isinstance(hopper.baseline.forward, Tiled)
        assert hopper.baseline.forward.tiling == Tiling(bc=128, order=Order.REVERSE)
        assert hopper.baseline.turns == Turns(None)

    def test_the_portable_kernels_choose_the_tile_of_their_forward_pass_at_launch(self) -> None:
        asked = {"backward": "triton", "baseline": "emulation", "backward.kernel": "portable", "tiling.br": 32, "tiling.bc": 16}
        with pytest.raises(BadInput, match=r"^baseline\.forward: 'emulated' .*depends on the launch.*give own"):
            build.point(EXPANDER.request(asked))
        made = build.point(EXPANDER.request(asked | {"baseline.forward": "own"}))
        assert made.baseline.forward == made.variant.forward
        assert (made.baseline.tiling, made.baseline.query_order) == (Tiling(32, 16), Order.FORWARD)

    def test_what_is_not_known_of_a_kernel_is_stated(self) -> None:
        asked = {"backward": "sdpa", "backward.backend": "cudnn", "baseline": "emulation", "baseline.forward": "own"}
        stated = {"tiling.br": 32, "tiling.bc": 16, "tiling.order": "forward", "baseline.query_order": "reverse"}
        made = build.point(EXPANDER.request(asked | stated)).baseline
        assert (made.tiling, made.query_order) == (Tiling(32, 16), Order.REVERSE)
        for name in stated:
            with pytest.raises(BadInput) as error:
                build.point(EXPANDER.request(asked | {one: value for one, value in stated.items() if one != name}))
            assert error.value.field == name

    @pytest.mark.parametrize("setting", [{"baseline.forward": "own"}, {"baseline.query_order": "forward"}])
    def test_the_forward_operation_has_neither(self, setting: dict[str, Any]) -> None:
        forward = Expander(LIBRARY)
        with pytest.raises(NotHonoured, match="only operation=attention_backward"):
            build.point(forward.request({"attention": "tiled", "baseline": "emulation"} | setting))


def test_a_stride_is_read_by_either_order() -> None:
    made = variant(backward__query_order="strided", tiling__stride=3)
    assert made.query_order is Order.STRIDED
    with pytest.raises(NotHonoured, match=r"tiling\.seed"):
        variant(backward__query_order="strided", tiling__seed=3)


@pytest.mark.parametrize("name", KINDS)
def test_what_a_variant_honours_are_settings(name: str) -> None:
    known = set(EXPANDER.composer.known()) | {
        f"{group}.{one.name}" for group, kind in BACKWARD_GROUPS.items() for one in declared(kind)
    }
    known |= {f"backward.{one.name}" for one in declared(TiledBackward)} | {
        "backward.products",
        "backward.kernel",
    }
    kind: Any = KINDS[name]
    assert kind.accepted_settings.names <= known | {"tiling.head_dim"}
    assert isinstance(variant(backward=name), Implementation)


class TestCommand:
    def test_a_point_is_stored_and_shown(self, numdev: Command, tmp_path: Path) -> None:
        given = [
            "operation=attention_backward",
            "problem.n=32",
            "problem.head_dim=8",
            "seeds=2",
            "precision.ds=fp32",
            "device=cpu",
        ]
        ran = numdev("measure", *given)
        assert ran.code == 0, ran.err
        for output in ATTENTION_BACKWARD.output_names:
            assert re.search(rf"^{output} +max_difference", ran.out, re.MULTILINE), output
        record = next(iter(Store(tmp_path / "results").records()))
        assert record.operation == "attention_backward"
        assert record.config["variant"]["precision"]["ds"] == "fp32"

    def test_a_sweep_minimises_a_figure_of_a_gradient(self, numdev: Command) -> None:
        given = [
            "-m",
            "operation=attention_backward",
            "problem.n=32",
            "problem.head_dim=8",
            "seeds=1",
            "precision=bf16,kernel_bf16",
        ]
        ran = numdev("measure", *given, "recompute.delta=output,probabilities", "device=cpu")
        assert ran.code == 0, ran.err
        assert len(re.findall(r"  ok, ", ran.out)) == 4
        wrong = numdev("measure", "operation=attention_backward", "objective=dw.max_difference")
        assert wrong.code == 2
        assert "dq.max_difference" in wrong.err or "dv.max_difference" in wrong.err

    def test_a_study_of_one_s_own(self, numdev: Command, tmp_path: Path) -> None:
        """Axes over presets, single steps, sizes, tiles, orders and the form of delta; then a report and a comparison."""
        (tmp_path / "mine" / "study").mkdir(parents=True)
        (tmp_path / "mine" / "study" / "own.yaml").write_text(
            "defaults:\n  - override /operation@_global_.operation: attention_backward\n"
            "title: Mine\n"
            "base: {problem.head_dim: 8}\n"
            "axes:\n  problem.n: [16, 32]\n  tiling.bc: [8]\n  tiling.order: [forward, reverse]\n"
            "  recompute.delta: [output, probabilities]\n"
            "  step: {none: {role: control, precision: kernel_bf16}, ds: {precision: kernel_bf16, precision.ds: fp32}}\n"
        )
        for seeds, results in ((3, "a"), (2, "b")):
            ran = numdev("measure", "--config-dir", "mine", "study=own", f"results={results}", "device=cpu", f"seeds={seeds}")
            assert ran.code == 0, ran.err
        assert "16 points" in ran.out
        made = numdev("report", "results=a", "out=made")
        assert made.code == 0, made.err
        text = (tmp_path / "made" / "summary.csv").read_text()
        assert all(output in text for output in ("dq", "dk", "dv", "delta"))
        unexplained = [line for line in (tmp_path / "made" / "columns.md").read_text().splitlines() if line.endswith("|  |")]
        assert not unexplained
        assert numdev("compare", "a", "b").code == 0


class TestStudies:
    @pytest.mark.parametrize(("name", "policy"), [("attribution", BackwardPrecision), ("attribution_forward", Precision)])
    def test_attribution_changes_each_step_alone(self, name: str, policy: type[Any]) -> None:
        steps, made = [field.name for field in fields(policy)], study(name)
        for scenario in made.scenarios:
            own = {str(one.labels["step"]): one for one in made.points if one.scenario == scenario.name}
            assert list(own) == ["none", *steps, "all"]
            roles = {label: one.roles.get("step", EntryRole.SUBJECT) for label, one in own.items()}
            assert roles == dict.fromkeys(steps, EntryRole.SUBJECT) | {"none": EntryRole.CONTROL, "all": EntryRole.EXPECTED}
            start, end = own["none"].variant.precision, own["all"].variant.precision
            for step in steps:
                assert own[step].variant.precision == start.with_step(**{step: getattr(end, step)})
            names = (start.name, end.name)
            assert names == (("fp32", "bf16") if scenario.name.startswith("add_") else ("bf16", "fp32"))
            if policy is BackwardPrecision:
                assert {one.variant.forward.precision.name for one in own.values()} == {"fp32"}

    def test_the_backward_pass_alone_is_validated(self) -> None:
        """O and LSE are the kernel's own, but of the control, which has no forward pass of a kernel."""
        made = study("validate_backward")
        for one in made.points:
            is_control = one.roles.get("kernel") is EntryRole.CONTROL
            assert isinstance(one.baseline, TiledBackward)
            assert isinstance(one.variant, RoundedBackward) == is_control
            assert is_control or one.baseline.forward == one.variant.forward_pass
        designs = {one.labels["kernel"]: one.baseline.turns for one in made.points if not one.problem.mask.causal}
        assert {name for name, turns in designs.items() if turns is not None} == {"hopper_fused"}

    def test_drawn_orders_differ_for_dq_alone(self) -> None:
        made = study("gradients_order")
        own = [one.variant for one in made.points if one.scenario == "normal" and one.labels["precision"] == "bf16"]
        assert len({str(one.tiling.key_tiles(1024)) for one in own}) == len(own)
        assert {one.query_order for one in own} == {Order.FORWARD}
