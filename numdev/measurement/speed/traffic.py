"""The bytes that a call really moves, by the GPU's counters. The bytes by a cost model are in `Workload.cost`.

NVIDIA Nsight Compute (`ncu`) counts the calls of a process of its own: `python -m numdev.measurement.speed.traffic FILE`, whose
file holds a list of points, each pickled by itself, so that one that cannot be loaded does not affect the others. It encloses
each counted call in an NVTX range, between cudaProfilerStart and cudaProfilerStop, and prints why it omits one.
"""

from __future__ import annotations

import csv
import math
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import Tensor

from numdev.errors import BadInput
from numdev.measurement.operation import Operation
from numdev.measurement.speed.timing import FLUSH_BYTES

METRICS = {
    "dram_read_bytes": ("dram__bytes_read.sum",),
    "dram_write_bytes": ("dram__bytes_write.sum",),
    # Counted at the multiprocessors: the second-level cache merges requests of several of them for the same lines.
    "l2_bytes": ("l1tex__m_xbar2l1tex_read_bytes.sum", "l1tex__m_l1tex2xbar_write_bytes.sum"),
}
"""By column, the metrics of Nsight Compute that it sums."""
_ALL_METRICS = tuple(metric for metrics in METRICS.values() for metric in metrics)

FLAGS = (
    *("--replay-mode", "app-range"),  # counts a call as a whole: its kernels may overlap, and none is repeated by itself
    *("--cache-control", "none"),
    *("--clock-control", "none"),
    *("--target-processes", "application-only"),  # does not count compilers, which are processes of their own
    "--nvtx",
    "--csv",
    *("--page", "raw"),
    *("--print-units", "base"),
)
NO_PERMISSION = "ERR_NVGPUCTRPERM"  # what ncu says where only the administrator may read the counters

_RANGE, _REMARK = re.compile(r"numdev:(\d+)"), re.compile(r"^numdev:(\d+) (.+)$", re.MULTILINE)
_UNIT, _UNIT_BYTES = re.compile(r"([KMGT]?)(byte|sector)"), {"byte": 1, "sector": 32}
_ERROR = "==ERROR=="
_LONGEST = 300  # characters of a complaint
_CHUNK = 16  # points per child process: more would share its start-up time, fewer would be lost in a crash or by Ctrl-C
_START, _EACH = 300.0, 180.0  # seconds that a child process may take to start, and for each point, which it may compile

Point = tuple[Any, Any]  # problem and variant: replicates have other numbers, and traffic does not depend on them


