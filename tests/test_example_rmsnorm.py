"""A second operation, outside the package: numdev measures, stores and reads it, and knows no line of it."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.runner import Runner
from numdev.results.record import Status
from numdev.results.store import Store

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "rmsnorm"


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


def rmse(record: Any, output: str) -> float:
    rows = [row for row in record.rows if (row["subject"], row["reference"]) == ("variant", "golden_same_inputs")]
    return float(sum(row["rmse"] for row in rows if row["output"] == output) / len(rows))


def test_numdev_does_not_know_it() -> None:
    package = EXAMPLE.parent.parent / "numdev"
    assert not [path for path in package.rglob("*.py") if "rmsnorm" in path.read_text().lower()]


def test_golden_is_torchs_own(example: Any) -> None:
    problem = example("rmsnorm.problem").Problem(7, 33)
    inputs = problem.inputs(3)
    found = example("rmsnorm.variants").Golden()(**inputs, **problem.arguments())
    expected = torch.nn.functional.rms_norm(inputs["x"], (33,), inputs["w"], problem.eps)
    torch.testing.assert_close(found.y, expected, rtol=8 * 2.0**-53, atol=0)  # a mean, a root, a quotient, a product


def test_fp64_in_blocks_is_exact_to_roundoff_and_bf16_is_not(example: Any) -> None:
    variants, policy = example("rmsnorm.variants"), example("rmsnorm.policy").Policy
    runner = Runner(Deviations(example("rmsnorm.operation").RMSNORM), "cpu")
    problem = example("rmsnorm.problem").Problem(8, 300)
    found = {
        name: runner.measure(problem, variants.Blocked(policy.compose(name), 64), variants.Eager("bf16"), 2)
        for name in ("golden", "kernel_bf16", "bf16")
    }
    assert {record.status for record in found.values()} == {Status.OK}
    assert {(record.kind, record.operation, record.outputs) for record in found.values()} == {
        ("deviation", "rmsnorm", ("y", "rms"))
    }
    assert rmse(found["golden"], "y") < 300 * 2.0**-53 * 10
    assert rmse(found["golden"], "y") < rmse(found["kernel_bf16"], "y") < rmse(found["bf16"], "y")
    assert rmse(found["kernel_bf16"], "rms") < 1e-6 < rmse(found["bf16"], "rms")


def test_the_kernel_is_fp32_inside(example: Any) -> None:
    runner = Runner(Deviations(example("rmsnorm.operation").RMSNORM), "cuda" if torch.cuda.is_available() else "cpu")
    record = runner.measure(example("rmsnorm.problem").Problem(8, 300), example("rmsnorm.kernel").Fused("fp32"), None, 2)
    assert record.status is Status.OK, record.reason
    # x up to 5, w up to 1.5: a sum of 300 squares, a root, a quotient and a product, of 2^-24 each
    assert rmse(record, "y") < (300 / 2 + 3) * 2.0**-24 * 7.5


def test_a_step_that_there_is_not_is_named(example: Any) -> None:
    from numdev.errors import BadInput

    with pytest.raises(BadInput, match=r"policy\.summe"):
        example("rmsnorm.policy").Policy.compose("bf16", summe="fp32")


def test_its_study_is_stored_read_and_written(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; import blocks; blocks.main(Path(sys.argv[1]), 4, 128, 2)"
    where = {"PYTHONPATH": f"{EXAMPLE}:{EXAMPLE.parent.parent}"}
    command = [sys.executable, "-c", code, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, check=False, env=where)
    assert ran.returncode == 0, ran.stderr
    assert "kernel_bf16" in ran.stdout
    assert len(list(Store(tmp_path / "results").records())) == 12
    header, *lines = (tmp_path / "rows.csv").read_text().splitlines()
    assert "label.block" in header
    assert lines
