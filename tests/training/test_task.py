"""The schedule of every task, and its checks."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from numdev.errors import BadInput
from numdev.training.task import Schedule, rate_at, seeded
from numdev.training.tasks import TextToImage


def test_the_rate_rises_and_falls_to_a_tenth() -> None:
    schedule = Schedule(steps=110, learning_rate=2.0, warmup=10)
    rates = [rate_at(schedule, step) for step in range(111)]
    assert rates[0] == pytest.approx(0.2)
    assert rates[9] == rates[10] == 2.0
    assert rates[60] == pytest.approx(2 * (0.1 + 0.45))
    assert rates[110] == pytest.approx(0.2)
    assert all(one > other for one, other in itertools.pairwise(rates[10:]))


def test_initial_weights_are_of_the_seed_alone_and_leave_random_numbers_as_they_were() -> None:
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    first = seeded(lambda: nn.Linear(4, 4), 1)
    assert torch.equal(torch.rand(3), wanted)
    again, other = seeded(lambda: nn.Linear(4, 4), 1), seeded(lambda: nn.Linear(4, 4), 2)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *[(name, 0) for name in ("steps", "batch", "width", "depth", "heads", "sampled", "euler_steps")],
        *[("learning_rate", 0.0), ("learning_rate", math.nan), ("warmup", 351), ("weight_decay", -1.0), ("clip", -1.0)],
        *[("patch", 5), ("width", 97), ("dropped", 1.0), ("guidance", math.inf)],
    ],
)
def test_a_field_that_cannot_be_is_named(field: str, value: float) -> None:
    with pytest.raises(BadInput, match=f"task.{field}"):
        TextToImage(**{field: value})  # type: ignore[arg-type]
