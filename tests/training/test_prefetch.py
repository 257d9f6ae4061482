"""Batches made ahead: in order, in slices, with their errors."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch

from numdev.training.prefetch import Prefetch
from numdev.training.run import Run
from numdev.training.rung import Rung
from tests.training.toy import VANILLA, Toy, toy


def threads() -> int:
    return sum(each.name == "batches" for each in threading.enumerate())


@pytest.mark.parametrize("start", [0, 5])
def test_they_are_those_of_the_run_in_order(start: int) -> None:
    run = replace(toy(order=2), replicate=3)
    with Prefetch(run, start) as batches:
        for batch in list(run.batches())[start:]:
            assert torch.equal(next(batches)["x"], batch["x"])
    assert not threads()


def test_ranks_share_a_batch_without_gap_or_overlap() -> None:
    run = toy(ranks=4)
    parts = []
    for rank in range(4):
        with Prefetch(run, 3, rank) as batches:
            parts.append(next(batches)["x"])
    assert torch.equal(torch.cat(parts), run.task.batch_of(3, 0)["x"])


def test_an_error_comes_in_its_turn_and_the_thread_ends() -> None:
    with Prefetch(Run(Toy(torn=2), Rung(VANILLA)), 0) as batches:
        next(batches)
        next(batches)
        with pytest.raises(OSError, match="no such picture"):
            next(batches)
    assert not threads()


def test_whoever_leaves_early_leaves_no_thread() -> None:
    with Prefetch(toy(1000), 0) as batches:
        next(batches)
    assert not threads()
