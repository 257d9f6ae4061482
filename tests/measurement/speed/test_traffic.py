"""Bytes that calls move: what is read of Nsight Compute, what a record holds, and how it goes on where nothing is counted."""

from __future__ import annotations

import _thread
import math
import pickle
import shutil
import signal
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas as pd
import pytest
import torch
from torch import Tensor

from numdev.api import speed_bench
from numdev.arithmetic.formats import FP32, Format
from numdev.attention.base import Output
from numdev.attention.distributions import Distribution
from numdev.attention.mask import Mask
from numdev.attention.operation import ATTENTION
from numdev.attention.problem import Problem, Shape
from numdev.attention.triton import Triton
from numdev.attention.vendor import dispatch as vendor
from numdev.attention.vendor.dispatch import InDtype
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.cli import runners
from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import COMPARISON
from numdev.measurement.runner import Runner
from numdev.measurement.speed import measurement as module
from numdev.measurement.speed import traffic
from numdev.measurement.speed.columns import COUNTED, MEASURED, OF_COUNTED, derived
from numdev.measurement.speed.measurement import DEVIATIONS, Speeds
from numdev.measurement.speed.timing import Budget
from numdev.measurement.speed.traffic import METRICS, Traffic, read
from numdev.results.record import Record, Status
from tests.cli.test_cli import Command, numdev
from tests.fake_ncu import HEADER, UNITS, FakeNcu, log, row

__all__ = ["numdev"]  # the fixture

VARIANT = Vanilla(FP32)
QUICK = Budget(1e-4, 3, 3)
READ, WRITTEN, CACHE = "dram__bytes_read.sum", "dram__bytes_write.sum", "l1tex__m_xbar2l1tex_read_bytes.sum"
REFUSED = "text = '==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU Performance Counters'"


def problem(n: int = 16) -> Problem:
    return Problem(Distribution(), Shape(queries=n, keys=n, head_dim=8))


class TestRead:
    def test_sums_over_the_kernels_of_the_range(self) -> None:
        text = log(row("100,663,296", "33,554,432.50", "1"), row("10", "20", "30", "a"), row("1", "2", "3", "b, with a comma"))
        other = log(row("10", "20", "30").replace("numdev:call", "other"))
        figures = read(text)
        assert (figures[READ], figures[WRITTEN], figures[CACHE]) == (100663307.0, 33554454.5, 34.0)
        assert [read(each) for each in ("", "==ERROR== nothing\n", HEADER, other)] == [{}] * 4

    @pytest.mark.parametrize(("unit", "factor"), [("byte", 1), ("Kbyte", 1e3), ("Gbyte", 1e9), ("sector", 32), ("Ksector", 32e3)])
    def test_converts_units(self, unit: str, factor: float) -> None:
        assert read(log(row("1.5", "0", "0"), units=UNITS.replace("byte", unit)))[READ] == 1.5 * factor

    @pytest.mark.parametrize(
        ("text", "error"),
        [
            *((log(row("1", "1", "1"), units=UNITS.replace("byte", unit)), f"{READ} is in") for unit in ("", "byte/s", "KiB")),
            (log(row("1", "n/a", "1")), f"{WRITTEN} is 'n/a'"),
            (log(row("nan", "1", "1")), f"{READ} is 'nan', which is no number"),
            (log(row("1", "1", "1")).replace(READ, "other"), f"no column {READ}"),
        ],
    )
    def test_refuses_what_it_does_not_know(self, text: str, error: str) -> None:
        with pytest.raises(ValueError, match=error.replace(".", r"\.")):
            read(text)


@pytest.fixture
def ncu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FakeNcu:
    monkeypatch.setattr(module, "matmul_flops", lambda dtype, device, tf32: 1e9)
    return FakeNcu(tmp_path, monkeypatch)


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def bench(ncu: FakeNcu, notes: list[str]) -> Runner:
    """On a CPU, which has no counters, with those that `ncu` makes up."""
    return Runner(Speeds(ATTENTION, QUICK, Traffic(ATTENTION, torch.device("cuda"), notes.append)), "cpu")


def uncounted(record: Record) -> str:
    """Why there are no figures, of a record that has everything else."""
    assert record.status is Status.OK
    (figures,) = record.rows
    assert figures["latency"] > 0
    assert all(math.isnan(figures[name]) for name in METRICS)
    assert all(math.isnan(derived(figures)[name]) for name in OF_COUNTED)
    return str(figures["not_counted"])


