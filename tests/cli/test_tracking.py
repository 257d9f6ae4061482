"""Points that MLflow learns of, in a store of files."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_cli import SMALL, STUDY, Command, numdev

__all__ = ["numdev"]
CALLBACK = "hydra/callbacks=mlflow"


def test_mlflow_that_is_not_there_is_said_in_one_sentence(numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlflow", None)
    ran = numdev("measure", *SMALL, CALLBACK)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert ran.err.startswith("hydra/callbacks: 'mlflow' cannot be used; MLflow is not installed; pip install ")


class Stored:
    """What a store of files holds after commands."""

    def __init__(self, uri: str) -> None:
        self.client = pytest.importorskip("mlflow").MlflowClient(uri)

    def runs(self, experiment: str = "numdev") -> list[Any]:
        return list(self.client.search_runs([self.client.get_experiment_by_name(experiment).experiment_id]))


@pytest.fixture
def uri(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    return (tmp_path / "mlruns").as_uri()


def test_every_job_of_a_sweep_is_a_run(numdev: Command, tmp_path: Path, uri: str) -> None:
    stated = (*SMALL, CALLBACK, f"hydra.callbacks.mlflow.tracking_uri={uri}", "results=r")
    assert numdev("measure", "-m", "precision=bf16,fp16", *stated).code == 0
    found = Stored(uri)
    runs = {run.data.params["variant.precision.name"]: run for run in found.runs()}
    assert set(runs) == {"uniform_bf16", "uniform_fp16"}
    record = json.loads((tmp_path / "r" / "records" / f"{runs['uniform_bf16'].data.tags['numdev.key']}.json").read_text())
    row = next(
        r for r in record["tables"]["deviation"] if (r["subject"], r["output"], r["reference"]) == ("variant", "out", "golden")
    )
    assert runs["uniform_bf16"].data.metrics["out.variant.golden.rmse"] == pytest.approx(row["rmse"])
    assert runs["uniform_bf16"].data.params["problem.shape.queries"] == "32"
    assert "precision=bf16" in runs["uniform_bf16"].info.run_name
    (artifact,) = found.client.list_artifacts(runs["uniform_bf16"].info.run_id)
    assert artifact.path.endswith(".json")
    numdev("measure", "-m", "precision=bf16,fp16,fp32", *stated)
    assert len(found.runs()) == 3, "those that were logged are not logged again"


def test_points_of_a_study_and_what_failed(numdev: Command, tmp_path: Path, uri: str) -> None:
    folder = tmp_path / "mine" / "study"
    folder.mkdir(parents=True)
    (folder / "toy.yaml").write_text(STUDY.replace("[8, 16, 32]", "[16]").replace("[bf16, fp16]", "[bf16]"))
    where = (CALLBACK, f"hydra.callbacks.mlflow.tracking_uri={uri}", "hydra.callbacks.mlflow.experiment=mine", "results=r")
    assert numdev("measure", "--config-dir", "mine", "study=toy", "device=cpu", *where).code == 0
    (run,) = Stored(uri).runs("mine")
    assert run.data.tags["numdev.study"] == "toy"
    assert "precision=bf16 tiling.bc=16" in run.info.run_name
    assert numdev("measure", *SMALL, "attention=triton", *where).code in (0, 3)
    states = {run.data.tags["numdev.status"]: run.info.status for run in Stored(uri).runs("mine")}
    assert states["ok"] == "FINISHED"
    assert states.get("unsupported", "FAILED") == "FAILED"