class Traffic:
    """Counts the traffic of points in child processes; one process counts the requested point and those announced after it."""

    def __init__(self, operation: Operation, device: torch.device, tell: Callable[[str], object] = warnings.warn) -> None:
        """Calls `tell` with a sentence, once for each reason why something was not counted.

        Raises:
            BadInput: naming `counters`, on a device without them, or where Nsight Compute is not installed.
        """
        if device.type != "cuda":
            hint = f"only a GPU counts its traffic, and the device is {device.type}; use counters=false"
            raise BadInput("counters", True, hint)
        if (ncu := shutil.which("ncu")) is None:
            hint = "they are read by Nsight Compute, and its program ncu is not on PATH; install it, or use counters=false"
            raise BadInput("counters", True, hint)
        self._operation, self._ncu, self._tell = operation, ncu, tell
        self._told: set[str] = set()
        self._ahead: list[Point] = []
        self._counted: dict[Point, dict[str, float] | str] = {}  # figures, or the reason why there are none
        self._tried: set[Point] = set()  # not counted in a chunk, perhaps because of another point: they are counted alone
        self._refused = ""

    def announce(self, points: Iterable[Point]) -> None:
        """Keeps the points that will be requested, in this order."""
        self._ahead = list(dict.fromkeys(points))

    def of(self, problem: Any, variant: Any) -> dict[str, float | str]:
        """The columns `COUNTED` of one call; NaN, and the reason, where the call could not be counted."""
        point = (problem, variant)
        behind = self._ahead[self._ahead.index(point) + 1 :] if point in self._ahead else []
        others = (
            [] if point in self._tried else [each for each in behind if each not in self._tried and each not in self._counted]
        )
        for points in ([point, *others][:_CHUNK], [point]):
            if point not in self._counted:
                self._count(points)
        figures = self._counted[point]
        if not isinstance(figures, str):
            return {name: sum(figures[metric] for metric in metrics) for name, metrics in METRICS.items()} | {"not_counted": ""}
        if figures not in self._told:
            self._told.add(figures)
            self._tell(f"counters: traffic is not counted: {figures}")
        return dict.fromkeys(METRICS, math.nan) | {"not_counted": figures}

    def _count(self, points: Sequence[Point]) -> None:
        if self._refused:
            self._counted |= dict.fromkeys(points, self._refused)
            return
        packed: dict[Point, bytes] = {}
        for point in points:
            try:
                packed[point] = pickle.dumps((self._operation, *point))
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                self._counted[point] = f"it cannot be sent to another process: {error}"
        reading = self._profile(list(packed.values())) if packed else Reading()
        if NO_PERMISSION in reading.trouble:
            self._refused = reading.trouble  # every other point would be refused too
        for number, point in enumerate(packed):
            if number in reading.bytes and number not in reading.remarks:  # one that failed may have been counted in part
                self._counted[point] = reading.bytes[number]
            elif len(packed) == 1 or self._refused:
                self._counted[point] = reading.remarks.get(number) or reading.trouble or "ncu listed no figures for the call"
            else:
                self._tried.add(point)

    def _profile(self, packed: list[bytes]) -> Reading:
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # release unused blocks for the child process
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)  # so that the child process imports what this one can
        with TemporaryDirectory(prefix="numdev_") as folder:
            file = Path(folder, "points")
            file.write_bytes(pickle.dumps(packed))
            command = (sys.executable, "-P", "-m", "numdev.measurement.speed.traffic", str(file))
            environment = os.environ | {"PYTHONPATH": path, "LC_ALL": "C"}  # ncu writes numbers as the language has them
            return profile(self._ncu, _ALL_METRICS, command, environment, _START + _EACH * len(packed))


@dataclass(frozen=True)
class Reading:
    """The results of one run.

    Attributes:
        bytes: bytes by metric, of each counted range.
        remarks: what the program printed about a range.
        trouble: what went wrong, in ncu's words if it gave any; empty if nothing did.
    """

    bytes: dict[int, dict[str, float]] = field(default_factory=dict)
    remarks: dict[int, str] = field(default_factory=dict)
    trouble: str = ""


def profile(ncu: str, metrics: Sequence[str], command: Sequence[str], environment: Mapping[str, str], seconds: float) -> Reading:
    """Runs a command under `ncu` for at most `seconds`, and reads what it counted. The command has ended on return."""
    with TemporaryDirectory(prefix="numdev_") as folder:
        log, printed = Path(folder, "log"), Path(folder, "printed")  # no pipes, which stay open with any process left behind
        arguments = [ncu, *FLAGS, "--metrics", ",".join(metrics), "--log-file", str(log), *command]
        code = _run(arguments, environment, printed, seconds)
        counts, words = (path.read_text(errors="replace") if path.is_file() else "" for path in (log, printed))
    trouble = "" if code == 0 else f"stopped after {seconds:.0f} s" if code is None else f"ended with {code}"
    try:
        counted = read(counts, metrics)
    except ValueError as error:
        counted, trouble = {}, str(error)
    remarks = {int(number): text for number, text in _REMARK.findall(words)}
    return Reading(counted, remarks, _complaint(counts, words, trouble))


