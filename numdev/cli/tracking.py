"""A Hydra callback that logs measured points to MLflow: `hydra/callbacks=mlflow`."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from omegaconf import DictConfig, OmegaConf

from numdev.cli.compose import flat, written
from numdev.errors import BadInput

_MOST_PARAMS = 100  # of one request to MLflow
_LONGEST = 500  # characters of a parameter, which every MLflow server takes
KEY = "numdev.key"
"""The tag that has a point's key."""


class Mlflow(Callback):
    """After each job, every point of it that has a record becomes a run of MLflow, once.

    A run has the settings of the point as parameters, the means of the chief metrics, `<output>.<subject>.<reference>.<metric>`,
    the status and the place in a study as tags, and the record as an artifact.

    Args:
        tracking_uri: where MLflow keeps runs; MLflow's own default where it is None.
        experiment: their experiment; it is made where there is none.

    Raises:
        BadInput: where MLflow is not installed, or cannot keep runs there.
    """

    def __init__(self, tracking_uri: str | None = None, experiment: str = "numdev") -> None:
        try:
            from mlflow import MlflowClient
            from mlflow.exceptions import MlflowException
        except ImportError:
            raise BadInput("hydra/callbacks", "mlflow", "MLflow is not installed; pip install mlflow-skinny") from None
        try:
            self.client = MlflowClient(tracking_uri)
            known = self.client.get_experiment_by_name(experiment)
            self.experiment = str(self.client.create_experiment(experiment) if known is None else known.experiment_id)
        except MlflowException as error:
            raise BadInput("hydra.callbacks.mlflow.tracking_uri", tracking_uri, " ".join(str(error).split())) from None

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Log the points of a job; jobs of commands that measure nothing have none."""
        from numdev.results.store import Store

        ended, results = job_return.return_value, OmegaConf.select(config, "results")
        if results is None or "fresh" not in config:  # a report has results too
            return
        store = Store(Path(results))
        for key, tags in _points(config, store, ended.key):
            if not self.client.search_runs([self.experiment], f"tags.`{KEY}` = '{key}'", max_results=1):
                self._log(store, key, tags | {"numdev.overrides": ended.job})

    def _log(self, store: Any, key: str, tags: Mapping[str, str]) -> None:
        from mlflow.entities import Metric, Param, RunTag

        from numdev.results.record import Use

        record = store.get(key)
        if record is None:
            return
        about = {KEY: key, "numdev.kind": record.kind, "numdev.operation": record.operation, "numdev.status": record.status.value}
        about |= {"numdev.reason": record.reason} if record.reason else {}
        run = self.client.create_run(self.experiment, run_name=tags.get("numdev.point") or tags["numdev.overrides"] or "defaults")
        number, now = run.info.run_id, int(1000 * time.time())
        params = [Param(name, written(value)[:_LONGEST]) for name, value in flat(record.config)]
        for start in range(0, len(params), _MOST_PARAMS):
            self.client.log_batch(number, params=params[start : start + _MOST_PARAMS])
        metrics = []
        for column in (column for column in record.primary if column.use is Use.CHIEF):
            for row in record.summaries(column.name):
                place = [str(row[name]) for name in ("output", "subject", "reference") if name in row]
                if math.isfinite(row["mean"]):
                    metrics.append(Metric(".".join([*place, column.name]), float(row["mean"]), now, 0))
        self.client.log_batch(number, metrics, tags=[RunTag(name, value[:_LONGEST]) for name, value in {**about, **tags}.items()])
        self.client.log_artifact(number, str(store.path / "records" / f"{key}.json"))
        self.client.set_terminated(number, "FINISHED" if metrics else "FAILED")


def _points(config: DictConfig, store: Any, key: str) -> Iterator[tuple[str, dict[str, str]]]:
    """The keys of a job's points: its own, or those of the studies that it ran, with their place there."""
    if key:
        yield key, {}
        return
    study = config.hydra.runtime.choices.get("study")
    for name in config.get("studies") or ([study] if study else []):
        manifest = store.study(name) or {"points": []}
        for point in manifest["points"]:
            labels = " ".join(f"{label}={written(value)}" for label, value in point["labels"].items())
            place = {"numdev.study": name, "numdev.scenario": point["scenario"]}
            yield point["key"], place | {"numdev.point": f"{name}: {point['scenario']} {labels}".strip()}
