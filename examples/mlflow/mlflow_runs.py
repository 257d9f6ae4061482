"""A callback of Hydra that logs every measured point to MLflow: `hydra/callbacks=mlflow`."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
from hydra.core.utils import JobReturn
from hydra.experimental.callback import Callback
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, RunTag
from omegaconf import DictConfig

import numdev as nd

KEY = "numdev.key"  # the tag by which a point that is logged is known
LONGEST = 500  # characters of a parameter or tag, which every MLflow server takes


class Mlflow(Callback):
    """Makes a run of every point that a job measured: settings, means of the chief metrics, status, and the record itself."""

    def __init__(self, tracking_uri: str | None = None, experiment: str = "numdev") -> None:
        self.client = MlflowClient(tracking_uri)
        known = self.client.get_experiment_by_name(experiment)
        self.experiment = str(known.experiment_id if known else self.client.create_experiment(experiment))

    def on_job_end(self, config: DictConfig, job_return: JobReturn, **_: Any) -> None:
        """Log the points of a job that are not logged yet."""
        if "fresh" not in config:  # numdev report and map measure nothing
            return
        store = nd.Store(Path(config.results))
        for key, tags in points(config, store, job_return.return_value):
            if not self.client.search_runs([self.experiment], f"tags.`{KEY}` = '{key}'", max_results=1):
                self.log(store, key, tags)

    def log(self, store: nd.Store, key: str, tags: dict[str, str]) -> None:
        record = store.get(key)
        if record is None:
            return
        run = self.client.create_run(self.experiment, run_name=" ".join(tags.values())).info.run_id
        settings = pd.json_normalize(record.config).iloc[0].to_dict()  # by dotted name
        params = [Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        for start in range(0, len(params), 100):  # of one request
            self.client.log_batch(run, params=params[start : start + 100])
        metrics = []
        for name in [column.name for column in record.primary if column.use.name == "CHIEF"]:
            for row in record.summaries(name):
                place = [str(row[part]) for part in ("output", "subject", "reference") if part in row]
                if math.isfinite(row["mean"]):
                    metrics.append(Metric(".".join([*place, name]), float(row["mean"]), 0, 0))
        tags |= {KEY: key, "numdev.kind": record.kind, "numdev.status": record.status.value, "numdev.reason": record.reason}
        self.client.log_batch(run, metrics, tags=[RunTag(name, value[:LONGEST]) for name, value in tags.items()])
        self.client.log_artifact(run, str(store.path / "records" / f"{key}.json"))
        self.client.set_terminated(run, "FINISHED" if metrics else "FAILED")


def points(config: DictConfig, store: nd.Store, ended: Any) -> Iterator[tuple[str, dict[str, str]]]:
    """The key of each point of a job with its place: its own overrides, or scenario and labels in the studies that it ran."""
    if ended.key:
        yield ended.key, {"numdev.overrides": " ".join(ended.overrides)}
        return
    study = config.hydra.runtime.choices.get("study")
    for name in config.get("studies") or filter(None, [study]):
        for point in (store.study(name) or {"points": []})["points"]:
            labels = " ".join(f"{label}={value}" for label, value in point["labels"].items())
            yield point["key"], {"numdev.study": name, "numdev.scenario": point["scenario"], "numdev.labels": labels}
