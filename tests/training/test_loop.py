"""A run's bits, what it leaves, and what ends it; kill and resume end with the same bits, whatever happens to a file."""

from __future__ import annotations

import itertools
import math
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention.triton import Triton, TritonBackward
from numdev.attention.vendor.sdpa import Backend, SdpaBackward
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput, StoreError, Unsupported
from numdev.training import loop
from numdev.training import run as run_module
from numdev.training.loop import Damaged, Trained, left, sealed, train
from numdev.training.run import Run, State, checksum, model_of
from numdev.training.rung import Numerics, Restart, Rung
from tests.training.toy import CPU, Toy, toy, trained


def settings() -> tuple[object, ...]:
    fill = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    return torch.are_deterministic_algorithms_enabled(), torch.get_float32_matmul_precision(), fill


@pytest.mark.parametrize("numerics", Numerics)
def test_the_same_run_has_the_same_bits(tmp_path: Path, numerics: Numerics) -> None:
    before = settings()
    first, sham = (trained(toy(numerics=numerics, repeat=n), tmp_path / str(n)) for n in range(2))
    assert settings() == before
    assert first.key != sham.key
    assert (first.checksum, first.losses, first.gradient_norms) == (sham.checksum, sham.losses, sham.gradient_norms)


def test_a_rung_that_differs_has_other_bits(tmp_path: Path) -> None:
    reference = trained(toy(), tmp_path / "reference")
    rungs: list[dict[str, Any]] = [{"init": 1}, {"order": 1}, {"ranks": 2}, {"ulp": 4096}, {"ulp": -4096}]
    rungs += [{"numerics": Numerics.FP16}]
    for rung in rungs:
        other = trained(toy(**rung), tmp_path / str(rung))
        assert other.checksum != reference.checksum
        assert (checksum(other.weights(0)) == checksum(reference.weights(0))) == (not {"init", "ulp"} & set(rung))


def test_weights_are_those_of_adamw_and_clipping_written_out(tmp_path: Path) -> None:
    task, run = Toy(), trained(toy(), tmp_path)
    model = task.model(0).double()
    w = list(model.parameters())
    m, v = ([torch.zeros_like(x) for x in w] for _ in range(2))
    for step in range(task.steps):
        loss = task.loss(model, {"x": task.batch_of(step, 0)["x"].double()})
        gradients = torch.autograd.grad(loss, w)
        norm = torch.cat([g.flatten() for g in gradients]).norm()
        # The run computes in FP32, here is FP64: u of relative error for each of the few hundred additions behind a loss
        assert run.losses[step] == pytest.approx(loss.item(), rel=1e-5)
        assert run.gradient_norms[step] == pytest.approx(float(norm), rel=1e-4)
        rate, factor = task.rate_at(step), min(1.0, task.clip / float(norm))
        with torch.no_grad():
            for x, g, a, b in zip(w, gradients, m, v, strict=True):
                a.mul_(0.9).add_(0.1 * factor * g)
                b.mul_(0.99).add_(0.01 * (factor * g) ** 2)
                if x.dim() > 1:
                    x.mul_(1 - rate * task.weight_decay)
                n = step + 1
                x.sub_(rate * (a / (1 - 0.9**n)) / ((b / (1 - 0.99**n)).sqrt() + 1e-8))
    last = run.weights(task.steps)
    last["qkv.bias"][task.width : 2 * task.width] = 0  # softmax does not see a bias of k: its gradient is rounding alone,
    with torch.no_grad():  # which AdamW divides by its own size
        model.get_parameter("qkv.bias")[task.width : 2 * task.width] = 0
    for name, x in model.named_parameters():
        # A step moves a weight by about the rate, 1e-2, and a relative error of 1e-4 in a gradient moves that step by as much
        assert torch.allclose(last[name].double(), x.detach(), rtol=0, atol=task.steps * 1e-2 * 1e-3), name


def test_a_finished_run_is_not_trained_again_nor_taken_for_another(tmp_path: Path) -> None:
    heard: list[tuple[int, int, str]] = []
    first = train(toy(5), tmp_path, CPU, lambda *progress: heard.append(progress))
    assert (first.done, first.stopped, first.captured, first.calls, first.missed) == (5, "", False, 1, 0)
    assert first.parameters == sum(x.numel() for x in Toy().model(0).parameters())
    assert first.seconds_per_step > 0
    assert [at[:2] for at in heard] == [(step, 5) for step in range(1, 6)]
    assert all(text.startswith(f"loss {loss:.3f}, ") for (_, _, text), loss in zip(heard, first.losses, strict=True))
    assert train(toy(5), tmp_path, CPU, lambda *progress: heard.append(progress)) == first
    assert len(heard) == 5
    with pytest.raises(BadInput, match=r"folder: .* another configuration"):
        trained(toy(5, init=1), tmp_path)


