"""Snapshots: when, of what, and whether there is room."""

from __future__ import annotations

import itertools
import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file

from numdev.errors import BadInput, StoreError
from numdev.training import sealed
from numdev.training.numerics import Numerics
from numdev.training.snapshots import Kept, steps_of
from tests.training.toy import Toy, toy, trained

EVERYTHING = tuple(Kept)
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


def test_the_first_is_the_initial_model(tmp_path: Path) -> None:
    found = trained(toy(1), tmp_path).weights(0)
    assert all(torch.equal(x.detach(), found[name]) for name, x in Toy().model(0).named_parameters())


class TestOnRequest:
    def test_gradients_and_moments_stand_beside_the_weights(self, tmp_path: Path) -> None:
        found = trained(toy(5), tmp_path, kept=EVERYTHING)
        gradients, moments = found.files(Kept.GRADIENTS), found.files(Kept.MOMENTS)
        assert list(gradients) == [1, 2, 4, 5]
        assert list(moments) == [0, 1, 2, 4, 5]
        g = load_file(gradients[1])
        clipped = torch.cat([x.flatten() for x in g.values()]).norm()
        assert float(clipped) == pytest.approx(min(0.1, found.gradient_norms[0]), rel=1e-4)
        m = load_file(moments[1])
        for name, x in g.items():
            assert torch.allclose(m[f"mean/{name}"], 0.1 * x, rtol=1e-5, atol=0)
            assert torch.allclose(m[f"square/{name}"], 0.01 * x.square(), rtol=1e-5, atol=1e-38)
            assert float(m[f"updates/{name}"]) == 1

    def test_they_change_no_bit(self, tmp_path: Path) -> None:
        assert trained(toy(5), tmp_path / "a", kept=EVERYTHING).checksum == trained(toy(5), tmp_path / "b").checksum

    def test_a_finished_run_without_them_is_trained_again(self, tmp_path: Path) -> None:
        first = trained(toy(5), tmp_path)
        again = trained(toy(5), tmp_path, kept=EVERYTHING)
        assert again.checksum == first.checksum
        assert list(again.files(Kept.MOMENTS)) == [0, 1, 2, 4, 5]


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
            patch.setattr(sealed, "write_atomically", full)
            with pytest.raises(StoreError, match="No space left"):
                trained(toy(), tmp_path / "a", checkpoint_seconds=0.0)
        assert trained(toy(), tmp_path / "a").checksum == trained(toy(), tmp_path / "b").checksum
