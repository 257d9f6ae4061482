"""The backward pass on the command line: what its groups make, what each variant honours, and its studies."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import cache
from operator import attrgetter
from typing import Any

import pytest
import torch

from numdev.arithmetic.formats import BF16, FP32
from numdev.attention.exact import RoundedBackward
from numdev.attention.groups import BACKWARD_GROUPS
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import DeltaForm, Exponential, OnlineSoftmax, OutputForDelta, Recompute
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Kernel, Products, Triton, TritonBackward
from numdev.cli import build
from numdev.cli.compose import composer
from numdev.cli.expand import Expander
from numdev.errors import BadInput
from numdev.results.store import EntryRole
from numdev.results.study import Study, StudyPoint
from numdev.settings import declared
from numdev.sources import config_folder
from tests.cli.commands import settings

LIBRARY, COMPOSER = composer((config_folder(),)), composer((config_folder(),), operation="attention_backward")
STEPS = [field.name for field in fields(BackwardPrecision)]
KERNEL_BF16, KERNEL = {"precision": "kernel_bf16"}, BackwardPrecision.kernel(BF16)
PRESETS = ("golden", "bf16", "kernel_fp32", "eager_bf16")


def point(stated: dict[str, Any]) -> StudyPoint:
    return build.point(COMPOSER.request(stated))


@cache
def study(name: str) -> Study:
    return Expander(LIBRARY).of(name).study(name, LIBRARY.study(name))


MADE: list[tuple[dict[str, Any], str, Any]] = [
    # settings, an attribute of the variant, its value
    ({}, "forward", Tiled(Precision.uniform(BF16), Tiling(), OnlineSoftmax(), count=False)),
    *(({"precision": preset}, "precision", BackwardPrecision.parse(preset)) for preset in PRESETS),
    *(({"precision": preset}, "forward.precision", Precision.parse(preset)) for preset in PRESETS),
    (KERNEL_BF16 | {"forward_precision.preset": "fp16"}, "precision", KERNEL),
    (KERNEL_BF16 | {"forward_precision.preset": "fp16"}, "forward.precision", Precision.parse("fp16")),
    *((KERNEL_BF16 | {f"precision.{step}": "e5m7"}, "precision", KERNEL.with_step(**{step: "e5m7"})) for step in STEPS),
    (KERNEL_BF16 | {"forward_precision.scores": "fp16"}, "forward.precision", Precision.kernel(BF16).with_step(scores="fp16")),
    ({"recompute.output": "unrounded"}, "recompute", Recompute(DeltaForm.OUTPUT, OutputForDelta.UNROUNDED)),
    ({"recompute.delta": "probabilities"}, "recompute", Recompute(DeltaForm.PROBABILITIES)),
    ({"softmax": "fa2_kernel"}, "recompute.exponential", Exponential.EXP2),
    ({"softmax": "fa2_kernel", "recompute.exp": "exp"}, "recompute.exponential", Exponential.EXP),
    ({"backward": "triton"}, "recompute.exponential", Exponential.EXP2),
    ({"backward": "triton", "softmax.exp": "exp"}, "recompute.exponential", Exponential.EXP),
    ({"backward": "triton", "recompute.exp": "exp"}, "forward.softmax.exp", Exponential.EXP2),
    ({"softmax": "fa4", "recompute.exp": "exp2_poly3@0.25"}, "recompute.exponential", Exponential.parse("exp2_poly3@0.25")),
    ({"tiling.br": 16, "tiling.bc": 32, "tiling.order": "reverse"}, "tiling", Tiling(16, 32, Order.REVERSE)),
    ({"tiling.br": 16, "tiling.bc": 32, "tiling.order": "reverse"}, "forward.tiling", Tiling(16, 32, Order.REVERSE)),
    ({"backward.query_order": "strided", "tiling.stride": 3}, "query_order", Order.STRIDED),
]


@pytest.mark.parametrize(("stated", "attribute", "value"), MADE, ids=[f"{one[1]} {one[0]}" for one in MADE])
def test_settings_make_what_python_makes(stated: dict[str, Any], attribute: str, value: Any) -> None:
    assert attrgetter(attribute)(point(stated).variant) == value


@pytest.mark.parametrize("kind", ["tiled", "instrumented", "triton"])
@pytest.mark.parametrize("text", ["exp2_poly3", "exp2_poly3@0.5"])
def test_a_polynomial_is_that_of_both_passes(kind: str, text: str) -> None:
    made = point({"backward": kind, "softmax.exp": text}).variant
    assert made.recompute.exponential == made.forward.softmax.exp == Exponential.parse(text)


def test_kernels() -> None:
    stated = {"precision": "fp32", "tiling.bc": 32, "tiling.order": "reverse", "backward.products": "tf32"}
    forward = Triton(FP32, softmax=OnlineSoftmax(exp=Exponential.EXP2), products=Products.TF32)
    recompute = Recompute(exponential=Exponential.EXP2)
    expected = TritonBackward(forward, FP32, None, 32, Order.REVERSE, recompute, tf32=True)
    assert point({"backward": "triton"} | stated).variant == expected


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        ({}, NaiveBackward.eager(BF16)),
        ({"baseline": "uniform"}, NaiveBackward(BackwardPrecision.uniform(BF16), Precision.uniform(BF16))),
        ({"baseline": "none"}, None),
        ({"precision": "e4m3fn"}, NaiveBackward.eager(FP32)),
    ],
)
def test_baseline(stated: dict[str, Any], expected: NaiveBackward | None) -> None:
    assert point(stated).baseline == expected


def test_means() -> None:
    """`do` and `v` are shifted, and nothing else is drawn otherwise."""
    plain, shifted = (point({"problem.n": 8} | own).problem for own in ({}, {"problem.v_mean": 2, "problem.do_mean": -3}))
    assert shifted == replace(plain, v_mean=2.0, do_mean=-3.0)
    drawn = (ATTENTION_BACKWARD.draw(one, 1, torch.device("cpu")) for one in (plain, shifted))
    apart = [b - a for a, b in zip(*drawn, strict=True)]
    assert [float(x.mean().round(decimals=12)) for x in apart] == [0.0, 0.0, 2.0, -3.0]


REFUSED = [
    # settings, the one that the sentence names, what else it says
    ("backward=naive recompute.delta=probabilities", "recompute.delta", "backward=naive does not read it"),
    ("backward=naive tiling.bc=32", "tiling.bc", "take backward=flex or instrumented or tiled or triton"),
    ("backward=triton precision=eager_bf16", "precision.preset", "backward=triton has an arithmetic of its own"),
    ("backward=triton backward.products=tf32", "backward.products", "only products of fp32"),
    ("backward=instrumented backward.query_order=reverse", "backward.query_order", "take backward=tiled"),
    ("tiling.stride=3", "tiling.stride", "only with tiling.order=strided"),
    ("recompute.delta=probabilities recompute.output=unrounded", "recompute.output", "only with recompute.delta=output"),
    ("recompute.delta=probabilities forward_precision.values=bf16", "forward_precision.values", "recompute.delta=output"),
    ("recompute.output=unrounded forward_precision.output=bf16", "forward_precision.output", "recompute.output=rounded"),
    ("backward=exact baseline=emulation", "tiling.br", "it has no tiles"),
    ("baseline.normalise=end", "baseline.normalise", "P is stored"),
    ("precision.dk=bf16@65", "precision.dk", "a sum of 64 terms is never rounded after 65; give bf16"),
    ("forward_precision.row_sum=bf16@65", "forward_precision.row_sum", "at most 64 behind @"),
    ("recompute.exp=exp2_fa4 tiling.bc=32", "recompute.exp", "give tiling.bc of at least 45"),
    ("recompute.delta=outptu", "recompute.delta", "did you mean output"),
    ("recompute.exp=exp2_poly3@2.0", "recompute.exp", "give a fraction"),
    ("recompute.exp=exp@0.5", "recompute.exp", "needs a polynomial"),
    ("precision=fa3_fp8", "precision.preset", "use golden, or a format"),
]


@pytest.mark.parametrize(("text", "field", "hint"), REFUSED, ids=[one[0] for one in REFUSED])
def test_what_cannot_be_honoured_is_refused_by_name(text: str, field: str, hint: str) -> None:
    with pytest.raises(BadInput) as error:
        point(settings(text))
    assert error.value.field == field
    assert hint in str(error.value)


class TestEmulation:
    """`baseline=emulation`: with the forward pass emulated, or the variant's own."""

    def test_our_kernels_have_one_where_both_passes_have_one_kernel(self) -> None:
        asked = {"backward": "triton", "baseline": "emulation", "problem.causal": True}
        with pytest.raises(BadInput, match=r"^backward\.kernel: 'auto'"):
            point(asked)
        hopper = point(asked | {"backward.kernel": "hopper"})
        assert hopper.variant.forward.kernel is hopper.variant.kernel is Kernel.HOPPER
        assert isinstance(hopper.baseline.forward, Tiled)
        assert hopper.baseline.forward.tiling == Tiling(bc=128, order=Order.REVERSE)
        assert hopper.baseline.turns == Turns(128)

    def test_the_portable_kernels_choose_the_tile_of_their_forward_pass_at_launch(self) -> None:
        asked = {"backward": "triton", "baseline": "emulation", "backward.kernel": "portable", "tiling.br": 32, "tiling.bc": 16}
        with pytest.raises(BadInput, match=r"^baseline\.forward: 'emulated' .*depends on the launch.*give own"):
            point(asked)
        made = point(asked | {"baseline.forward": "own"})
        assert made.baseline.forward == made.variant.forward
        assert (made.baseline.tiling, made.baseline.query_order) == (Tiling(32, 16), Order.FORWARD)

    def test_what_is_not_known_of_a_kernel_is_stated(self) -> None:
        asked = {"backward": "sdpa", "backward.backend": "cudnn", "baseline": "emulation", "baseline.forward": "own"}
        stated = {"tiling.br": 32, "tiling.bc": 16, "tiling.order": "forward", "baseline.query_order": "reverse"}
        made = point(asked | stated).baseline
        assert (made.tiling, made.query_order) == (Tiling(32, 16), Order.REVERSE)
        for name in stated:
            with pytest.raises(BadInput) as error:
                point(asked | {one: value for one, value in stated.items() if one != name})
            assert error.value.field == name


def plain(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """A differentiable function of one's own."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


@pytest.mark.parametrize("name", COMPOSER.options("backward"))
def test_what_a_variant_honours_are_settings(name: str) -> None:
    known = {f"{group}.{one.name}" for group, kind in BACKWARD_GROUPS.items() for one in declared(kind)} | set(COMPOSER.known())
    own = {"backward.function": "tests.cli.test_backward:plain"} if name == "custom" else {}
    made = point({"backward": name} | own).variant
    assert made.accepted_settings.names <= known | {"tiling.head_dim"}


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

    @pytest.mark.slow
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
