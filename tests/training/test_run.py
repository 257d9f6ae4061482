"""The batches of a run: an order of the data is an order, whatever the task."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev.training.run import Run
from numdev.training.rung import Rung
from numdev.training.tasks import Batch, Language, Task, TextToImage
from tests.training.test_data import pictures
from tests.training.toy import VANILLA, Toy

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


def test_ranks_share_a_batch_without_gap_or_overlap_and_one_step_has_one_batch() -> None:
    ours = Run(Toy(), Rung(VANILLA, ranks=4))
    batch = next(ours.batches())
    assert equal([{"x": torch.cat([ours.share(batch, rank)["x"] for rank in range(4)])}], [batch])
    one = run(Toy(1, 4), 1)
    assert [rows(batch) for batch in one.batches()] == [rows(one.task.batch_of(0, 3))]
