"""Finds NVIDIA Nsight Compute (`ncu`), runs a program under it, and reads what it prints.

The program encloses each counted call in an NVTX range, named by `range_name` of a number, between cudaProfilerStart and
cudaProfilerStop. If it must omit a range, it prints the reason as a line of `remark`.
"""

from __future__ import annotations

import csv
import math
import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

from numdev.errors import BadInput

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
_UNIT = re.compile(r"([KMGT]?)(byte|sector)")
_BYTES = {"byte": 1, "sector": 32}
_ERROR = "==ERROR=="
_LONGEST = 300  # characters of a complaint


def find() -> str:
    """The path of `ncu`.

    Raises:
        BadInput: naming `counters`, where it is not on the search path.
    """
    if (path := shutil.which("ncu")) is None:
        mend = "they are read by Nsight Compute, and its program ncu is not on PATH; install it, or use counters=false"
        raise BadInput("counters", True, mend)
    return path


def range_name(number: int) -> str:
    """The NVTX range whose figures are filed under a number."""
    return f"numdev:{number}"


def remark(number: int, text: str) -> str:
    """The line by which a program says why a range will be missing."""
    return f"{range_name(number)} {' '.join(text.split())}"


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
        log, said = Path(folder, "log"), Path(folder, "said")  # no pipes, which stay open with any process left behind
        arguments = [ncu, *FLAGS, "--metrics", ",".join(metrics), "--log-file", str(log), *command]
        code = _run(arguments, environment, said, seconds)
        told, words = (path.read_text(errors="replace") if path.is_file() else "" for path in (log, said))
    trouble = "" if code == 0 else f"stopped after {seconds:.0f} s" if code is None else f"ended with {code}"
    try:
        counted = read(told, metrics)
    except ValueError as error:
        counted, trouble = {}, str(error)
    remarks = {int(number): text for number, text in _REMARK.findall(words)}
    return Reading(counted, remarks, _complaint(told, words, trouble))


def _run(arguments: Sequence[str], environment: Mapping[str, str], said: Path, seconds: float) -> int | None:
    """The exit code, or None if time ran out. Ctrl-C does not reach the processes, which form their own group; this ends them."""
    with said.open("wb") as sink:
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


def _complaint(told: str, words: str, trouble: str) -> str:
    """ncu's errors; without any, how it ended and the last line of the program."""
    lines = [line.strip() for line in (told + "\n" + words).splitlines()]
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
    first = next((i for i, line in enumerate(lines) if line.startswith('"ID"')), None)
    if first is None:
        return {}
    header, *rows = csv.reader(lines[first:])
    whole = [dict(zip(header, row, strict=True)) for row in rows if len(row) == len(header)]  # others are ncu's remarks
    if not whole:
        return {}
    if missing := [metric for metric in metrics if metric not in header]:
        raise ValueError(f"no column {missing[0]}")
    units, found = whole[0], dict[int, dict[str, float]]()
    for row in whole[1:]:
        ranges = " ".join(cell for name, cell in row.items() if "_Range" in name)
        if named := _RANGE.search(ranges):
            sums = found.setdefault(int(named[1]), dict.fromkeys(metrics, 0.0))
            for metric in metrics:
                sums[metric] += _bytes(metric, row[metric], units[metric])
    return found


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
    return number * 1000.0 ** " KMGT".index(known[1] or " ") * _BYTES[known[2]]
