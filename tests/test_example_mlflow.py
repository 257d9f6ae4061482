"""Points that the example's callback logs to MLflow, in a store of files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.cli.commands import SMALL, STUDY, Command

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "mlflow"


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
    usual = ("--config-dir", str(EXAMPLE / "configs"), "hydra/callbacks=mlflow", "results=r")
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
