"""Cost of a study of 20,000 stored points: to resume it, and to report on it. Filling the store takes minutes.

Run it as `python -m benchmarks.stored [points] [seeds]`. Exit code 1 if a target is missed: a report of 100,000 points of ten
seeds has to fit in 4 GB, so each replicate of a point has its share of that, beside what the program takes by itself.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

from numdev.results.store import Store

STUDY = """\
title: A grid of tiles
base: {{problem.n: 32, problem.head_dim: 8, seeds: {seeds}}}
axes: {{tiling.br: {br}, tiling.bc: {bc}}}
"""
RESUMED_S = 10.0
PROGRAM_GB, REPLICATE_GB = 0.5, 3.5e-6  # of a report


@dataclass(frozen=True)
class Cost:
    """Of a command: its wall time, what it computed of that, and the most memory that its process held."""

    seconds: float
    computing: float
    gigabytes: float
    last_line: str


def main() -> int:
    points, seeds = (int(text) for text in [*sys.argv[1:], *("20000", "1")[len(sys.argv) - 1 :]])
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fill(folder, points, seeds)
        resumed = numdev(folder, "measure", "--config-dir", "configs", "study=tiles", "device=cpu")
        reported = numdev(folder, "report", "format=csv")
    most = PROGRAM_GB + points * seeds * REPLICATE_GB
    print(f"{points} points, seeds {seeds}; a report may take {most:.2f} GB")
    for what, cost in (("resumed", resumed), ("reported", reported)):
        print(f"{what}: {cost.seconds:.1f} s ({cost.computing:.1f} s computing), {cost.gigabytes:.2f} GB; {cost.last_line}")
    return 0 if resumed.seconds < RESUMED_S and reported.gigabytes < most else 1


def fill(folder: Path, points: int, seeds: int) -> None:
    """Measure one point of the study, whose manifest then names all, and store its figures under the key of each."""
    study = folder / "configs" / "study" / "tiles.yaml"
    study.parent.mkdir(parents=True)
    study.write_text(STUDY.format(seeds=seeds, br=list(range(1, points // 100 + 1)), bc=list(range(1, 101))))
    numdev(folder, "measure", "--config-dir", "configs", "study=tiles", "device=cpu", f"shards={points}")
    store = Store(folder / "results")
    (measured,) = store.records()
    for point in store.studies()["tiles"]["points"]:
        store.put(replace(measured, key=point["key"]))


def numdev(folder: Path, *arguments: str) -> Cost:
    """Run a command to its end."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "numdev.cli.main", *arguments]
    with (folder / "log").open("w+") as log:
        process = subprocess.Popen(command, cwd=folder, stdout=log, stderr=subprocess.STDOUT)
        _, process.returncode, usage = os.wait4(process.pid, 0)
        lines = (folder / "log").read_text().splitlines()
    if process.returncode:
        raise RuntimeError("\n".join(lines[-20:]))
    took, computing = time.perf_counter() - start, usage.ru_utime + usage.ru_stime
    return Cost(took, computing, usage.ru_maxrss * 1024 / 1e9, lines[-1] if lines else "")


if __name__ == "__main__":
    sys.exit(main())
