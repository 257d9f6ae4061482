"""The process whose calls are counted: what lies within a range, and what is left out."""

from __future__ import annotations

import pickle
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from numdev.arithmetic.formats import FP32, Format
from numdev.attention.base import Output
from numdev.attention.distributions import Distribution
from numdev.attention.mask import Mask
from numdev.attention.operation import ATTENTION
from numdev.attention.problem import Problem, Shape
from numdev.attention.vendor import dispatch as vendor
from numdev.attention.vendor.dispatch import InDtype
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.measurement.speed import traffic

PROBLEM = Problem(Distribution(), Shape(1, 2, 2, 16, 16, 8))
CPU = torch.device("cpu")
SEEN: list[str] = []


@dataclass(frozen=True)
class Watched(InDtype):
    """Says when it is called, and fails at a given call."""

    fails_at: int = 0
    fmt: Format = FP32

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float | None = None) -> Output:
        SEEN.append("call")
        if self.fails_at and SEEN.count("call") == self.fails_at:
            raise RuntimeError("deliberate\nsecond line")
        return Vanilla(FP32)(q, k, v, mask, scale)


@pytest.fixture(autouse=True)
def _no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    SEEN.clear()

    def seen(word: str) -> Callable[..., None]:
        return lambda *_: SEEN.append(word)

    monkeypatch.setattr(traffic, "FLUSH_BYTES", 1024)
    runtime = SimpleNamespace(cudaProfilerStart=seen("start"), cudaProfilerStop=seen("stop"))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "synchronize", seen("wait"))
    monkeypatch.setattr(torch.cuda.nvtx, "range_push", SEEN.append)
    monkeypatch.setattr(torch.cuda.nvtx, "range_pop", seen("pop"))


def written(folder: Path, *packed: bytes) -> Path:
    (folder / "points").write_bytes(pickle.dumps(list(packed)))
    return folder / "points"


def test_one_call_lies_within_the_range_and_one_before_it(tmp_path: Path) -> None:
    traffic.count_calls(written(tmp_path, pickle.dumps((ATTENTION, PROBLEM, Watched()))), CPU)
    assert SEEN == ["call", "wait", "numdev:0", "start", "call", "wait", "stop", "pop"]


@pytest.mark.parametrize(("fails_at", "expected"), [(1, []), (2, ["wait", "numdev:0", "start", "call", "stop", "pop"])])
def test_what_fails_is_remarked_on_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], fails_at: int, expected: list[str]
) -> None:
    points = [pickle.dumps((ATTENTION, PROBLEM, variant)) for variant in (Watched(fails_at), Vanilla(FP32))]
    traffic.count_calls(written(tmp_path, *points), CPU)
    assert capsys.readouterr().err == "numdev:0 RuntimeError: deliberate second line\n"
    assert ["call", *expected, "wait", "numdev:1", "start", "wait", "stop", "pop"] == SEEN


def test_what_cannot_be_loaded_is_remarked_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    traffic.count_calls(written(tmp_path, b"cno_such_module\nname\n.", pickle.dumps((ATTENTION, PROBLEM, Watched()))), CPU)
    assert "numdev:0 ModuleNotFoundError: No module named 'no_such_module'" in capsys.readouterr().err
    assert "numdev:1" in SEEN


def test_nobody_asks_the_profiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(run: object, device: object) -> None:
        raise AssertionError("ncu has the GPU")

    monkeypatch.setattr(vendor, "kernels_of", forbidden)
    monkeypatch.setattr(vendor, "_RAN", {})
    traffic.count_calls(written(tmp_path, pickle.dumps((ATTENTION, PROBLEM, Sdpa(Backend.MATH, FP32)))), CPU)
    assert "numdev:0" in SEEN
    assert vendor._RAN == {}  # what is not proven is not said to be