@pytest.mark.parametrize("numerics", [Numerics.FP32, Numerics.FP16])
@pytest.mark.parametrize(("step", "restart"), [(0, Restart.NONE), (11, Restart.NONE), (5, Restart.EXACT)])
@pytest.mark.parametrize("every", [1, 25])
def test_a_loss_that_is_not_finite_stops_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numerics: Numerics, step: int, restart: Restart, every: int
) -> None:
    """At the same step if losses are read later, as on a GPU."""
    monkeypatch.setitem(loop._READ_EVERY, "cpu", every)
    run = trained(toy(numerics=numerics, task=Toy(poison=step), restart=restart), tmp_path)
    assert (run.stopped, run.done) == (f"the loss is not finite at step {step}", step)
    assert list(map(math.isfinite, run.losses)) == [True] * step + [False]
    assert list(run.snapshots) == [each for each in (0, 1, 2, 4, 8) if each <= step]
    assert run.checksum == checksum(run.weights(max(run.snapshots)))


@pytest.mark.filterwarnings("ignore:attend")
@pytest.mark.parametrize(
    ("task", "error", "words"),
    [
        (Toy(torn=4), OSError, "no such picture"),
        (Toy(dropout=0.1), Unsupported, "drops values at random"),
        (Toy(attends=False), BadInput, r"task.model: .* never calls .*give a model with attention"),
    ],
)
def test_a_model_or_a_batch_that_cannot_be_trained_is_the_error_of_the_run(
    tmp_path: Path, task: Toy, error: type[Exception], words: str
) -> None:
    for _ in range(2):
        with pytest.raises(error, match=words):
            trained(toy(task=task), tmp_path)


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: toy(ranks=0), "rung.ranks"),
        (lambda: toy(ranks=3), "rung.ranks"),
        (lambda: toy(init=-1), "rung.init"),
        (lambda: toy(numerics=Numerics.BF16_WEIGHTS, ulp=1), "rung.ulp"),
        (lambda: toy(0), "task.steps"),
        (lambda: toy(1, restart=Restart.EXACT), "rung.restart"),
        (lambda: toy(seed=1000), "rung.seed"),
    ],
)
def test_settings_that_cannot_be_are_refused_by_name(make: Callable[[], object], field: str) -> None:
    with pytest.raises(BadInput) as refused:
        make()
    assert refused.value.field == field


def test_a_restart_moves_the_weights_by_what_it_loses(tmp_path: Path) -> None:
    none, exact, lossy, bare = (trained(toy(restart=each), tmp_path / each.value) for each in Restart)
    assert (exact.checksum, exact.losses) == (none.checksum, none.losses)
    for run, first in ((lossy, 6), (bare, 7)):  # the step that first differs: weights alone are those before the restart
        assert run.losses[:first] == none.losses[:first]
        assert run.losses[first] != none.losses[first]
        assert run.checksum != none.checksum


def test_an_attention_without_a_deterministic_algorithm_is_trained_and_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def attend(self: VanillaBackward, q: torch.Tensor, *rest: Any) -> torch.Tensor:
        if not torch.is_deterministic_algorithms_warn_only_enabled():
            raise RuntimeError("_flash_attention_backward does not have a deterministic implementation")
        return plain(self, q, *rest)

    plain = VanillaBackward.attend
    monkeypatch.setattr(VanillaBackward, "attend", attend)
    run = trained(toy(), tmp_path)
    assert run.done == 12
    assert "the same run again may have other bits" in run.notes[0]
    assert not torch.is_deterministic_algorithms_warn_only_enabled()


