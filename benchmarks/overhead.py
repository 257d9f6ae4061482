"""Cost of a point, an import and a command beyond the arithmetic."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.timing import Result, bounded, median_seconds, seconds
from numdev import Bench, Distribution, Exact, Precision, Problem, Shape, Store, Tiled, Tiling
from numdev.attention.emulation import baseline_for
from numdev.measurement.studies import run
from numdev.results.study import Study, StudyPoint

# An installed package has its bytecode. Where Python may write none, each process would compile numdev's modules anew.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


def results() -> list[Result]:
    return [point_in_study(), job_in_sweep(), import_time(), help_time()]


def point_in_study(points: int = 60, seeds: int = 1) -> Result:
    """Time per point of a study, less that of the variant's own run.

    What is left: rounding, comparing with three references by every metric, the key, the record, and its write with fsync.
    """
    problem = Problem(Distribution(), Shape(queries=1024, keys=1024))
    variants = [Tiled(Precision.parse("bf16"), Tiling(64, 32 + i)) for i in range(points)]
    bench, baseline = Bench(Exact(), "cpu"), baseline_for(variants[0].format)
    grid = tuple(StudyPoint(problem, variant, baseline, seeds, "", {}) for variant in variants)
    bench.measure(problem, variants[0], baseline, seeds)
    inputs = variants[0].round_inputs(*problem.inputs(0).values())

    def arithmetic() -> None:
        for variant in variants:
            variant(*inputs, **problem.arguments())

    def study() -> None:
        with tempfile.TemporaryDirectory() as folder:
            run(Study("bench", "", None, (), grid), bench, Store(Path(folder)))

    arithmetic(), study()
    extra = statistics.median(seconds(study) - seconds(arithmetic) for _ in range(5)) / points
    return bounded("a point in a study beyond the variant's own run (one seed, N = 1024)", extra, 0.010)


def job_in_sweep(jobs: int = 20) -> Result:
    """Time per job of an ad-hoc sweep through Hydra's basic launcher, by difference of two sweep lengths."""

    def sweep(count: int) -> float:
        with tempfile.TemporaryDirectory() as folder:
            tiles = ",".join(str(16 + i) for i in range(count))
            command = [sys.executable, "-m", "numdev.cli.main", "measure", "-m", f"tiling.bc={tiles}", "problem.n=64", "seeds=1"]
            start = time.perf_counter()
            subprocess.run([*command, "device=cpu"], cwd=folder, check=True, capture_output=True, env=ENVIRONMENT)
            return time.perf_counter() - start

    few, many = (statistics.median(sweep(count) for _ in range(3)) for count in (2, 2 + jobs))
    return bounded("a job of an ad-hoc sweep, arithmetic at N = 64 included", (many - few) / jobs, 0.150)


def import_time() -> Result:
    """Every public name of numdev beyond torch's own import; `import numdev` alone is lazy."""
    code = "import time, torch; start = time.perf_counter(); from numdev import *; print(time.perf_counter() - start)"

    def measured() -> float:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=ENVIRONMENT)
        return float(done.stdout)

    measured()  # writes the bytecode
    return bounded("import numdev, every public name, beyond torch", statistics.median(measured() for _ in range(5)), 0.3)


def help_time() -> Result:
    command = [sys.executable, "-m", "numdev.cli.main", "--help"]
    shown = median_seconds(lambda: subprocess.run(command, check=True, capture_output=True, env=ENVIRONMENT), 5)
    return bounded("numdev --help", shown, 0.3)
