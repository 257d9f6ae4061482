"""The examples: an operation outside the package, unknown to numdev, studies as YAML alone, and a callback for MLflow."""

from __future__ import annotations

import csv
import importlib
import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import scipy.special
import yaml

from numdev import settings
from numdev.cli import build
from numdev.measurement.deviation import Deviations
from numdev.measurement.runner import Runner
from numdev.report.claims.verdicts import judge
from numdev.report.document.context import Part, context
from numdev.report.reading.frames import load
from numdev.report.studies.registry import claims_of
from numdev.results.record import Status
from numdev.results.store import Store
from tests.cli.commands import SMALL, STUDY, Command, unless
from tests.test_docs import blocks

REPOSITORY = Path(__file__).resolve().parent.parent
EXAMPLE, MLFLOW = REPOSITORY / "examples" / "softmax", REPOSITORY / "examples" / "mlflow"
STUDIES = REPOSITORY / "examples" / "own_study" / "configs" / "study"
CONFIGS = ("--config-dir", str(EXAMPLE / "configs"))
ROWS = ("operation=rows", "problem.rows=4", "problem.columns=64", "seeds=2", "device=cpu")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A module of the example by its name."""
    monkeypatch.syspath_prepend(str(EXAMPLE))
    return importlib.import_module


def rmse(record: Any, output: str) -> float:
    rows = [row for row in record.rows if (row["subject"], row["reference"]) == ("variant", "golden_same_inputs")]
    return float(sum(row["rmse"] for row in rows if row["output"] == output) / len(rows))


def test_golden_is_scipys(example: Any) -> None:
    softmax, inputs = example("softmax"), example("softmax").Problem(7, 33).inputs(3)
    result = softmax.SOFTMAX.golden(**inputs).tensors()
    # x - m is off by u |x - m| < 8 u, exp by 2 u, the sum by 33 u, the quotient by u
    np.testing.assert_allclose(result["p"], scipy.special.softmax(inputs["x"].numpy(), -1), rtol=44 * 2.0**-53)


def test_fp64_in_blocks_is_exact_to_roundoff_and_bf16_is_not(example: Any) -> None:
    softmax = example("softmax")
    runner, problem = Runner(Deviations(softmax.SOFTMAX), "cpu"), softmax.Problem(8, 300)
    measured = {
        name: runner.measure(problem, softmax.Blocked(softmax.Policy.parse(name), 64), softmax.Eager(), 2)
        for name in ("golden", "kernel_bf16", "bf16")
    }
    assert {record.status for record in measured.values()} == {Status.OK}
    assert {(record.kind, record.operation, record.outputs) for record in measured.values()} == {
        ("deviation", "rows", ("p", "lse"))
    }
    assert rmse(measured["golden"], "p") < 300 * 2.0**-53
    assert rmse(measured["golden"], "p") < rmse(measured["kernel_bf16"], "p") < rmse(measured["bf16"], "p")
    assert rmse(measured["kernel_bf16"], "lse") < 1e-6 < rmse(measured["bf16"], "lse")


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
    for name in [name for name in sys.modules if name.partition(".")[0] in ("softmax", "blocks")]:
        monkeypatch.delitem(sys.modules, name)
    caches: tuple[Any, ...] = (build.located, settings.types_of, settings._parameters)
    for kept in caches:  # they hold classes of other tests' modules
        kept.cache_clear()


@pytest.mark.usefixtures("no_module_of_it")
class TestByTheCommandLine:
    @pytest.mark.parametrize(
        ("words", "error"),
        [
            (("precision.summ=fp32",), "precision.summ: 'fp32' cannot be used; there is no such setting; did you mean "),
            (("problem.kind=sideways",), "problem.kind: 'sideways' cannot be used; use one of normal, uniform, outliers"),
            (("form=eager", "precision=bf16"), "precision: 'bf16' cannot be used; form=eager does not read precision.preset"),
            (("baseline=eager",), "baseline: 'eager' cannot be used; it is not a baseline for problems of softmax"),
            (("objective=out.rmse",), "objective: 'out.rmse' cannot be used; did you mean "),
            (("operation=row",), "operation: 'row' cannot be used; did you mean rows"),
        ],
    )
    def test_mistakes_are_told_in_its_own_words(self, numdev: Command, words: tuple[str, ...], error: str) -> None:
        ran = numdev("measure", *CONFIGS, *unless(words, ROWS), *words)
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
        assert ran.err.startswith(error)

    def test_studies_reports_and_comparison(self, numdev: Command) -> None:
        small = ("problem.rows=4", "problem.columns=64", "seeds=2", "device=cpu")
        ran = numdev("measure", *CONFIGS, "study=rows_blocks", *small, "results=after")
        assert ran.code == 0, ran.err
        assert "rows_blocks: 12 points, 12 measured" in ran.out
        again = numdev("measure", *CONFIGS, "study=rows_blocks", *small, "results=after")
        assert "0 measured in 0.0 s, 12 already there" in again.out
        manifest = Store(Path("after")).studies()["rows_blocks"]
        assert manifest["command"].endswith("study=rows_blocks problem.rows=4 problem.columns=64 seeds=2")

        ran = numdev("report", "results=after", "out=tables", "format=csv")
        assert ran.code == 0, ran.err
        with Path("tables/results.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {row["output"] for row in rows} == {"p", "lse"}
        assert {row["output"] for row in rows if row["primary"] == "True"} == {"p"}
        assert {row["label.form.block"] for row in rows} == {"64", "256", "1024"}
        with Path("tables/claims.csv").open(newline="") as file:
            judged = list(csv.DictReader(file))
        assert [row["claim"] for row in judged] == [f"rows_blocks_{i}" for i in (1, 1, 2, 2)], "in two scenarios each"
        assert {row["verdict"] for row in judged} <= {"holds", "fails", "undecided"}
        assert "RMSE of lse from golden over form.block, by " in Path("tables/figures/rows_blocks.svg").read_text()

        shutil.copytree("after", "before")
        ran = numdev("compare", "before", "after", "out=compared")
        assert (ran.code, ran.err) == (0, "")
        assert "no regression in 24 comparisons" in ran.out  # p and lse of each point
        assert not re.search("attention|tile|heads|quer", ran.out)
        assert len(Path("compared/compare.csv").read_text().splitlines()) == 25

    def test_a_study_of_speed_and_its_report(self, numdev: Command) -> None:
        quick = ("problem.rows=2", "device=cpu", "timing.seconds=0.001", "timing.least=3", "timing.most=3", "out=timed")
        ran = numdev("speed", *CONFIGS, "study=rows_speed", *quick)
        assert ran.code == 0, ran.err
        with Path("timed/speed.csv").open(newline="") as file:
            rows = list(csv.DictReader(file))
        assert {(row["operation"], row["label.form"]) for row in rows} == {("rows", "torch"), ("rows", "emulation")}
        assert all(float(row["latency"]) > 0 for row in rows)


def small(name: str) -> dict[str, Any]:
    """A study of the example at toy size, written to `mine/study`."""
    study: dict[str, Any] = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())
    study["base"] |= {"problem.head_dim": 8, "tiling.br": 16, "tiling.bc": 16, "seeds": 3}
    study["axes"] |= {"problem.n": [16, 64]}
    folder = Path("mine/study")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return study


def test_the_guide_shows_the_example() -> None:
    """So that what the guide explains is what is run here."""
    (shown,) = (block for block in blocks(REPOSITORY / "docs/how-to/add-study.md") if block.file == "mine/study/accumulator.yaml")
    assert shown.text == (STUDIES / "accumulator.yaml").read_text()


@pytest.mark.parametrize("name", ["accumulator", pytest.param("gradient_of_q", marks=pytest.mark.slow)])
def test_it_has_question_table_figure_and_verdicts(name: str, numdev: Command) -> None:
    study = small(name)
    ran = numdev("measure", "--config-dir", "mine", f"study={name}", "device=cpu")
    assert ran.code == 0, ran.err
    ran = numdev("report", "results=results", "out=out", "format=csv")
    assert ran.code == 0, ran.err
    assert "note:" not in ran.out
    with Path("out/claims.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [claim["claim"] for claim in study["claims"]]
    assert list(dict.fromkeys(row["text"] for row in rows)) == texts
    titles = [own["title"] for own in study.get("scenarios", {"default": {"title": study["title"]}}).values()]
    assert [row["scenario.title"] for row in rows] == titles * len(texts)
    assert {row["verdict"] for row in rows} <= {"holds", "fails", "undecided"}, "everything was measured"
    assert {row["verdict"] for row in rows} & {"holds", "fails"}, "and something is decided"
    assert {path.name for path in Path("out/figures").iterdir()} == {f"{name}.svg", f"{name}.png"}
    drawn = Path(f"out/figures/{name}.svg")
    metric = "RMSE of dq from golden" if name == "gradient_of_q" else "RMSE of out from golden"
    assert f"{metric} over " in drawn.read_text()

    results = load(Store(Path("results")))
    (section,) = context([Part(results, judge(claims_of(results), results))])["sections"]
    assert (section["title"], section["question"]) == (study["title"], study["question"])
    assert section["measured"].startswith(f"{len(results.points)} points: sequence length N (16, 64), ")
    assert [claim["text"] for claim in section["claims"]] == texts
    assert [len(table["rows"]) for table in section["tables"]] == [2 * len(results.points)]


@pytest.fixture
def runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The runs that MLflow has, by their status of numdev and first setting; the callback writes to the same place."""
    mlflow = pytest.importorskip("mlflow")
    uri = (tmp_path / "mlruns").as_uri()
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    client = mlflow.MlflowClient(uri)
    return lambda: client.search_runs([client.get_experiment_by_name("numdev").experiment_id])


