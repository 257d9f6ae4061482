"""The batches of a run, whatever the task; formats of a step, the scale of the loss, and the weight that is moved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev.errors import BadInput
from numdev.training import run as run_module
from numdev.training.attend import CallCounts
from numdev.training.run import LossScale, Run, State, checksum, initial, moved
from numdev.training.rung import Numerics, Rung
from numdev.training.tasks import Batch, Language, Task, TextToImage
from tests.training.test_data import pictures
from tests.training.toy import CPU, VANILLA, Toy, toy, trained

SMALL: dict[str, Any] = {"steps": 37, "batch": 4, "warmup": 1, "depth": 1, "width": 16, "heads": 2}  # two groups of 16, and 5


@pytest.fixture(params=["toy", "scenes", "imagefolder", "text"])
def task(request: pytest.FixtureRequest, tmp_path: Path) -> Task:
    makes: dict[str, Callable[[], Task]] = {
        "toy": lambda: Toy(37, 4),
        "scenes": lambda: TextToImage(picture=8, **SMALL),
        "imagefolder": lambda: TextToImage(pictures(tmp_path), picture=8, **SMALL),
        "text": lambda: Language(length=16, **SMALL),
    }
    return makes[request.param]()


def run(task: Task, order: int, replicate: int = 3) -> Run:
    return Run(task, Rung(VANILLA, order=order, seed=replicate))


def rows(batch: Batch) -> Counter[bytes]:
    """Every example of a batch: the bytes of its row in each tensor."""
    return Counter(b"".join(x[row].numpy().tobytes() for x in batch.values()) for row in range(len(next(iter(batch.values())))))


def equal(ours: list[Batch], theirs: list[Batch]) -> bool:
    return all(torch.equal(one[name], other[name]) for one, other in zip(ours, theirs, strict=True) for name in one)


def test_another_order_shows_the_same_examples_in_other_batches(task: Task) -> None:
    own, other, third = (list(run(task, order).batches()) for order in (0, 1, 2))
    assert equal(own, [task.batch_of(step, 3) for step in range(37)])
    assert equal(other, list(run(task, 1).batches()))
    assert not equal(other, third)
    assert len(own) == len(other)
    assert sum(map(rows, own), Counter()) == sum(map(rows, other), Counter())
    assert {name: x.shape for name, x in own[0].items()} == {name: x.shape for name, x in other[0].items()}
    together = {frozenset(rows(batch)) for batch in own}
    assert sum(frozenset(rows(batch)) in together for batch in other) < 3  # of 37; a batch has 4 rows of 64


def test_the_order_of_another_replicate_is_another() -> None:
    ours, theirs = ([rows(batch) for batch in run(Toy(37, 4), 1, replicate).batches()] for replicate in (3, 4))
    assert not any(one == other for one, other in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("order", [0, 1])
@pytest.mark.parametrize("start", [0, 1, 16, 20, 36])
def test_a_run_goes_on_where_it_was_left(order: int, start: int) -> None:
    whole = run(Toy(37, 4), order)
    assert equal(list(whole.batches(start)), list(whole.batches())[start:])


def test_one_step_has_one_batch() -> None:
    one = run(Toy(1, 4), 1)
    assert [rows(batch) for batch in one.batches()] == [rows(one.task.batch_of(0, 3))]


def test_the_scale_halves_where_gradients_overflow_and_doubles_after_clean_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "_CLEAN_STEPS", 3)
    scale, scales = LossScale(CPU), []
    for overflow in (False, False, True, False, False, False, False, True):
        scale.update(torch.tensor(float("inf") if overflow else 1.0))
        assert float(scale.overflow) == overflow
        scales.append(math.log2(scale.scale))
    assert scales == [16, 16, 15, 15, 15, 16, 16, 15]


def test_gradients_do_not_depend_on_the_scale() -> None:
    """FP32 gradients times a power of two and back are themselves."""
    gradients = []
    for power in (0, 10, 16):
        run = toy()
        state = State(run, CPU, CallCounts())
        if power:
            state.scale = LossScale(CPU)
            state.scale.scale.fill_(2.0**power)
        state.update(run.task.batch_of(0, 0))
        gradients.append(state.gradients())
    assert all(torch.equal(each[name], gradients[0][name]) for each in gradients for name in gradients[0])


@pytest.mark.parametrize("numerics", Numerics)
def test_ranks_average_loss_and_gradients_of_their_parts_in_fp32(numerics: Numerics) -> None:
    """To the bit: a sum of two numbers has one order."""
    task = Toy(clip=0.0)
    state, batch = State(toy(task=task, numerics=numerics, ranks=2), CPU, CallCounts()), task.batch_of(0, 0)
    parts = []
    for rows in batch["x"].chunk(2):
        loss = state._differentiate({"x": rows})
        parts.append((loss, *(x.clone() for x in state.gradients().values())))
    loss, _ = state.update(batch)
    for own, first, second in zip((loss, *state.gradients().values()), *parts, strict=True):
        assert torch.equal(own, ((first.float() + second.float()) / 2).to(own.dtype))


def test_a_step_that_overflows_is_skipped_and_does_not_stop_a_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = toy(20, Numerics.FP16)
    state = State(run, CPU, CallCounts())
    assert state.scale is not None
    state.scale.scale.fill_(2.0**60)
    state.rate.fill_(0.1)
    before = {name: x.clone() for name, x in (state.weights() | state.moments()).items()}
    _, norm = state.update(run.task.batch_of(0, 0))
    assert not norm.isfinite()
    assert all(torch.equal(x, before[name]) for name, x in (state.weights() | state.moments()).items())
    assert float(state.scale.scale) == 2.0**59
    monkeypatch.setattr(run_module, "_FIRST_SCALE", 2.0**30)
    whole = trained(run, tmp_path)
    skipped = [step for step, norm in enumerate(whole.gradient_norms) if not math.isfinite(norm)]
    assert (whole.done, skipped) == (20, list(range(len(skipped))))
    assert 0 < len(skipped) < 20
    assert checksum(whole.weights(1)) == checksum(whole.weights(0)) != whole.checksum


def test_all_numerics_follow_fp32_with_weights_in_their_dtype(tmp_path: Path) -> None:
    losses = {each: trained(toy(numerics=each), tmp_path / each.value).losses for each in Numerics}
    for numerics, own in losses.items():
        # Products of BF16 have relative errors of 2^-8, and so has a weight of BF16; a loss is a mean of squares: twice that
        assert own == pytest.approx(losses[Numerics.FP32], rel=2 * 2**-8)
        state = State(toy(numerics=numerics), CPU, CallCounts())
        held = state.weights() | {name: x for name, x in state.moments().items() if not name.startswith("updates/")}
        assert {x.dtype for x in held.values()} == {torch.bfloat16 if numerics is Numerics.BF16_WEIGHTS else torch.float32}
    assert len(set(losses.values())) == 4


@pytest.mark.parametrize("ulp", [1, -1, 5])
def test_one_weight_is_moved_by_that_many_last_places(ulp: int) -> None:
    plain, other = (dict(initial(toy(ulp=n), CPU).named_parameters()) for n in (0, ulp))
    name, index = moved({key: x.detach() for key, x in plain.items()})
    assert (name, index) == ("qkv.weight", 0)
    expected, towards = plain[name].detach().flatten()[0].clone(), torch.tensor(math.inf if ulp > 0 else 0.0)
    for _ in range(abs(ulp)):
        expected = torch.nextafter(expected.abs(), towards).copysign(expected)
    assert other[name].flatten()[0] == expected
    assert all(int((x != other[key]).sum()) == (key == name) for key, x in plain.items())


def test_a_weight_is_moved_neither_past_0_nor_out_of_fp32_and_a_matrix_of_zeros_passed_over() -> None:
    for ulp in (2**31, -(2**31), -(2**30)):
        with pytest.raises(BadInput, match=r"^rung\.ulp: .* would pass 0 or the largest number"):
            initial(toy(ulp=ulp), CPU)
    assert moved({"zero": torch.zeros(9, 9), "bias": torch.ones(99), "small": torch.tensor([[0.0, 3.0]])}) == ("small", 1)
    with pytest.raises(BadInput, match=r"rung\.ulp"):
        moved({"zero": torch.zeros(9, 9)})
