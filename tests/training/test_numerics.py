"""Formats of a run, and the scale of the loss against torch's own."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.training import numerics
from numdev.training.interception import Seen
from numdev.training.numerics import LossScale, Numerics
from numdev.training.state import State, checksum
from numdev.training.step import Update
from numdev.training.world import World
from tests.training.toy import CPU, toy, trained


@given(st.lists(st.booleans(), max_size=60))
def test_the_scale_is_that_of_torch(overflows: list[bool]) -> None:
    ours, scale, tracker = LossScale(CPU), torch.tensor(2.0**16), torch.tensor(0, dtype=torch.int32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numerics, "_CLEAN_STEPS", 3)
        for overflow in overflows:
            ours.update(torch.tensor(float("inf") if overflow else 1.0))
            torch._amp_update_scale_(scale, tracker, torch.tensor(float(overflow)), 2.0, 0.5, 3)
            assert float(ours.scale) == float(scale)
            assert float(ours.clean) == float(tracker)
            assert float(ours.overflow) == overflow


def test_gradients_do_not_depend_on_the_scale(tmp_path: Path) -> None:
    """FP32 gradients times a power of two and back are themselves."""
    found = []
    for power in (0, 10, 16):
        run, state = toy(numerics=Numerics.FP32), None
        state = State(run, CPU)
        if power:
            state.scale = LossScale(CPU)
            state.scale.scale.fill_(2.0**power)
        Update(run, state, CPU, World(), Seen())(run.task.batch_of(0, 0))
        found.append(state.gradients())
    assert all(torch.equal(each[name], found[0][name]) for each in found for name in found[0])


def test_a_step_that_overflows_is_skipped() -> None:
    run = toy(numerics=Numerics.FP16)
    state = State(run, CPU)
    assert state.scale is not None
    state.scale.scale.fill_(2.0**60)
    state.rate.fill_(0.1)
    before = {name: x.clone() for name, x in (state.weights() | state.moments()).items()}
    _, norm = Update(run, state, CPU, World(), Seen())(run.task.batch_of(0, 0))
    assert not norm.isfinite()
    assert all(torch.equal(x, before[name]) for name, x in (state.weights() | state.moments()).items())
    assert float(state.scale.scale) == 2.0**59


def test_steps_that_overflow_do_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numerics, "_FIRST_SCALE", 2.0**30)
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
    assert {x.dtype for x in held.values()} == {numerics.weights}


def test_all_follow_fp32(tmp_path: Path) -> None:
    found = {each: trained(toy(numerics=each), tmp_path / each.value).losses for each in Numerics}
    for losses in found.values():
        # Products of BF16 have relative errors of 2^-8, and so has a weight of BF16; a loss is a mean of squares: twice that
        assert losses == pytest.approx(found[Numerics.FP32], rel=2 * 2**-8)
    assert len(set(found.values())) == 4
