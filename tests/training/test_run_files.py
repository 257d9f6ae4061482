"""Kill and resume end with the same bits, whatever happens to a process or a file; when there are snapshots, and of what."""

from __future__ import annotations

import itertools
import math
import os
import shutil
import subprocess
import sys
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from numdev.errors import BadInput, StoreError
from numdev.training import run_files, state
from numdev.training.loop import Execution, train
from numdev.training.run import Run
from numdev.training.run_files import Damaged, Sealed, Trained, rounded, steps_of, without_moments
from numdev.training.rung import Numerics, Restart
from tests.training.toy import CPU, interrupted_at, toy, trained


def stopped(run: Run, folder: Path, step: int, seconds: float = 0.0) -> None:
    """Train until a step, at which Ctrl-C is pressed."""
    with interrupted_at(step) as told, pytest.raises(KeyboardInterrupt):
        train(run, folder, CPU, told, Execution(checkpoint_seconds=seconds))


def checkpoints(folder: Path) -> list[Sealed]:
    return Sealed.all(folder, "checkpoint")


def same(found: Trained, whole: Trained) -> bool:
    return (found.checksum, found.losses, found.gradient_norms) == (whole.checksum, whole.losses, whole.gradient_norms)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Trained:
    return trained(toy(), tmp_path_factory.mktemp("whole"))


