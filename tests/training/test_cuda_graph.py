"""A step as a CUDA graph has the bits of the step that it was captured from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.training.loop import train
from numdev.training.run import Run
from numdev.training.rung import Numerics, Restart, Rung
from numdev.training.state import State
from tests.training.toy import Toy, toy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
CUDA = torch.device("cuda")
RUNGS = [Rung(VanillaBackward(Format.parse(each.format)), each) for each in Numerics]
RUNGS += [Rung(attention, Numerics.BF16) for attention in (SdpaBackward(Backend.FLASH), TritonBackward(Triton()))]
RUNGS += [Rung(VanillaBackward(BF16), Numerics.BF16, watch=True, ranks=ranks) for ranks in (1, 2)]


@pytest.mark.parametrize("rung", RUNGS, ids=str)
def test_a_captured_run_has_the_bits_of_an_eager_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: Rung) -> None:
    run = Run(Toy(40, width=128), rung)
    graph = train(run, tmp_path / "graph", CUDA)
    monkeypatch.setattr(State, "capture", lambda *_: "not now")
    eager = train(run, tmp_path / "eager", CUDA)
    assert (graph.captured, eager.captured) == (True, False)
    assert (graph.calls, graph.missed) == (eager.calls, eager.missed) == (rung.ranks, 0)
    assert (graph.losses, graph.gradient_norms, graph.checksum) == (eager.losses, eager.gradient_norms, eager.checksum)
    assert repr(graph.watched) == repr(eager.watched)  # NaN is no number, and equal to none


def test_attention_without_a_deterministic_algorithm_is_trained_and_noted(tmp_path: Path) -> None:
    graph = train(Run(Toy(40, width=128), Rung(SdpaBackward(Backend.CUDNN), Numerics.BF16)), tmp_path, CUDA)
    assert graph.captured
    assert any("may have other bits" in note for note in graph.notes)


def test_a_run_resumed_half_way_has_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    rungs = [Rung(VanillaBackward(FP16), Numerics.FP16, restart=each) for each in (Restart.NONE, Restart.EXACT)]
    whole, exact = (train(Run(Toy(40, width=128), rung), tmp_path / rung.restart.value, CUDA) for rung in rungs)
    assert (exact.checksum, exact.losses) == (whole.checksum, whole.losses)


@pytest.mark.parametrize(("step", "restart"), [(1, Restart.NONE), (18, Restart.EXACT), (30, Restart.NONE), (39, Restart.NONE)])
def test_a_loss_that_is_not_finite_stops_at_its_step_though_losses_are_read_later(
    tmp_path: Path, step: int, restart: Restart
) -> None:
    run = train(toy(task=Toy(40, poison=step), restart=restart), tmp_path, CUDA)
    assert (run.stopped, run.done) == (f"the loss is not finite at step {step}", step)
    assert max(run.snapshots) <= step
