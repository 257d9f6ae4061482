"""Formats of a run, the scale of the loss against torch's own, and the weight that is moved."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.errors import BadInput
from numdev.training import state as state_module
from numdev.training.interception import CallCounts
from numdev.training.rung import Numerics
from numdev.training.state import LossScale, State, checksum, initial, moved
from numdev.training.step import Step, World
from tests.training.toy import CPU, toy, trained


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_is_that_of_torch(overflows: list[bool]) -> None:
    ours, scale, tracker = LossScale(CPU), torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state_module, "_CLEAN_STEPS", 3)
        for overflow in overflows:
            ours.update(torch.tensor(float("inf") if overflow else 1.0))
            torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 3)
            assert float(ours.scale) == float(scale)
            assert float(ours.clean) == float(tracker)
            assert float(ours.overflow) == overflow


def test_gradients_do_not_depend_on_the_scale() -> None:
    """FP32 gradients times a power of two and back are themselves."""
    found = []
    for power in (0, 10, 16):
        run = toy()
        state = State(run, CPU)
        if power:
            state.scale = LossScale(CPU)
            state.scale.scale.fill_(2.0**power)
        Step(run, state, CPU, World(), CallCounts()).update(run.task.batch_of(0, 0))
        found.append(state.gradients())
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in found[0])


def test_a_step_that_overflows_is_skipped() -> None:
    run = toy(numerics=Numerics.FP16)
    state = State(run, CPU)
    assert state.scale is not None
    state.scale.scale.fill_(2.0**60)
    state.rate.fill_(0.1)
    before = {name: x.clone() for name, x in (state.weights() | state.moments()).items()}
    _, norm = Step(run, state, CPU, World(), CallCounts()).update(run.task.batch_of(0, 0))
    assert not norm.isfinite()
    assert all(torch.equal(x, before[name]) for name, x in (state.weights() | state.moments()).items())
    assert float(state.scale.scale) == 2.0**59


def test_steps_that_overflow_do_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_module, "_FIRST_SCALE", 2.0**30)
    found = trained(toy(20, Numerics.FP16), tmp_path)
    assert found.done == 20
    skipped = [step for step, norm in enumerate(found.gradient_norms) if not math.isfinite(norm)]
    assert skipped
    assert skipped == list(range(len(skipped)))
    assert len(skipped) < 20
    assert checksum(found.weights(1)) == checksum(found.weights(0))
    assert found.checksum != checksum(found.weights(0))


@pytest.mark.parametrize("numerics", Numerics)
def test_weights_and_moments_have_the_dtype_of_the_weights(numerics: Numerics) -> None:
    state = State(toy(numerics=numerics), CPU)
    held = state.weights() | {name: x for name, x in state.moments().items() if not name.startswith("updates/")}
    assert {x.dtype for x in held.values()} == {torch.bfloat16 if numerics is Numerics.BF16_WEIGHTS else torch.float32}


def test_all_follow_fp32(tmp_path: Path) -> None:
    found = {each: trained(toy(numerics=each), tmp_path / each.value).losses for each in Numerics}
    for losses in found.values():
        # Products of BF16 have relative errors of 2^-8, and so has a weight of BF16; a loss is a mean of squares: twice that
        assert losses == pytest.approx(found[Numerics.FP32], rel=2 * 2**-8)
    assert len(set(found.values())) == 4


class TestUlp:
    @pytest.mark.parametrize("ulp", [1, -1, 5])
    def test_one_weight_is_moved_by_that_many_last_places(self, ulp: int) -> None:
        plain, other = (dict(initial(toy(ulp=n), CPU).named_parameters()) for n in (0, ulp))
        name, index = moved({key: x.detach() for key, x in plain.items()})
        assert name == "qkv.weight"
        assert index == 0
        expected, towards = plain[name].detach().flatten()[0].clone(), torch.tensor(math.inf if ulp > 0 else 0.0)
        for _ in range(abs(ulp)):
            expected = torch.nextafter(expected.abs(), towards).copysign(expected)
        assert other[name].flatten()[0] == expected
        for key, x in plain.items():
            assert int((x != other[key]).sum()) == (key == name)

    @pytest.mark.parametrize("ulp", [2**31, -(2**31), -(2**30)])
    def test_a_move_beyond_the_numbers_of_fp32_or_past_0_is_refused(self, ulp: int) -> None:
        with pytest.raises(BadInput, match=r"^rung\.ulp: -?\d+ cannot be used; the weight .* would pass 0 or the largest number"):
            initial(toy(ulp=ulp), CPU)

    def test_a_matrix_of_zeros_is_passed_over(self) -> None:
        found = moved({"zero": torch.zeros(9, 9), "bias": torch.ones(99), "small": torch.tensor([[0.0, 3.0]])})
        assert found == ("small", 1)
        with pytest.raises(BadInput, match=r"rung\.ulp"):
            moved({"zero": torch.zeros(9, 9)})