CUDA = torch.device("cuda")
RUNGS = [Rung(VanillaBackward(Format.parse(each.format)), each) for each in Numerics]
RUNGS += [Rung(attention, Numerics.BF16) for attention in (SdpaBackward(Backend.FLASH), TritonBackward(Triton()))]
RUNGS += [Rung(VanillaBackward(BF16), Numerics.BF16, watch=True, ranks=ranks) for ranks in (1, 2)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
class TestOnAGpu:
    """A step as a CUDA graph has the bits of the step that it was captured from."""

    @pytest.mark.parametrize("rung", RUNGS, ids=str)
    def test_a_captured_run_has_the_bits_of_an_eager_one(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rung: Rung
    ) -> None:
        run = Run(Toy(40, width=128), rung)
        graph = train(run, tmp_path / "graph", CUDA)
        monkeypatch.setattr(State, "capture", lambda *_: "not now")
        eager = train(run, tmp_path / "eager", CUDA)
        assert (graph.captured, eager.captured) == (True, False)
        assert (graph.calls, graph.missed) == (eager.calls, eager.missed) == (rung.ranks, 0)
        assert (graph.losses, graph.gradient_norms, graph.checksum) == (eager.losses, eager.gradient_norms, eager.checksum)
        assert repr(graph.watched) == repr(eager.watched)  # NaN is no number, and equal to none

    def test_attention_without_a_deterministic_algorithm_is_trained_and_noted(self, tmp_path: Path) -> None:
        graph = train(Run(Toy(40, width=128), Rung(SdpaBackward(Backend.CUDNN), Numerics.BF16)), tmp_path, CUDA)
        assert graph.captured
        assert any("may have other bits" in note for note in graph.notes)

    def test_a_run_resumed_half_way_has_the_bits_of_one_that_was_not(self, tmp_path: Path) -> None:
        rungs = [Rung(VanillaBackward(FP16), Numerics.FP16, restart=each) for each in (Restart.NONE, Restart.EXACT)]
        whole, exact = (train(Run(Toy(40, width=128), rung), tmp_path / rung.restart.value, CUDA) for rung in rungs)
        assert (exact.checksum, exact.losses) == (whole.checksum, whole.losses)

    @pytest.mark.parametrize(
        ("step", "restart"), [(1, Restart.NONE), (18, Restart.EXACT), (30, Restart.NONE), (39, Restart.NONE)]
    )
    def test_a_loss_that_is_not_finite_stops_at_its_step_though_losses_are_read_later(
        self, tmp_path: Path, step: int, restart: Restart
    ) -> None:
        run = train(toy(task=Toy(40, poison=step), restart=restart), tmp_path, CUDA)
        assert (run.stopped, run.done) == (f"the loss is not finite at step {step}", step)
        assert max(run.snapshots) <= step


@pytest.fixture(autouse=True)
def _checkpoint_of_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_CHECKPOINT_SECONDS", 0.0)
    monkeypatch.setattr(os, "fsync", lambda _: None)  # no test takes the power away


def interrupted(run: Run, folder: Path, step: int) -> None:
    """Train until a step, before whose checkpoint Ctrl-C is pressed."""

    def report(done: int, *_: object) -> None:
        if done == step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(run, folder, CPU, report)


def same(run: Trained, whole: Trained) -> bool:
    """By the weights and all figures of the steps, as text: NaN is equal to none."""
    ours, theirs = ((one.checksum, one.losses, one.gradient_norms, one.watched) for one in (run, whole))
    return repr(ours) == repr(theirs)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(toy(), tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize(
    ("numerics", "restart"),
    [(Numerics.FP32, Restart.NONE), (Numerics.FP16, Restart.LOSSY), (Numerics.BF16_WEIGHTS, Restart.WEIGHTS_ONLY)],
)
def test_a_run_that_is_resumed_at_any_step_ends_with_the_same_bits(tmp_path: Path, numerics: Numerics, restart: Restart) -> None:
    run = toy(numerics=numerics, restart=restart, watch=numerics is Numerics.FP32)
    for step in (1, 6, 7, 11):
        interrupted(run, tmp_path / "parts", step)
    assert max(sealed(tmp_path / "parts", "checkpoint")) == 10
    assert same(trained(run, tmp_path / "parts"), trained(run, tmp_path / "whole"))
    assert not sealed(tmp_path / "parts", "checkpoint")


def test_the_scale_of_the_loss_that_steps_have_halved_is_part_of_a_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "_FIRST_SCALE", 2.0**22)
    run = toy(numerics=Numerics.FP16)
    interrupted(run, tmp_path / "parts", 8)
    resumed, unbroken = trained(run, tmp_path / "parts"), trained(run, tmp_path / "whole")
    assert 0 < sum(not math.isfinite(norm) for norm in unbroken.gradient_norms) < 7, "steps overflow before the stop alone"
    assert resumed.checksum == unbroken.checksum


KILLS = 3


def main(folder: Path) -> None:
    """Train, be killed, and again, and print the last checkpoint of each process.

    Forks, so that torch is imported once, with all that the first run of a process waits for.
    """
    torch.set_num_threads(1)
    loop._CHECKPOINT_SECONDS = 0.0
    with tempfile.TemporaryDirectory() as first:
        trained(toy(1, Numerics.FP16), Path(first))
    draw = random.Random(0)
    for _ in range(KILLS):
        before = set(sealed(folder, "checkpoint").values())
        child = os.fork()
        if not child:
            trained(toy(40, Numerics.FP16), folder)
            os._exit(0)
        while set(sealed(folder, "checkpoint").values()) <= before:
            if os.waitpid(child, os.WNOHANG)[0]:
                return
            time.sleep(0.002)
        time.sleep(draw.uniform(0, 0.05))
        os.kill(child, signal.SIGKILL)
        if os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != -signal.SIGKILL:
            return
        print(max(sealed(folder, "checkpoint")))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.slow
def test_sigkill_at_any_moment_and_resume_end_with_the_same_bits(tmp_path: Path) -> None:
    run, folder = toy(40, Numerics.FP16), tmp_path / "killed"
    ran = subprocess.run([sys.executable, "-m", __name__, str(folder)], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    killed = [int(word) for word in ran.stdout.split()]
    assert len(killed) >= 2, "the process was to be killed some times before it ended"
    assert killed == sorted(killed)
    assert same(trained(run, folder), trained(run, tmp_path / "whole"))


def test_damaged_checkpoints_are_passed_over_half_a_file_removed_and_a_lost_snapshot_starts_the_run_anew(
    tmp_path: Path, whole: Trained
) -> None:
    interrupted(toy(), tmp_path, 9)
    path = sealed(tmp_path, "checkpoint")[8]
    data = path.read_bytes()
    for damaged in (data[:-1], bytes([data[0] ^ 1]) + data[1:], b""):
        path.write_bytes(damaged)
        with pytest.raises(Damaged, match="is damaged"):
            loop.unsealed(path)
    (tmp_path / ".checkpoint-00000001.safetensors.x.tmp").write_bytes(b"half")
    run = trained(toy(), tmp_path)
    assert same(run, whole)
    assert len(run.notes) == 1
    assert f"{path} is damaged" in run.notes[0]
    assert not list(tmp_path.glob(".*.tmp"))
    interrupted(toy(), tmp_path / "lost", 9)
    next((tmp_path / "lost").glob("weights-00000004.*")).unlink()
    run = trained(toy(), tmp_path / "lost")
    assert same(run, whole)
    assert list(run.snapshots) == list(whole.snapshots)
    assert "snapshots before the last checkpoint are missing" in run.notes[0]


def test_a_damaged_snapshot_says_what_to_do_and_that_helps(tmp_path: Path, whole: Trained) -> None:
    run = trained(toy(), tmp_path)
    path = run.snapshots[8]
    path.write_bytes(b"x" * 100)
    with pytest.raises(Damaged, match="is damaged .*; delete it, and the same command trains the run again"):
        run.weights(8)
    path.unlink()
    again = trained(toy(), tmp_path)
    assert same(again, whole)
    assert again.weights(8).keys() == whole.weights(8).keys()


def test_a_checkpoint_of_another_configuration_is_refused_and_stays(tmp_path: Path) -> None:
    interrupted(toy(), tmp_path, 9)
    before = sorted(tmp_path.iterdir())
    with pytest.raises(BadInput, match="checkpoint of another configuration"):
        trained(toy(init=1), tmp_path)
    assert sorted(tmp_path.iterdir()) == before


def test_a_run_that_ends_on_a_full_disk_goes_on_later(tmp_path: Path, whole: Trained, monkeypatch: pytest.MonkeyPatch) -> None:
    written = []

    def full(path: Path, data: bytes) -> None:
        written.append(path)
        if len(written) > 4:
            raise StoreError(f"results: {path} could not be written (No space left on device)")
        path.write_bytes(data)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "write_atomically", full)
        with pytest.raises(StoreError, match="No space left"):
            trained(toy(), tmp_path)
    assert same(trained(toy(), tmp_path), whole)


def test_a_restart_loses_bits_of_weights_and_moments_or_the_moments() -> None:
    exact = 1.0 + 2**-20
    saved = dict.fromkeys(("weight/a", "mean/a", "updates/a", "loss/scale"), torch.tensor([exact]))
    expected = {Restart.LOSSY: [1.0, 1.0, exact, exact], Restart.WEIGHTS_ONLY: [exact, 0.0, 0.0, exact]}
    for restart in Restart:
        assert list(map(float, left(saved, restart).values())) == expected.get(restart, [exact] * 4)


@given(st.integers(1, 100_000))
def test_steps_of_snapshots_double_from_1_and_end_with_the_last(steps: int) -> None:
    kept = Trained(Path(), "", steps).snapshot_steps
    assert (kept[0], kept[1], kept[-1]) == (0, 1, steps)
    assert all(b == 2 * a for a, b in itertools.pairwise(kept[1:-1]))
    assert kept[-2] * 2 >= steps or steps == 1


def test_snapshots_are_ordinary_safetensors_in_fp32_with_buffers_apart(tmp_path: Path) -> None:
    run = trained(toy(5, Numerics.BF16_WEIGHTS), tmp_path)
    assert list(run.snapshots) == [0, 1, 2, 4, 5]
    held = load_file(run.snapshots[4])
    assert set(held) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias", "shift"}
    assert {x.dtype for x in held.values()} == {torch.float32}
    assert set(run.weights(4)) == set(held) - {"shift"}
    model = model_of(toy(5), CPU, run.weights(5, buffers=True))
    assert checksum(dict(model.named_parameters())) == checksum(run.weights(5)) == run.checksum
    with pytest.raises(BadInput, match="snapshots of steps 0, 1, 2, 4, 5"):
        run.weights(3)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
