"""The bytes that a call really moves, by the GPU's counters. The bytes by a cost model are in `Workload.cost`.

NVIDIA Nsight Compute (`ncu`) counts the call of a process of its own: `python -m numdev.measurement.speed.traffic FILE`, whose
file holds a pickled point. It encloses the call in an NVTX range, between cudaProfilerStart and cudaProfilerStop, and prints why
it made none.
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
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
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

_RANGE = "numdev:call"
_REMARK = re.compile(rf"^{_RANGE} (.+)$", re.MULTILINE)
_UNIT, _UNIT_BYTES = re.compile(r"([KMGT]?)(byte|sector)"), {"byte": 1, "sector": 32}
_ERROR = "==ERROR=="
_LONGEST = 300  # characters of a complaint
_SECONDS = 480.0  # that a process may take, which starts and may compile


class Traffic:
    """Counts the traffic of calls, each in a process of its own."""

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
        self._reasons: set[str] = set()

    def of(self, problem: Any, variant: Any) -> dict[str, float | str]:
        """The columns `COUNTED` of one call; NaN, and the reason, where the call could not be counted."""
        # Without permission for one call, there is none for the others.
        reason = next((reason for reason in self._reasons if NO_PERMISSION in reason), "")
        try:
            if not reason:
                figures = self._count(pickle.dumps((self._operation, problem, variant)))
                sums = {name: sum(figures[metric] for metric in metrics) for name, metrics in METRICS.items()}
                return sums | {"not_counted": ""}
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            reason = f"it cannot be sent to another process: {error}"
        except ValueError as error:
            reason = str(error)
        if reason not in self._reasons:
            self._reasons.add(reason)
            self._tell(f"counters: traffic is not counted: {reason}")
        return dict.fromkeys(METRICS, math.nan) | {"not_counted": reason}

    def _count(self, point: bytes) -> dict[str, float]:
        """Figures by metric; ValueError with the reason where there are none."""
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()  # release unused blocks for the child process
        path = os.pathsep.join(each or os.getcwd() for each in sys.path)  # so that the child process imports what this one can
        environment = os.environ | {"PYTHONPATH": path, "LC_ALL": "C"}  # ncu writes numbers as the language has them
        with TemporaryDirectory(prefix="numdev_") as folder:
            file, log, printed = (Path(folder, name) for name in ("point", "log", "printed"))
            file.write_bytes(point)
            command = [self._ncu, *FLAGS, "--metrics", ",".join(_ALL_METRICS), "--log-file", str(log)]
            command += [sys.executable, "-P", "-m", "numdev.measurement.speed.traffic", str(file)]
            code = run(command, environment, printed, _SECONDS)
            counts, words = (path.read_text(errors="replace") if path.is_file() else "" for path in (log, printed))
        if remark := _REMARK.search(words):  # a call that failed may have been counted in part
            raise ValueError(remark[1])
        trouble = "" if code == 0 else f"stopped after {_SECONDS:.0f} s" if code is None else f"ended with {code}"
        try:
            if figures := read(counts):
                return figures
        except ValueError as error:
            trouble = str(error)
        raise ValueError(_complaint(counts, words, trouble) or "ncu listed no figures for the call")


def run(command: Sequence[str], environment: Mapping[str, str], printed: Path, seconds: float) -> int | None:
    """The exit code, or None if time ran out. Ctrl-C does not reach the processes, which form their own group; this ends them."""
    with printed.open("wb") as sink:  # no pipes, which stay open with any process left behind
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=sink, stderr=sink, env=dict(environment), start_new_session=True
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
    last = [line for line in words.splitlines() if line.strip() and not line.startswith("==")][-1:]
    parts = dict.fromkeys([*errors, *([trouble, *last] if trouble else [])])
    return f"ncu: {'; '.join(parts)}"[:_LONGEST] if parts else ""


def read(text: str) -> dict[str, float]:
    """Bytes by metric in a log of `--csv --page raw`, summed over the rows of the range: one, or one for each kernel.

    Raises:
        ValueError: for a metric that is missing, or in another unit than bytes or sectors, or no number.
    """
    lines = text.splitlines(keepends=True)
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), len(lines))
    rows = [row for row in csv.DictReader(lines[first:]) if None not in {*row, *row.values()}]  # others are ncu's remarks
    if missing := [metric for metric in _ALL_METRICS if rows and metric not in rows[0]]:
        raise ValueError(f"no column {missing[0]}")
    own = [row for row in rows[1:] if any(_RANGE in cell for name, cell in row.items() if "_Range" in name)]
    units = rows[0] if rows else {}
    return {metric: sum(_bytes(metric, row[metric], units[metric]) for row in own) for metric in _ALL_METRICS if own}


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


def count_call(file: Path, device: torch.device) -> None:
    """Makes one call of a point within the range; where it fails, prints the reason."""
    try:
        operation, problem, variant = pickle.loads(file.read_bytes())
        with operation.workload.counting():  # torch's profiler and ncu cannot both have the GPU
            _call(operation, problem, variant, torch.zeros(FLUSH_BYTES, dtype=torch.int8, device=device))
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}"[:200].split())
        print(f"{_RANGE} {reason}", file=sys.stderr, flush=True)


def _call(operation: Operation, problem: Any, variant: Any, buffer: Tensor) -> None:
    """Calls the variant once within the range, with none of its inputs in the second-level cache.

    Reading the buffer fills the cache. Writing it would not do: the GPU would write those lines to memory during the call, and
    the counters would add them to the call's own. The seed is 0: traffic does not depend on the numbers.
    """
    call = operation.workload.bound(problem, variant, operation.prepared(problem, variant, 0, buffer.device))
    call()  # compiles
    buffer.sum()
    torch.cuda.synchronize(buffer.device)
    runtime: Any = torch.cuda.cudart()
    torch.cuda.nvtx.range_push(_RANGE)
    runtime.cudaProfilerStart()
    try:
        call()
        torch.cuda.synchronize(buffer.device)
    finally:
        runtime.cudaProfilerStop()
        torch.cuda.nvtx.range_pop()


if __name__ == "__main__":
    count_call(Path(sys.argv[1]), torch.device("cuda"))