class TestRecord:
    def test_has_what_was_counted(self, bench: Runner, notes: list[str]) -> None:
        record = bench.measure(problem(), VARIANT, seeds=2)
        assert record.status is Status.OK
        for figures in record.rows:
            assert set(figures) == {*(column.name for column in COMPARISON), *MEASURED, *COUNTED, *DEVIATIONS}
            assert [figures[name] for name in COUNTED] == [1000.0, 500.0, 4000.0, ""]
        assert Record.from_json(record.to_json()) == record
        assert notes == []

    def test_without_permission_has_the_rest_and_it_is_said_once(self, bench: Runner, ncu: FakeNcu, notes: list[str]) -> None:
        ncu.behaves(REFUSED)
        for n in (4, 5):
            assert uncounted(bench.measure(problem(n), VARIANT)).startswith("ncu: ERR_NVGPUCTRPERM - The user does not have")
        assert ncu.calls == 1  # it would say the same of every other
        assert [text.split(": ERR")[0] for text in notes] == ["counters: traffic is not counted: ncu"]

    @pytest.mark.parametrize(
        ("behaviour", "reason"),
        [
            ("code, text = 11, ''", "ncu: ended with 11"),
            ("text = ''", "ncu listed no figures for the call"),
            (
                "print('numdev:call OutOfMemoryError: no more')",
                "OutOfMemoryError: no more",
            ),  # its range may have been closed half way
            ("text = ''; print('==ERROR== unrecognised option'); code = 1", "ncu: unrecognised option; ended with 1"),
            ("text = ''; code = 'No module named numdev'", "ncu: ended with 1; No module named numdev"),
            ("text = text.replace('\"byte\"', '\"ns\"')", f"ncu: {READ} is in 'ns', not in bytes or sectors"),
        ],
    )
    def test_says_why_nothing_was_counted(self, bench: Runner, ncu: FakeNcu, behaviour: str, reason: str) -> None:
        ncu.behaves(behaviour)
        assert uncounted(bench.measure(problem(4), VARIANT)) == reason
        ncu.behaves("")
        assert bench.measure(problem(6), VARIANT).rows[0]["l2_bytes"] == 4000

    def test_of_what_cannot_be_sent_says_so(self, bench: Runner, ncu: FakeNcu) -> None:
        class Local(Vanilla):
            pass

        assert uncounted(bench.measure(problem(4), Local(FP32))).startswith("it cannot be sent to another process")
        assert ncu.calls == 0


@pytest.mark.parametrize(
    ("end", "seconds", "code"), [("time.sleep(60)", 2.0, None), ("time.sleep(1); sys.exit(3)", 30.0, 3), ("", 60.0, "ctrl-c")]
)
def test_nothing_is_left_behind(tmp_path: Path, end: str, seconds: float, code: object) -> None:
    """A child of ncu, which is what would hold the GPU, ends with it: where time is up, where ncu dies, and by Ctrl-C."""
    pulse = tmp_path / "pulse"
    child = f"import time\nwhile True: open({str(pulse)!r}, 'a').write('.'); time.sleep(0.02)"
    program = f"import subprocess, sys, time\nsubprocess.Popen([sys.executable, '-c', {child!r}])\n{end or 'time.sleep(60)'}"
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs begin without a handler
    try:
        if code == "ctrl-c":
            threading.Timer(1.5, _thread.interrupt_main).start()
            with pytest.raises(KeyboardInterrupt):
                traffic.run([sys.executable, "-c", program], {}, tmp_path / "printed", seconds)
        else:
            assert traffic.run([sys.executable, "-c", program], {}, tmp_path / "printed", seconds) == code
    finally:
        signal.signal(signal.SIGINT, before)
    size = pulse.stat().st_size
    time.sleep(0.2)
    assert pulse.stat().st_size == size > 0


def test_without_a_gpu_or_ncu_counters_are_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"counters: True cannot be used; .*the device is cpu; use counters=false"):
        speed_bench("cpu", counters=True)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BadInput, match=r"counters: True cannot be used; .*ncu is not on PATH; install it"):
        Traffic(ATTENTION, torch.device("cuda"))


TOY = """\
title: Toy
base: {baseline: none, problem.head_dim: 8, attention: vanilla, precision: fp32, seeds: 1}
axes: {problem.n: [16, 32]}
"""


