"""What a run is, what it leaves, and what ends it."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput, Unsupported
from numdev.training import loop
from numdev.training.loop import Progress, train
from numdev.training.run import Run
from numdev.training.rung import Numerics, Restart, Rung
from numdev.training.state import checksum, model_of
from tests.training.toy import CPU, VANILLA, Toy, toy, trained, vanilla


class TestBits:
    @pytest.mark.parametrize("numerics", Numerics)
    def test_the_same_run_has_the_same_bits(self, tmp_path: Path, numerics: Numerics) -> None:
        first, sham = (trained(toy(numerics=numerics, repeat=n), tmp_path / str(n)) for n in range(2))
        assert first.key != sham.key
        assert first.checksum == sham.checksum
        assert first.losses == sham.losses
        assert first.gradient_norms == sham.gradient_norms

    @pytest.mark.parametrize(
        "rung",
        [{"init": 1}, {"order": 1}, {"ulp": 4096}, {"ulp": -4096}, {"numerics": Numerics.BF16}, {"numerics": Numerics.FP16}],
    )
    def test_a_rung_that_differs_has_others(self, tmp_path: Path, rung: dict[str, Any]) -> None:
        reference = trained(toy(), tmp_path / "reference")
        other = trained(toy(**rung), tmp_path / "other")
        assert other.checksum != reference.checksum
        assert (checksum(other.weights(0)) == checksum(reference.weights(0))) == (not {"init", "ulp"} & set(rung))

    def test_settings_of_torch_are_left_as_they_were(self, tmp_path: Path) -> None:
        def settings() -> tuple[object, ...]:
            fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
            return torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), fill

        before = settings()
        trained(toy(1), tmp_path)
        assert settings() == before


def test_weights_are_those_of_adamw_and_clipping_written_out(tmp_path: Path) -> None:
    task, found = Toy(), trained(toy(), tmp_path)
    model = task.model(0).double()
    w = list(model.parameters())
    m, v = ([torch.zeros_like(x) for x in w] for _ in range(2))
    for step in range(task.steps):
        loss = task.loss(model, {"x": task.batch_of(step, 0)["x"].double()})
        gradients = torch.autograd.grad(loss, w)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        # The run computes in FP32, here is FP64: u of relative error for each of the few hundred additions behind a loss
        assert found.losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert found.gradient_norms[step] == pytest.approx(float(norm), rel=1e-4)
        rate, factor = task.rate_at(step), min(1.0, task.clip / float(norm))
        with torch.no_grad():
            for x, g, a, b in zip(w, gradients, m, v, strict=True):
                a.mul_(0.9).add_(0.1 * factor * g)
                b.mul_(0.99).add_(0.01 * (factor * g) ** 2)
                if x.dim() > 1:
                    x.mul_(1 - rate * task.weight_decay)
                n = step + 1
                x.sub_(rate * (a / (1 - 0.9**n)) / ((b / (1 - 0.99**n)).sqrt() + 1e-8))
    last = found.weights(task.steps)
    last["qkv.bias"][task.width : 2 * task.width] = 0  # softmax does not see a bias of k: its gradient is rounding alone,
    with torch.no_grad():  # which AdamW divides by its own size
        model.get_parameter("qkv.bias")[task.width : 2 * task.width] = 0
    for name, x in model.named_parameters():
        # A step moves a weight by about the rate, 1e-2, and a relative error of 1e-4 in a gradient moves that step by as much
        assert torch.allclose(last[name].double(), x.detach(), rtol=0, atol=task.steps * 1e-2 * 1e-3), name


class TestWhatItLeaves:
    def test_losses_steps_and_progress(self, tmp_path: Path) -> None:
        heard: list[Progress] = []
        found = train(toy(5), tmp_path, CPU, heard.append)
        assert (found.steps, found.done, found.stopped, found.captured) == (5, 5, "", False)
        assert (found.calls, found.missed) == (1, 0)
        assert found.parameters == sum(x.numel() for x in Toy().model(0).parameters())
        assert [at.step for at in heard] == [1, 2, 3, 4, 5]
        assert [at.loss for at in heard] == list(found.losses)
        assert all(at.rate > 0 for at in heard)
        assert 0 < found.seconds_per_step <= found.seconds

    def test_a_finished_run_is_not_trained_again(self, tmp_path: Path) -> None:
        first = trained(toy(), tmp_path)
        heard: list[Progress] = []
        assert train(toy(), tmp_path, CPU, heard.append) == first
        assert not heard

    def test_its_model(self, tmp_path: Path) -> None:
        found = trained(toy(), tmp_path)
        model = model_of(toy(), CPU, found.tensors(12))
        assert checksum(dict(model.named_parameters())) == found.checksum
        assert not model.training
        with pytest.raises(BadInput, match="another model"):
            model_of(toy(), CPU, {"nothing": torch.zeros(1)})

    def test_the_last_snapshot_is_what_the_checksum_is_of(self, tmp_path: Path) -> None:
        found = trained(toy(numerics=Numerics.BF16_WEIGHTS), tmp_path)
        assert checksum(found.weights(12)) == found.checksum
        assert all(x.dtype == torch.float32 for x in load_file(found.snapshots[12]).values())
        with pytest.raises(BadInput, match="snapshots of steps 0, 1, 2, 4, 8, 12"):
            found.weights(3)

    def test_the_folder_of_another_run_is_refused(self, tmp_path: Path) -> None:
        trained(toy(), tmp_path)
        with pytest.raises(BadInput, match=r"folder: .* another configuration"):
            trained(toy(init=1), tmp_path)


class TestTheEndBeforeTheEnd:
    @pytest.mark.parametrize("step", [0, 3, 11])
    @pytest.mark.parametrize("numerics", [Numerics.FP32, Numerics.FP16])
    def test_a_loss_that_is_not_finite_stops_the_run(self, tmp_path: Path, step: int, numerics: Numerics) -> None:
        found = trained(Run(Toy(poison=step), Rung(vanilla(numerics), numerics)), tmp_path)
        assert found.stopped == f"the loss is not finite at step {step}"
        assert found.done == step
        assert len(found.losses) == step + 1
        assert not math.isfinite(found.losses[-1])
        assert all(map(math.isfinite, found.losses[:-1]))
        assert list(found.snapshots) == [each for each in (0, 1, 2, 4, 8) if each <= step]
        assert found.checksum == checksum(found.weights(max(found.snapshots)))
        assert trained(Run(Toy(poison=step), Rung(vanilla(numerics), numerics)), tmp_path).losses[:-1] == found.losses[:-1]

    def test_losses_that_are_read_later_stop_it_at_the_same_step(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """As on a GPU, here also just before a restart: the snapshots are of steps 16 and 32, the restart is after 20."""
        monkeypatch.setitem(loop._READ_EVERY, "cpu", 25)
        for step, restart in ((18, Restart.EXACT), (30, Restart.NONE)):
            found = trained(Run(Toy(40, poison=step), Rung(VANILLA, Numerics.FP32, restart=restart)), tmp_path / str(step))
            assert found.stopped == f"the loss is not finite at step {step}"
            assert len(found.losses) == step + 1

    def test_a_batch_that_cannot_be_made_is_the_error_of_the_run(self, tmp_path: Path) -> None:
        with pytest.raises(OSError, match="no such picture"):
            trained(Run(Toy(torn=4), Rung(VANILLA, Numerics.FP32)), tmp_path)
        # what was done until then is kept, and the batch is asked for again
        with pytest.raises(OSError, match="no such picture"):
            trained(Run(Toy(torn=4), Rung(VANILLA, Numerics.FP32)), tmp_path)

    def test_dropout_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match="drops values at random"):
            trained(Run(Toy(dropout=0.1), Rung(VANILLA)), tmp_path)

    @pytest.mark.filterwarnings("ignore:attend")
    def test_a_model_without_attention_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=r"task.model: .* never calls .*give a model with attention"):
            trained(Run(Toy(attends=False), Rung(VANILLA)), tmp_path)

    @pytest.mark.parametrize(
        ("make", "field"),
        [
            (lambda: toy(ranks=0), "rung.ranks"),
            (lambda: toy(ranks=2, watch=True), "rung.watch"),
            (lambda: toy(ranks=3), "rung.ranks"),
            (lambda: toy(init=-1), "rung.init"),
            (lambda: toy(numerics=Numerics.BF16_WEIGHTS, ulp=1), "rung.ulp"),
            (lambda: toy(0), "task.steps"),
            (lambda: toy(1, restart=Restart.EXACT), "rung.restart"),
            (lambda: replace(toy(), replicate=1000), "replicate"),
        ],
    )
    def test_what_cannot_be_run_is_refused_by_name(self, make: object, field: str) -> None:
        with pytest.raises(BadInput) as refused:
            make()  # type: ignore[operator]
        assert refused.value.field == field


class TestRestart:
    def test_exact_changes_nothing(self, tmp_path: Path) -> None:
        none, exact = (trained(toy(restart=each), tmp_path / each.value) for each in (Restart.NONE, Restart.EXACT))
        assert exact.checksum == none.checksum
        assert exact.losses == none.losses

    @pytest.mark.parametrize("restart", [Restart.LOSSY, Restart.WEIGHTS_ONLY])
    def test_what_is_lost_moves_the_weights_from_then_on(self, tmp_path: Path, restart: Restart) -> None:
        none, lossy = (trained(toy(restart=each), tmp_path / each.value) for each in (Restart.NONE, restart))
        assert lossy.losses[:6] == none.losses[:6]
        assert (lossy.losses[6] == none.losses[6]) == (restart is Restart.WEIGHTS_ONLY)
        assert lossy.losses[7] != none.losses[7]
        assert lossy.checksum != none.checksum


def test_an_attention_without_a_deterministic_algorithm_is_trained_and_said_to_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(self: VanillaBackward, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError("_flash_attention_backward does not have a deterministic implementation")
        return plain(self, q, *rest)

    plain = VanillaBackward.attend
    monkeypatch.setattr(VanillaBackward, "attend", attend)
    found = trained(toy(), tmp_path)
    assert found.done == 12
    assert "the same run again may have other bits" in found.notes[0]
    assert not torch.is_deterministic_algorithms_warn_only_enabled()
