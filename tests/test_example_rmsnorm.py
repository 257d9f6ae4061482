"""A second operation, outside the package: numdev measures, sweeps, times, reports and compares it, and knows no line of it."""

from __future__ import annotations

import csv
import importlib
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from numdev import settings
from numdev.arithmetic.formats import Format
from numdev.cli import build
from numdev.measurement.deviation import Deviations
from numdev.measurement.runner import Runner
from numdev.results.record import Status
from numdev.results.store import Store
from tests.cli.commands import Command, unless

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "rmsnorm"
CONFIGS = ("--config-dir", str(EXAMPLE / "configs"))
RMSNORM = ("operation=rmsnorm", "problem.rows=4", "problem.hidden=64", "seeds=2", "device=cpu")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


def rmse(record: Any, output: str) -> float:
    rows = [row for row in record.rows if (row["subject"], row["reference"]) == ("variant", "golden_same_inputs")]
    return float(sum(row["rmse"] for row in rows if row["output"] == output) / len(rows))


def test_numdev_does_not_know_it() -> None:
    root = EXAMPLE.parent.parent
    files = [*(root / "numdev").rglob("*.py"), *(root / "hydra_plugins").rglob("*.py"), *(root / "configs").rglob("*.yaml")]
    assert len(files) > 100
    assert not [path for path in files if "rmsnorm" in path.read_text().replace("nn.RMSNorm", "").lower()]


def test_golden_is_torchs_own(example: Any) -> None:
    problem = example("rmsnorm.operation").Problem(7, 33)
    inputs = problem.inputs(3)
    result = example("rmsnorm.operation").RMSNORM.golden(**inputs, **problem.arguments())
    expected = torch.nn.functional.rms_norm(inputs["x"], (33,), inputs["w"], problem.eps)
    torch.testing.assert_close(
        result.tensors()["y"], expected, rtol=8 * 2.0**-53, atol=0
    )  # a mean, a root, a quotient, a product


def test_fp64_in_blocks_is_exact_to_roundoff_and_bf16_is_not(example: Any) -> None:
    rmsnorm = example("rmsnorm.operation")
    runner, problem = Runner(Deviations(rmsnorm.RMSNORM), "cpu"), rmsnorm.Problem(8, 300)
    measured = {
        name: runner.measure(problem, rmsnorm.Blocked(rmsnorm.Policy.parse(name), 64), rmsnorm.Eager(), 2)
        for name in ("golden", "kernel_bf16", "bf16")
    }
    assert {record.status for record in measured.values()} == {Status.OK}
    assert {(record.kind, record.operation, record.outputs) for record in measured.values()} == {
        ("deviation", "rmsnorm", ("y", "rms"))
    }
    assert rmse(measured["golden"], "y") < 300 * 2.0**-53 * 10
    assert rmse(measured["golden"], "y") < rmse(measured["kernel_bf16"], "y") < rmse(measured["bf16"], "y")
    assert rmse(measured["kernel_bf16"], "rms") < 1e-6 < rmse(measured["bf16"], "rms")


def test_the_kernel_is_fp32_inside(example: Any) -> None:
    runner = Runner(Deviations(example("rmsnorm.operation").RMSNORM), "cuda" if torch.cuda.is_available() else "cpu")
    record = runner.measure(
        example("rmsnorm.operation").Problem(8, 300), example("rmsnorm.kernel").Fused(Format.parse("fp32")), None, 2
    )
    assert record.status is Status.OK, record.reason
    # x up to 5, w up to 1.5: a sum of 300 squares, a root, a quotient and a product, of 2^-24 each
    assert rmse(record, "y") < (300 / 2 + 3) * 2.0**-24 * 7.5


@pytest.mark.slow
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


@pytest.fixture
def no_module_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has imported none of the example: the command finds its modules by itself."""
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path) != EXAMPLE])
    for name in [name for name in sys.modules if name.partition(".")[0] == "rmsnorm"]:
        monkeypatch.delitem(sys.modules, name)
    caches: tuple[Any, ...] = (build.located, settings.types_of, settings._parameters)
    for kept in caches:  # they hold classes of other tests' modules
        kept.cache_clear()


@pytest.mark.usefixtures("no_module_of_it")
class TestByTheCommandLine:
    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (("policy.summ=fp32",), "policy.summ: there is no such setting; did you mean policy.sum"),
            (("problem.kind=sideways",), "problem.kind: 'sideways' cannot be used; use one of normal, outliers"),
            (("norm=eager", "policy=bf16"), "policy: 'bf16' cannot be used; norm=eager does not read policy.preset"),
            (("baseline=eager",), "baseline: 'eager' cannot be used; it is not a baseline for problems of rmsnorm.operation"),
            (("objective=lse.rmse",), "objective: 'lse.rmse' cannot be used; did you mean "),
            (("operation=rmsnor",), "operation: 'rmsnor' cannot be used; did you mean rmsnorm"),
        ],
    )
    def test_mistakes_are_told_in_its_own_words(self, numdev: Command, words: tuple[str, ...], error: str) -> None:
        ran = numdev("measure", *CONFIGS, *unless(words, RMSNORM), *words)
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
        assert ran.err.startswith(error)

    def test_studies_reports_and_comparison(self, numdev: Command) -> None:
        small = ("problem.rows=4", "problem.hidden=64", "seeds=2", "device=cpu")
        ran = numdev("measure", *CONFIGS, "study=rmsnorm_blocks", *small, "results=after")
        assert ran.code == 0, ran.err
        assert "rmsnorm_blocks: 12 points, 12 measured" in ran.out
        again = numdev("measure", *CONFIGS, "study=rmsnorm_blocks", *small, "results=after")
        assert "0 measured in 0.0 s, 12 already there" in again.out
        manifest = Store(Path("after")).studies()["rmsnorm_blocks"]
        assert manifest["command"].endswith("study=rmsnorm_blocks problem.rows=4 problem.hidden=64 seeds=2")

        ran = numdev("report", "results=after", "out=tables", "format=csv")
        assert ran.code == 0, ran.err
        with Path("tables/results.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["output"] for row in rows} == {"y", "rms"}
        assert {row["output"] for row in rows if row["primary"] == "True"} == {"y"}
        assert {row["label.norm.block"] for row in rows} == {"64", "256", "1024"}
        with Path("tables/claims.csv").open(newline="") as file:
            judged = list(csv.DictReader(file))
        assert [row["claim"] for row in judged] == [f"rmsnorm_blocks_{i}" for i in (1, 1, 2, 2)], "in two scenarios each"
        assert {row["verdict"] for row in judged} <= {"holds", "fails", "undecided"}
        assert "RMSE of y from golden over norm.block, by " in Path("tables/figures/rmsnorm_blocks.svg").read_text()

        shutil.copytree("after", "before")
        ran = numdev("compare", "before", "after", "out=compared")
        assert (ran.code, ran.err) == (0, "")
        assert "no regression in 24 comparisons" in ran.out  # y and rms of each point
        assert len(Path("compared/compare.csv").read_text().splitlines()) == 25

    def test_a_study_of_speed_and_its_report(self, numdev: Command) -> None:
        quick = ("problem.rows=2", "device=cpu", "timing.seconds=0.001", "timing.least=3", "timing.most=3", "out=timed")
        ran = numdev("speed", *CONFIGS, "study=rmsnorm_speed", *quick)
        assert ran.code == 0, ran.err
        with Path("timed/speed.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {(row["operation"], row["label.norm"]) for row in rows} == {("rmsnorm", "torch"), ("rmsnorm", "emulation")}
        assert all(float(row["latency"]) > 0 for row in rows)