@pytest.mark.parametrize(("behaviour", "notes"), [("", 0), (REFUSED, 1)])
def test_a_study_from_the_command_line(
    numdev: Command, ncu: FakeNcu, monkeypatch: pytest.MonkeyPatch, behaviour: str, notes: int
) -> None:
    monkeypatch.setattr(runners, "Traffic", lambda operation, device, tell: Traffic(operation, torch.device("cuda"), tell))
    ncu.behaves(behaviour)
    Path("mine/study").mkdir(parents=True)
    Path("mine/study/toy.yaml").write_text(TOY)
    quick = ("device=cpu", "timing.seconds=0.001", "timing.least=3", "timing.most=3")
    ran = numdev("speed", "--config-dir", "mine", "study=toy", "counters=true", *quick)
    assert ran.code == 0
    assert ran.err.count("note: counters: traffic is not counted: ncu: ERR_NVGPUCTRPERM") == notes
    assert pd.read_csv("reports/speed/speed.csv")["l2_bytes"].isna().sum() == 2 * notes
    described = Path("reports/speed/columns.md").read_text()
    assert notes or all(f"| `{name}` |" in described for name in (*COUNTED, *OF_COUNTED))
    assert ("Bytes moved" in ran.out) == (notes == 0)


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
        return VARIANT(q, k, v, mask, scale)


class TestCountedProcess:
    @pytest.fixture(autouse=True)
    def _no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def seen(word: str) -> Callable[..., None]:
            return lambda *_: SEEN.append(word)

        SEEN.clear()
        monkeypatch.setattr(traffic, "FLUSH_BYTES", 1024)
        runtime = SimpleNamespace(cudaProfilerStart=seen("start"), cudaProfilerStop=seen("stop"))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch.cuda, "synchronize", seen("wait"))
        monkeypatch.setattr(torch.cuda.nvtx, "range_push", SEEN.append)
        monkeypatch.setattr(torch.cuda.nvtx, "range_pop", seen("pop"))

    @pytest.mark.parametrize(
        ("fails_at", "expected"),
        [
            (0, ["call", "wait", "numdev:call", "start", "call", "wait", "stop", "pop"]),
            (1, ["call"]),
            (2, ["call", "wait", "numdev:call", "start", "call", "stop", "pop"]),
        ],
    )
    def test_one_call_lies_within_the_range_and_one_before_it(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str], fails_at: int, expected: list[str]
    ) -> None:
        (tmp_path / "point").write_bytes(pickle.dumps((ATTENTION, problem(), Watched(fails_at))))
        traffic.count_call(tmp_path / "point", torch.device("cpu"))
        assert expected == SEEN
        assert capsys.readouterr().err == ("numdev:call RuntimeError: deliberate second line\n" if fails_at else "")

    def test_what_cannot_be_loaded_is_remarked_on(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        (tmp_path / "point").write_bytes(b"cno_such_module\nname\n.")
        traffic.count_call(tmp_path / "point", torch.device("cpu"))
        assert capsys.readouterr().err == "numdev:call ModuleNotFoundError: No module named 'no_such_module'\n"

    def test_nobody_asks_the_profiler(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def forbidden(run: object, device: object) -> None:
            raise AssertionError("ncu has the GPU")

        monkeypatch.setattr(vendor, "kernels_of", forbidden)
        monkeypatch.setattr(vendor, "_RAN", {})
        (tmp_path / "point").write_bytes(pickle.dumps((ATTENTION, problem(), Sdpa(Backend.MATH, FP32))))
        traffic.count_call(tmp_path / "point", torch.device("cpu"))
        assert "numdev:call" in SEEN
        assert vendor._RAN == {}  # what is not proven is not said to be


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or shutil.which("ncu") is None, reason="needs a CUDA device and ncu")
@pytest.mark.parametrize("variant", [Sdpa(Backend.FLASH), Triton()])
def test_a_gpu_reads_its_inputs_about_once(variant: Any) -> None:
    """q, k, v of 64 heads are read from memory; k and v of a head, 1 MiB, stay in a cache of some 50 MiB while they are used.

    The bounds leave room for what other processes move meanwhile, which the GPU counts too.
    """
    shape = Shape(4, 16, 16, 4096, 4096, 64)
    figures = speed_bench("cuda", QUICK, counters=True).measure(Problem(Distribution(), shape), variant).rows[0]
    assert figures["not_counted"] == ""
    assert 0.9 <= figures["dram_read_bytes"] / figures["input_bytes"] <= 3
    assert figures["dram_write_bytes"] <= 3 * figures["output_bytes"]
    assert figures["l2_bytes"] > figures["dram_read_bytes"]
