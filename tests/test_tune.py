"""`benchmarks.tune`, which fills the table of launch settings: what it keeps, and what it takes for right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import tune
from numdev.arithmetic.formats import BF16, E5M2, FP16, FP32, Format
from numdev.attention.kernels import portable
from numdev.attention.kernels.launch import INTERPRETED
from numdev.attention.mask import Mask
from numdev.attention.triton import Triton
from tests.attention.kernels.test_launch import CAUSAL, row, table

__all__ = ["table"]  # the fixture


def test_tuning_replaces_rows_one_by_one_and_keeps_the_others(table: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The GPU's part replaced: the second row of two fails, and the first is in the file."""
    made: list[int] = []

    def fake(fmt: Format, head_dim: int, mask: Mask, n: int) -> dict[str, Any]:
        if made:
            raise KeyboardInterrupt
        made.append(head_dim)
        return row(head_dim, 123)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
    monkeypatch.setattr(tune, "tune", fake)
    file = table.with_name("own.json")
    shutil.copy(table, file)
    with pytest.raises(KeyboardInterrupt):
        tune.main(["--formats", "bf16", "--head-dims", "64", "128", "--masks", "none", "--out", str(file)])
    entries = json.loads(file.read_text())["entries"]
    assert len(entries) == 5
    tuned = next(entry for entry in entries if entry["br"] == 123)
    assert tuned["command"].startswith("python -m benchmarks.tune --formats bf16 --head-dims 64 128 --masks none")
    assert (tuned["device"], set(tuned["versions"])) == ("a GPU", {"torch", "triton"})
    assert [entry["br"] for entry in entries if entry["head_dim"] == 64 and entry["mask"] == "none"].count(123) == 1
    assert row(128, 32) in entries
    assert row(64, 16) not in entries


def test_without_a_gpu_it_ends_with_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="2"):
        tune.main([])
    assert capsys.readouterr().err == "benchmarks.tune: tuning needs a CUDA device, and torch finds none here\n"


@pytest.mark.parametrize("fmt", [FP16, *(pytest.param(fmt, marks=pytest.mark.exhaustive) for fmt in (BF16, FP32, E5M2))])
def test_a_candidate_is_held_against_its_emulation(device: str, fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    made = portable.plan

    def right(wrong: float) -> bool:
        def scaled(*arguments: Any) -> Any:
            plan = made(*arguments)
            return plan._replace(run=lambda *qkv: (plan.run(*qkv)[0] * wrong,))

        monkeypatch.setattr(portable, "plan", scaled)
        return tune.Candidate(Triton(fmt), INTERPRETED, 16, CAUSAL, torch.device(device)).is_right()

    assert right(1.0)
    assert not right(1.5)
    assert not right(float("nan"))
