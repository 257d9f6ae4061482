"""Presets that ship, each in one command: composed by Hydra, measured, and read back from the store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from numdev.cli.main import main
from numdev.results.record import Record, Status
from numdev.results.store import Store

SMALL = ("problem.n=96", "problem.head_dim=32", "problem.heads=2", "seeds=1", "device=cpu", "baseline=none")


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`run("precision=sage2", ...)` measures, and returns the records in the order of the jobs' configurations."""
    monkeypatch.chdir(tmp_path)

    def measured(*arguments: str, code: int = 0) -> list[Record]:
        stated = {text.partition("=")[0] for text in arguments}
        with pytest.raises(SystemExit) as ended:
            main(("measure", *(text for text in SMALL if text.partition("=")[0] not in stated), *arguments))
        assert ended.value.code == code
        return sorted(Store(tmp_path / "results").records(), key=lambda record: str(record.config))

    return measured


def variant_row(record: Record, name: str = "out") -> dict[str, Any]:
    wanted = ("variant", name, "golden_same_inputs")
    return next(row for row in record.rows if (row["subject"], row["output"], row["reference"]) == wanted)


def counter(record: Record, name: str) -> float:
    return float(record.table("counters")[0][name])


OVERFLOWING = ("softmax=fa3_fp8", "softmax.rescale_threshold=4", "problem=normal", "problem.n=256", "problem.head_dim=128")


@pytest.mark.parametrize("precision", ["fa4_fp8", "kernel_e5m2"])
def test_fp8_kernels_saturate(run: Any, precision: str) -> None:
    """P of up to 2^8 * 2^4 is beyond E4M3's 448."""
    (record,) = run(f"precision={precision}", *OVERFLOWING)
    assert record.status is Status.OK
    assert variant_row(record)["nan_count"] == 0
    assert (counter(record, "p_saturated") > 0) == (precision != "kernel_e5m2")


def test_a_shipped_kernel_has_one_name_in_every_group(run: Any) -> None:
    """A policy, a recurrence and a tile, on which 4 bits leave an error below the spread of V."""
    for name in ("fa3_fp8", "fa4_fp8", "sage1", "sage2", "sage2_int4", "sage3"):
        records = run(f"precision={name}", f"softmax={name}", f"tiling={name}", "problem=normal", "problem.n=130")
    assert [record.status for record in records] == [Status.OK] * 6
    assert all(0 < variant_row(record)["rmse"] < 0.15 for record in records)
