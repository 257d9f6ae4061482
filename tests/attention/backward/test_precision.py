"""The policies of the backward pass: presets, names, and one step at a time."""

from __future__ import annotations

from dataclasses import fields

import pytest
import torch

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.formats import BF16, E4M3FN, E5M2, FP16, FP32, FP64, TF32, Format
from numdev.arithmetic.rounding import Cast, Overflow
from numdev.attention.operations import BACKWARD_OPERATIONS, CONSTANT, OPERATIONS, SAVED, is_harmless, operation
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.errors import BadInput
from tests.attention.backward.cases import POLICIES, draw_all

STEPS = BackwardPrecision.golden().steps()


def test_presets_say_what_their_names_say() -> None:
    assert set(BackwardPrecision.uniform(BF16).steps().values()) == {"bf16"}
    assert BackwardPrecision.golden() == BackwardPrecision.uniform(FP64)
    kernel = dict.fromkeys(("inputs", "probabilities", "ds", "output"), "bf16")
    assert BackwardPrecision.kernel(BF16).steps() == {step: kernel.get(step, "fp32") for step in STEPS}
    eager = dict.fromkeys(("exponential", "delta", "difference"), "fp32")
    assert BackwardPrecision.eager(FP16).steps() == {step: eager.get(step, "fp16") for step in STEPS}
    assert BackwardPrecision.kernel(FP64) == BackwardPrecision.eager(FP64) == BackwardPrecision.golden()
    assert BackwardPrecision.kernel(E4M3FN).ds == Cast(E4M3FN, overflow=Overflow.SATURATE)
    assert BackwardPrecision.kernel(BF16).format == BF16


def test_every_preset_has_a_name_that_is_it() -> None:
    for name in [f"{kind}{fmt}" for kind in ("", "eager_", "kernel_") for fmt in (E4M3FN, E5M2, FP16, BF16, TF32, FP32, FP64)]:
        policy = BackwardPrecision.parse(name)
        assert policy.name != "custom"
        assert BackwardPrecision.parse(policy.name) == policy
    assert BackwardPrecision.parse("golden") == BackwardPrecision.golden()
    assert BackwardPrecision.parse("uniform_e5m3") == BackwardPrecision.uniform(Format(5, 3))
    assert POLICIES["mixed"]().name == "custom"
    assert POLICIES["mixed"]().describe()["dq"] == "bf16@24"


@pytest.mark.parametrize("name", ["", "bf17", "kernel", "kernel_", "flash_bf16", "fp8", "int8_"])
def test_unknown_presets_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match="^precision: "):
        BackwardPrecision.parse(name)


@pytest.mark.parametrize("step", STEPS)
def test_one_step_at_a_time(step: str) -> None:
    base = BackwardPrecision.kernel(BF16)
    ablated = base.with_step(**{step: TF32})
    assert [f.name for f in fields(base) if getattr(base, f.name) != getattr(ablated, f.name)] == [step]
    assert isinstance(getattr(ablated, step), Dot) == (step in ("scores", "dp", "delta", "dq", "dk", "dv"))


@pytest.mark.parametrize(("step", "given"), [("values", "bf16"), ("inputs", "mxfp4"), ("ds", "bf16@8"), ("dq", "bf16@x")])
def test_what_is_no_step_is_refused_by_name(step: str, given: str) -> None:
    with pytest.raises(BadInput, match=rf"^precision\.{step}: "):
        BackwardPrecision.kernel(BF16).with_step(**{step: given})


def test_what_fp64_cannot_round_is_refused() -> None:
    with pytest.raises(BadInput, match="^precision: "):
        BackwardPrecision.golden().with_step(dq_sum="fp64:toward_zero")


def test_inputs_are_rounded_as_a_forward_pass_rounds_them() -> None:
    inputs = draw_all((1, 2, 1, 5, 7, 4))
    backward, forward = BackwardPrecision.kernel(BF16), Precision.kernel(BF16)
    rounded = backward.round_inputs(*inputs)
    assert backward.carrier is torch.float32
    for mine, other in zip(rounded, forward.round_inputs(*inputs[:3]), strict=False):
        assert torch.equal(mine, other)
    assert all(torch.equal(again, x) for again, x in zip(backward.round_inputs(*rounded), rounded, strict=True))
    assert len(set(BackwardPrecision.throughout(Cast.parse("bf16:stochastic")).round_inputs(*[inputs[0]] * 4))) == 4


def test_a_policy_prints_its_steps() -> None:
    assert repr(BackwardPrecision.kernel(BF16)).startswith("BackwardPrecision(inputs=bf16, scores=fp32, ")


def test_every_operation_is_of_steps_that_there_are() -> None:
    for table, kind in ((OPERATIONS, Precision), (BACKWARD_OPERATIONS, BackwardPrecision)):
        names = {field.name for field in fields(kind)}
        for step, _, left, right in table.values():
            assert step in names
            assert {left, right} <= names | {CONSTANT, SAVED}


def test_what_a_pass_saved_may_be_any_number() -> None:
    """So a product with it takes the careful way, whatever the formats of the policy are."""
    policy = BackwardPrecision.uniform(BF16)
    names = [name for name, (_, _, _, right) in BACKWARD_OPERATIONS.items() if right == SAVED]
    assert len(names) == 4
    for name in names:
        assert not operation(policy, torch.float32, name, 1.0, BACKWARD_OPERATIONS).is_harmless
    assert is_harmless(policy, torch.float32, "dq_sum", (), BACKWARD_OPERATIONS)
    assert not is_harmless(policy, torch.float32, "delta", (), BACKWARD_OPERATIONS)
    assert is_harmless(BackwardPrecision.kernel(BF16), torch.float32, "delta", (0.3,), BACKWARD_OPERATIONS)
