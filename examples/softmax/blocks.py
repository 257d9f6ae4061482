"""How the error of softmax goes with the block of columns: measured, stored, and written as CSV.

PYTHONPATH=examples/softmax python examples/softmax/blocks.py [folder]
"""

from __future__ import annotations

import sys
from pathlib import Path

from softmax import SOFTMAX, Blocked, Eager, Policy, Problem

from numdev.measurement.deviation import Deviations
from numdev.measurement.runner import Runner
from numdev.measurement.studies import run
from numdev.operations.base import Entries
from numdev.report.document.export import to_csv
from numdev.report.reading.frames import load
from numdev.results.store import Store
from numdev.results.study import Study, StudyPoint

BLOCKS = (64, 256, 1024)


def points(rows: int, columns: int, seeds: int) -> tuple[StudyPoint, ...]:
    """Every step in BF16, and FP32 inside, over the block, on normal inputs and with outliers."""
    return tuple(
        StudyPoint(
            Problem(rows, columns, kind=kind),
            Blocked(Policy.parse(preset), block),
            Eager(),
            seeds,
            kind.value,
            {"policy": preset, "block": block},
        )
        for kind in (Entries.NORMAL, Entries.OUTLIERS)
        for preset in ("bf16", "kernel_bf16")
        for block in BLOCKS
    )


def main(folder: Path, rows: int = 64, columns: int = 2048, seeds: int = 5) -> None:
    study = Study("rows_blocks", "The error of softmax over the block of columns", None, (), points(rows, columns, seeds))
    store = Store(folder / "results")
    run(study, Runner(Deviations(SOFTMAX), "cpu"), store)
    rows_of = load(store).rows
    mine = rows_of[rows_of["primary"] & (rows_of["subject"] == "variant") & (rows_of["reference"] == "golden_same_inputs")]
    keys = ["scenario", "label.policy", "label.block"]
    print(mine.groupby(keys)["rmse"].mean().to_string())
    (folder / "rows.csv").write_bytes(to_csv(rows_of))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "reports/rows"))