def test_every_point_of_a_sweep_and_of_a_study_is_a_run_once(numdev: Command, tmp_path: Path, runs: Any) -> None:
    mine = tmp_path / "configs"
    (mine / "study").mkdir(parents=True)
    (mine / "study" / "toy.yaml").write_text(STUDY.replace("[8, 16, 32]", "[16]").replace("[bf16, fp16]", "[bf16]"))
    usual = ("--config-dir", str(MLFLOW / "configs"), "hydra/callbacks=mlflow", "results=r")
    for _ in range(2):
        assert numdev("measure", *usual, *SMALL, "-m", "precision=bf16,fp16").code == 0
    sweep = {run.data.params["variant.precision.name"]: run for run in runs()}
    assert (len(runs()), set(sweep)) == (2, {"bf16", "fp16"})
    record = json.loads((tmp_path / "r" / "records" / f"{sweep['bf16'].data.tags['numdev.key']}.json").read_text())
    places = ("variant", "out", "golden")
    row = next(r for r in record["tables"]["deviation"] if (r["subject"], r["output"], r["reference"]) == places)
    assert sweep["bf16"].data.metrics["out.variant.golden.rmse"] == pytest.approx(row["rmse"])
    assert "precision=bf16" in sweep["bf16"].info.run_name

    study = (f"hydra.searchpath=[{mine}]", "study=toy", "device=cpu")
    assert numdev("measure", *usual, *study).code == 0
    (run,) = [run for run in runs() if run.data.tags.get("numdev.study")]
    assert run.info.run_name.endswith("precision=bf16 tiling.bc=16")
    assert numdev("measure", *usual, *SMALL, "attention=triton").code in (0, 3)
    states = {run.data.tags["numdev.status"]: run.info.status for run in runs()}
    assert states["ok"] == "FINISHED"
    assert states.get("unsupported", "FAILED") == "FAILED"
