"""Kill a study at random moments, run the same command again, and compare with an undisturbed run.

    python experiments/kill_and_resume.py [trials=100] [seed=0]

Compared are every record and, byte by byte, every CSV file of the report, timings aside. Prints a table of the trials; exit
code 1 on any difference. Needs a system with fork.
"""

from __future__ import annotations

import filecmp
import os
import random
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import numdev.cli.launch  # what a child imports is imported here once
import numdev.cli.main
import numdev.measurement.studies
from numdev.report.document.report import make_report
from numdev.results.environment import environment
from numdev.results.store import Store

STUDY = """\
title: A study to be killed
base: {problem.n: 128, problem.head_dim: 16, seeds: 2}
scenarios: {each: {softmax: fa1}, end: {softmax: fa2}}
axes:
  precision: [bf16, fp16, fp32, kernel_bf16]
  tiling.bc: [16, 32, 64]
  tiling.order: [forward, random]
"""
POINTS = 48
_POINT = 0.03  # seconds, about what one point takes


@dataclass(frozen=True)
class Trial:
    """One kill: what it met, and what was left of it after the same command ran again.

    Attributes:
        after: the kill came once so many records were there.
        found: records at the kill ...
        points: ... of so many.
        temporary: files that the kill left half written.
        different: names of records and CSV files that are not those of the undisturbed run.
    """

    after: int
    found: int
    points: int
    temporary: int
    different: tuple[str, ...]

    @property
    def is_midway(self) -> bool:
        return 0 < self.found < self.points


def trials(folder: Path, count: int, seed: int, study: str = STUDY, points: int = POINTS) -> Iterator[Trial]:
    """Kill and resume so many times, each in a folder of its own; the undisturbed run is in `whole`."""
    (folder / "configs" / "study").mkdir(parents=True)
    (folder / "configs" / "study" / "killed.yaml").write_text(study)
    chance = random.Random(seed)
    torch.set_num_threads(1)  # threads of OpenMP do not survive a fork
    environment(torch.device("cpu"))  # known from here on to every child, so that a commit meanwhile changes no key
    _finish(folder, "whole")
    for i in range(count):
        after, delay = chance.randrange(points), chance.uniform(0, _POINT)
        found, temporary = _kill(folder, f"trial{i}", after, delay)
        _finish(folder, f"trial{i}")
        yield Trial(after, found, points, temporary, tuple(_different(folder / "whole", folder / f"trial{i}")))


def _kill(folder: Path, name: str, after: int, delay: float) -> tuple[int, int]:
    """Kill the study a while after it has so many records; how many it has then, and how many half-written files."""
    records = folder / name / "records"
    child = _start(folder, name)
    while len(list(records.glob("*.json"))) < after:
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return len(list(records.glob("*.json"))), len(list(records.glob(".*.tmp")))


def _start(folder: Path, name: str) -> int:
    """The study's command in a process of its own; forked, because importing torch takes seconds."""
    child = os.fork()
    if child:
        return child
    os.environ.pop("COLUMNS", None)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(nowhere, stream)
    sys.stdout = sys.stderr = open(os.devnull, "w")  # noqa: SIM115  it lives as long as the process
    code = 1
    try:
        numdev.cli.main.main(
            ["measure", "--config-dir", str(folder / "configs"), "study=killed", f"results={folder / name}", "device=cpu"]
        )
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    finally:
        os._exit(code)


def _finish(folder: Path, name: str) -> None:
    """Run the study to its end.

    Raises:
        RuntimeError: if it does not end well.
    """
    _, status = os.waitpid(_start(folder, name), 0)
    if status:
        raise RuntimeError(f"the study in {folder / name} ended with status {os.waitstatus_to_exitcode(status)}")
    make_report(_untimed(folder / name), folder / name / "report", ["killed"], console=Console(quiet=True))


def _untimed(results: Path) -> Path:
    """A copy of results without what no two runs share: how long they took."""
    store, copy = Store(results), Store(results / "untimed")
    for name, manifest in store.studies().items():
        copy.put_study(name, manifest)
    for record in store.records():
        copy.put(replace(record, seconds=0.0))
    return copy.path


def _different(whole: Path, resumed: Path) -> Iterator[str]:
    for part, pattern in (("untimed/records", "*.json"), ("untimed/studies", "*.json"), ("report", "**/*.csv")):
        names = {str(path.relative_to(root / part)) for root in (whole, resumed) for path in (root / part).glob(pattern)}
        _, mismatch, missing = filecmp.cmpfiles(whole / part, resumed / part, names, shallow=False)
        yield from (f"{part}/{name}" for name in sorted([*mismatch, *missing]))


def main() -> None:
    given = dict(argument.split("=") for argument in sys.argv[1:])
    count, seed = int(given.get("trials", "100")), int(given.get("seed", "0"))
    table = Table("trial", "records at the kill", "half-written files", "differences after resuming")
    done = []
    with tempfile.TemporaryDirectory() as folder:
        for i, trial in enumerate(trials(Path(folder), count, seed)):
            done.append(trial)
            table.add_row(str(i), f"{trial.found} of {trial.points}", str(trial.temporary), ", ".join(trial.different) or "none")
    console = Console()
    console.print(table)
    bad = sum(bool(trial.different) for trial in done)
    midway, temporary = sum(trial.is_midway for trial in done), sum(bool(trial.temporary) for trial in done)
    console.print(f"{count} kills, {midway} of them midway, {temporary} during a write; {bad} differ after resuming")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
