"""Several processes that share a batch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numdev.errors import BadInput
from numdev.training.loop import train
from tests.training.toy import CPU, Toy, toy, trained


def test_two_processes_train_what_one_does_but_for_the_order_of_sums(tmp_path: Path) -> None:
    heard: list[int] = []
    one = trained(toy(6), tmp_path / "one")
    two = train(toy(6, ranks=2), tmp_path / "two", CPU, lambda step, *_: heard.append(step))
    assert two.key != one.key
    assert heard == [1, 2, 3, 4, 5, 6]
    # A mean of two means in FP32 for one mean: some u of relative error, 6e-8 each, over the few hundred additions of a loss
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert (two.done, list(two.snapshots), two.folder) == (6, list(one.snapshots), tmp_path / "two")
    with pytest.raises(OSError, match="no such picture"):
        trained(toy(task=Toy(torn=2), ranks=2), tmp_path / "torn")
    assert not torch.distributed.is_initialized()


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_train_what_one_does_but_for_the_order_of_sums(tmp_path: Path) -> None:
    cuda = torch.device("cuda")
    one, two = (train(toy(60, ranks=count), tmp_path / str(count), cuda) for count in (1, 2))
    again = train(toy(60, ranks=2, repeat=1), tmp_path / "again", cuda)
    assert again.checksum == two.checksum
    assert two.losses[:5] == pytest.approx(one.losses[:5], rel=1e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_more_ranks_than_gpus_are_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"rung\.ranks"):
        train(toy(task=Toy(batch=64), ranks=64), tmp_path, torch.device("cuda"))
