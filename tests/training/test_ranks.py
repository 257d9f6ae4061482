"""Several processes that share a batch."""

from __future__ import annotations

import pickle
import sys
from pathlib import Path
from queue import SimpleQueue

import pytest
import torch

from numdev.errors import BadInput
from numdev.training import ranks
from numdev.training.loop import Execution, Progress, train
from numdev.training.run import Run
from numdev.training.rung import Rung
from tests.training.toy import CPU, VANILLA, Toy, toy, trained


def test_two_processes_train_what_one_does_but_for_the_order_of_sums(tmp_path: Path) -> None:
    heard: list[Progress] = []
    one = trained(toy(6), tmp_path / "one")
    two = train(toy(6, ranks=2), tmp_path / "two", CPU, heard.append, Execution(checkpoint_seconds=0.0))
    assert two.key != one.key
    assert [at.step for at in heard] == [1, 2, 3, 4, 5, 6]
    # A mean of two means in FP32 for one mean: some u of relative error, 6e-8 each, over the few hundred additions of a loss
    assert two.losses == pytest.approx(one.losses, rel=1e-5)
    assert list(two.snapshots) == list(one.snapshots)
    assert two.done == 6


def test_what_a_process_raises_is_raised_here_after_its_progress() -> None:
    said: SimpleQueue[bytes] = SimpleQueue()
    heard: list[Progress] = []
    for word in (Progress(1, 2, 0.5, 3.0), BadInput("rung.ranks", 2, "give 1")):
        said.put(pickle.dumps(word))
    with pytest.raises(BadInput, match="give 1"):
        ranks._hear(said, heard.append)
    assert [at.step for at in heard] == [1]


def test_torchrun_with_another_number_of_processes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(BadInput, match=r"rung\.ranks: 2 .*torchrun started 4"):
        trained(toy(ranks=2), tmp_path)


def test_torchrun_with_one_process_is_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One rank of one: the path of torchrun, with the collectives of gloo, in this process."""
    if sys.platform == "linux":
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "joined").mkdir()
    found = ranks.train(toy(6), tmp_path / "joined", CPU, None, Execution())
    assert found.losses == trained(toy(6), tmp_path / "alone").losses
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
        train(Run(Toy(batch=64), Rung(VANILLA, ranks=64)), tmp_path, torch.device("cuda"))
