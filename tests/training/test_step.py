"""A step as a CUDA graph has the bits of the step that it was captured from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numdev.arithmetic.formats import BF16, FP16
from numdev.attention.base import Differentiable
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.loop import Execution, train
from numdev.training.run import Run
from numdev.training.run_files import Trained
from numdev.training.rung import Numerics, Restart, Rung
from tests.training.toy import VANILLA, Toy, vanilla

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")


def on_gpu(run: Run, folder: Path, graphs: bool) -> Trained:
    return train(run, folder, CUDA, None, Execution(graphs=graphs))


@pytest.mark.parametrize("numerics", Numerics)
def test_every_numerics(tmp_path: Path, numerics: Numerics) -> None:
    run = Run(Toy(60, width=128), Rung(vanilla(numerics), numerics))
    eager, graph = on_gpu(run, tmp_path / "eager", False), on_gpu(run, tmp_path / "graph", True)
    assert graph.captured
    assert not eager.captured
    assert (graph.calls, graph.missed) == (eager.calls, eager.missed) == (1, 0)
    assert graph.losses == eager.losses
    assert graph.gradient_norms == eager.gradient_norms
    assert graph.checksum == eager.checksum


@pytest.mark.parametrize(
    "attention",
    [VanillaBackward(BF16), SdpaBackward(Backend.FLASH), TritonBackward(Triton())],
    ids=["vanilla", "flash", "triton"],
)
def test_every_attention(tmp_path: Path, attention: Differentiable) -> None:
    run = Run(Toy(40, width=128), Rung(attention, Numerics.BF16))
    eager, graph = on_gpu(run, tmp_path / "eager", False), on_gpu(run, tmp_path / "graph", True)
    assert graph.captured
    assert graph.losses == eager.losses
    assert graph.checksum == eager.checksum


def test_attention_without_a_deterministic_algorithm_is_trained_and_noted(tmp_path: Path) -> None:
    graph = on_gpu(Run(Toy(40, width=128), Rung(SdpaBackward(Backend.CUDNN), Numerics.BF16)), tmp_path, True)
    assert graph.captured
    assert any("may have other bits" in note for note in graph.notes)


def test_a_run_resumed_half_way_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole, exact = (
        on_gpu(Run(Toy(40, width=128), Rung(VanillaBackward(FP16), Numerics.FP16, restart=each)), tmp_path / each.value, True)
        for each in (Restart.NONE, Restart.EXACT)
    )
    assert exact.checksum == whole.checksum
    assert exact.losses == whole.losses


@pytest.mark.parametrize(("step", "restart"), [(1, Restart.NONE), (18, Restart.EXACT), (30, Restart.NONE), (39, Restart.NONE)])
def test_a_loss_that_is_not_finite_is_told_to_the_step(tmp_path: Path, step: int, restart: Restart) -> None:
    """Losses are read every 25 steps; the report does not depend on it."""
    found = on_gpu(Run(Toy(40, poison=step), Rung(VANILLA, Numerics.FP32, restart=restart)), tmp_path, True)
    assert found.stopped == f"the loss is not finite at step {step}"
    assert found.done == step
    assert max(found.snapshots) <= step
