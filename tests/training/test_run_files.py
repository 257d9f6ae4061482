"""Kill and resume end with the same bits, whatever happens to a process or a file; when there are snapshots, and of what."""

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
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from numdev.errors import BadInput, StoreError
from numdev.training import loop, run_files, state
from numdev.training.loop import train
from numdev.training.run import Run
from numdev.training.loop import Damaged, Trained, rounded, sealed, without_moments
from numdev.training.rung import Numerics, Restart
from numdev.training.run import checksum, model_of
from tests.training.toy import CPU, toy, trained


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
    monkeypatch.setattr(state, "_FIRST_SCALE", 2.0**22)
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
            run_files.unsealed(path)
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
        patch.setattr(run_files, "write_atomically", full)
        with pytest.raises(StoreError, match="No space left"):
            trained(toy(), tmp_path)
    assert same(trained(toy(), tmp_path), whole)


def test_a_restart_loses_bits_of_weights_and_moments_or_the_moments() -> None:
    exact = 1.0 + 2**-20
    saved = dict.fromkeys(("weight/a", "mean/a", "updates/a", "loss/scale"), torch.tensor([exact]))
    assert list(map(float, rounded(saved).values())) == [1.0, 1.0, exact, exact]
    assert list(map(float, without_moments(saved).values())) == [exact, 0.0, 0.0, exact]


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