def _run(arguments: Sequence[str], environment: Mapping[str, str], printed: Path, seconds: float) -> int | None:
    """The exit code, or None if time ran out. Ctrl-C does not reach the processes, which form their own group; this ends them."""
    with printed.open("wb") as sink:
        process = subprocess.Popen(
            arguments, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=dict(environment), start_new_session=True
        )
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            return None
        finally:
            with suppress(ProcessLookupError):  # the program outlives an ncu that dies
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _complaint(counts: str, words: str, trouble: str) -> str:
    """ncu's errors; without any, how it ended and the last line of the program."""
    lines = [line.strip() for line in (counts + "\n" + words).splitlines()]
    errors = [line.removeprefix(_ERROR).strip() for line in lines if line.startswith(_ERROR)]
    last = [line for line in words.splitlines() if line.strip() and not _RANGE.match(line) and not line.startswith("==")][-1:]
    parts = [*errors, *([trouble, *last] if trouble else [])]
    return "; ".join(f"ncu: {part}" if i == 0 else part for i, part in enumerate(dict.fromkeys(parts)))[:_LONGEST]


def read(text: str, metrics: Sequence[str]) -> dict[int, dict[str, float]]:
    """Bytes by metric of each numbered range in a log of `--csv --page raw`, summed over its rows: one, or one for each kernel.

    Raises:
        ValueError: for a metric that is missing, or in another unit than bytes or sectors, or no number.
    """
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.DictReader(lines[first:]) if None not in {*row, *row.values()}]  # others are ncu's remarks
    if missing := [metric for metric in metrics if rows and metric not in rows[0]]:
        raise ValueError(f"no column {missing[0]}")
    counted = dict[int, dict[str, float]]()
    for row in rows[1:]:  # the first has the units
        ranges = " ".join(cell for name, cell in row.items() if "_Range" in name)
        if named := _RANGE.search(ranges):
            sums = counted.setdefault(int(named[1]), dict.fromkeys(metrics, 0.0))
            for metric in metrics:
                sums[metric] += _bytes(metric, row[metric], rows[0][metric])
    return counted


def _bytes(metric: str, value: str, unit: str) -> float:
    known = _UNIT.fullmatch(unit)
    if known is None:
        raise ValueError(f"{metric} is in {unit or 'no unit'!r}, not in bytes or sectors")
    try:
        number = float(value.replace(",", ""))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise ValueError(f"{metric} is {value!r}, which is no number")
    return number * 1000.0 ** " KMGT".index(known[1] or " ") * _UNIT_BYTES[known[2]]


def count_calls(file: Path, device: torch.device) -> None:
    """Makes one call of each point within its range. If a point fails, prints the reason and continues."""
    buffer = torch.zeros(FLUSH_BYTES, dtype=torch.int8, device=device)
    for number, packed in enumerate(pickle.loads(file.read_bytes())):
        operation: Operation | None = None
        try:
            operation, problem, variant = pickle.loads(packed)
            with operation.workload.counting():  # torch's profiler and ncu cannot both have the GPU
                _count_call(number, operation, problem, variant, buffer)
        except Exception as error:
            reason = " ".join(f"{type(error).__name__}: {error}"[:200].split())
            print(f"numdev:{number} {reason}", file=sys.stderr, flush=True)
        finally:
            if operation is not None:
                operation.workload.forget()


def _count_call(number: int, operation: Operation, problem: Any, variant: Any, buffer: Tensor) -> None:
    """Calls the variant once within range `number`, with none of its inputs in the second-level cache.

    Reading the buffer fills the cache. Writing it would not do: the GPU would write those lines to memory during the call, and
    the counters would add them to the call's own. The seed is 0: traffic does not depend on the numbers.
    """
    run = operation.workload.bound(problem, variant, operation.prepared(problem, variant, 0, buffer.device))
    run()  # compiles
    buffer.sum()
    torch.cuda.synchronize(buffer.device)
    runtime: Any = torch.cuda.cudart()
    torch.cuda.nvtx.range_push(f"numdev:{number}")
    runtime.cudaProfilerStart()
    try:
        run()
        torch.cuda.synchronize(buffer.device)
    finally:
        runtime.cudaProfilerStop()
        torch.cuda.nvtx.range_pop()


if __name__ == "__main__":
    count_calls(Path(sys.argv[1]), torch.device("cuda"))