class TestResume:
    @pytest.mark.parametrize(
        ("numerics", "restart"),
        [(Numerics.FP32, Restart.NONE), (Numerics.FP16, Restart.LOSSY), (Numerics.BF16_WEIGHTS, Restart.WEIGHTS_ONLY)],
    )
    def test_at_any_step_it_ends_with_the_same_bits(self, tmp_path: Path, numerics: Numerics, restart: Restart) -> None:
        run = toy(numerics=numerics, restart=restart)
        for step in (1, 6, 7, 11):
            stopped(run, tmp_path / "parts", step)
            assert checkpoints(tmp_path / "parts")[-1].step == step
        assert same(trained(run, tmp_path / "parts"), trained(run, tmp_path / "whole"))
        assert not checkpoints(tmp_path / "parts")

    def test_so_it_does_while_steps_overflow(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The scale of the loss that steps have halved is part of a checkpoint."""
        monkeypatch.setattr(state, "_FIRST_SCALE", 2.0**22)
        run = toy(numerics=Numerics.FP16)
        stopped(run, tmp_path / "parts", 7)
        found, unbroken = trained(run, tmp_path / "parts"), trained(run, tmp_path / "whole")
        assert 0 < sum(not math.isfinite(norm) for norm in unbroken.gradient_norms) < 7, "steps overflow before the stop alone"
        assert found.checksum == unbroken.checksum

    def test_ctrl_c_before_a_snapshot_is_written_keeps_it_too(self, tmp_path: Path, whole: Trained) -> None:
        """A checkpoint of step 8 without its snapshot would start the run anew."""
        stopped(toy(), tmp_path, 8, seconds=3600.0)
        assert [found.step for found in checkpoints(tmp_path)] == [8]
        found = trained(toy(), tmp_path)
        assert same(found, whole)
        assert list(found.snapshots) == list(whole.snapshots)
        assert not found.notes


class TestDamage:
    @pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
    def test_a_damaged_checkpoint_is_passed_over(self, tmp_path: Path, whole: Trained, how: str) -> None:
        stopped(toy(), tmp_path, 9)
        path = checkpoints(tmp_path)[-1].path
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(bytes({"truncated": data[: len(data) // 2], "flipped": data, "empty": bytearray()}[how]))
        found = trained(toy(), tmp_path)
        assert same(found, whole)
        assert len(found.notes) == 1
        assert f"{path} is damaged" in found.notes[0]

    def test_a_lost_snapshot_starts_the_run_anew(self, tmp_path: Path, whole: Trained) -> None:
        stopped(toy(), tmp_path, 9)
        next(tmp_path.glob("weights-00000004-*")).unlink()
        found = trained(toy(), tmp_path)
        assert same(found, whole)
        assert list(found.snapshots) == list(whole.snapshots)
        assert "snapshots before the last checkpoint are missing" in found.notes[0]

    @pytest.mark.parametrize("step", [8, 12])
    def test_a_damaged_snapshot_says_what_to_do_and_that_helps(self, tmp_path: Path, whole: Trained, step: int) -> None:
        found = trained(toy(), tmp_path)
        path = found.snapshots[step]
        path.write_bytes(b"x" * 100)
        with pytest.raises(Damaged, match="SHA-256 of its name; delete it, and the same command trains the run again"):
            found.weights(step)
        path.unlink()
        again = trained(toy(), tmp_path)
        assert same(again, whole)
        assert again.weights(step).keys() == whole.weights(step).keys()

    def test_one_of_another_configuration_is_refused_and_stays(self, tmp_path: Path) -> None:
        stopped(toy(), tmp_path, 9)
        before = sorted(tmp_path.iterdir())
        with pytest.raises(BadInput, match="checkpoint of another configuration"):
            trained(toy(init=1), tmp_path)
        assert sorted(tmp_path.iterdir()) == before

    def test_half_a_file_of_a_killed_process_is_removed(self, tmp_path: Path) -> None:
        (tmp_path / ".checkpoint-00000001.safetensors.x.tmp").write_bytes(b"half")
        trained(toy(1), tmp_path)
        assert not list(tmp_path.glob(".*.tmp"))


def test_what_a_restart_loses() -> None:
    x = torch.tensor([1.0 + 2**-20])
    state = {"weight/a": x, "mean/a": x, "updates/a": torch.tensor(7.0), "loss/scale": x}
    lossy, bare = rounded(state), without_moments(state)
    assert {name: float(value) for name, value in lossy.items()} == {
        "weight/a": 1.0,
        "mean/a": 1.0,
        "updates/a": 7.0,
        "loss/scale": float(x),
    }
    assert {name: float(value) for name, value in bare.items()} == {
        "weight/a": float(x),
        "mean/a": 0.0,
        "updates/a": 0.0,
        "loss/scale": float(x),
    }


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
def test_sigkill_at_any_moment_and_resume_end_with_the_same_bits(tmp_path: Path) -> None:
    run, folder = toy(40, numerics=Numerics.FP16), tmp_path / "killed"
    told = subprocess.run([sys.executable, "-m", "tests.training.killed", str(folder)], capture_output=True, text=True)
    assert told.returncode == 0, told.stderr
    killed = [int(word) for word in told.stdout.split()]
    assert len(killed) >= 2, "the process was to be killed some times before it ended"
    assert killed == sorted(killed)
    found = trained(run, folder)
    assert found.done == 40
    assert same(found, trained(run, tmp_path / "whole"))


Usage = namedtuple("Usage", ["total", "used", "free"])


@given(st.integers(1, 100_000))
def test_steps_double_from_1_and_end_with_the_last(steps: int) -> None:
    found = steps_of(steps)
    assert found[0] == 0
    assert found[-1] == steps
    assert found[1] == 1
    assert all(b == 2 * a for a, b in itertools.pairwise(found[1:-1]))
    assert found[-2] * 2 >= steps or steps == 1


def test_they_are_ordinary_safetensors_in_fp32_with_buffers_apart(tmp_path: Path) -> None:
    found = trained(toy(5, Numerics.BF16_WEIGHTS), tmp_path)
    assert list(found.snapshots) == [0, 1, 2, 4, 5]
    held = load_file(found.snapshots[4])
    assert set(held) == {"qkv.weight", "qkv.bias", "out.weight", "out.bias", "shift"}
    assert {x.dtype for x in held.values()} == {torch.float32}
    assert set(found.weights(4)) == set(held) - {"shift"}
    assert torch.equal(found.tensors(4)["shift"], torch.full((8,), 0.5))


class TestDisk:
    def test_it_is_measured_before_anything_is_written(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: Usage(10**9, 10**9, 1000))
        with pytest.raises(BadInput, match=r"MB are needed for snapshots and checkpoints and 0 MB are free"):
            trained(toy(), tmp_path)
        assert not list(tmp_path.iterdir())

    def test_a_run_that_ends_for_want_of_it_goes_on_later(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        written = []

        def full(path: Path, data: bytes) -> None:
            written.append(path)
            if len(written) > 4:
                raise StoreError(f"results: {path} could not be written (No space left on device)")
            path.write_bytes(data)

        with monkeypatch.context() as patch:
            patch.setattr(run_files, "write_atomically", full)
            with pytest.raises(StoreError, match="No space left"):
                trained(toy(), tmp_path / "a", checkpoint_seconds=0.0)
        assert trained(toy(), tmp_path / "a").checksum == trained(toy(), tmp_path / "b").checksum
