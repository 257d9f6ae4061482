"""Launchers and sweepers of other packages: what their jobs say, how they end, and the figure that a sweeper minimises."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import yaml

from numdev.results.store import Store
from tests.cli.commands import SMALL, Command, jobs, python

pytestmark = pytest.mark.slow

RUN = ("-m", "numdev.cli.main")
OPTUNA = ("hydra/sweeper=optuna", "hydra.sweeper.sampler.seed=1")
TILES = "tiling.bc=choice(8,16,32)"


def has(*packages: str) -> bool:
    return all(importlib.util.find_spec(package) is not None for package in packages)


def needs(*packages: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(not has("hydra_plugins", *packages), reason=f"needs {' and '.join(packages)}")


joblib = needs("hydra_plugins.hydra_joblib_launcher")
optuna = needs("hydra_plugins.hydra_optuna_sweeper")
submitit = needs("hydra_plugins.hydra_submitit_launcher", "submitit")
ray = needs("hydra_plugins.hydra_ray_launcher", "ray")
LAUNCHERS = [
    pytest.param(("hydra/launcher=joblib", "hydra.launcher.n_jobs=2"), marks=joblib, id="joblib"),
    pytest.param(("hydra/launcher=submitit_local", "hydra.launcher.timeout_min=5"), marks=submitit, id="submitit"),
    pytest.param(("hydra/launcher=ray", "+hydra.launcher.ray.init.num_cpus=2"), marks=ray, id="ray"),
]


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs_that_run_elsewhere_say_what_they_did(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    ran = python(*RUN, "measure", "-m", *SMALL, "tiling.bc=8,0,16", *launcher, cwd=tmp_path)
    assert ran.returncode == 2
    assert sorted(line.split()[0] for line in jobs(ran.stdout)) == ["16", "8"]
    (sentence,) = [line for line in ran.stderr.splitlines() if "tiling.bc: 0 cannot be used" in line]
    assert sentence.startswith("problem.n=32 ")
    assert len(list(Store(tmp_path / "results").records())) == 2


@optuna
class TestOptuna:
    def test_minimises_a_metric_and_keeps_every_record(self, numdev: Command) -> None:
        ran = numdev("measure", "-m", *SMALL, *OPTUNA, "hydra.sweeper.n_trials=8", TILES, "objective=out.rmse")
        assert ran.code == 0, ran.err
        assert len(jobs(ran.out)) == 8
        records = {record.config["variant"]["tiling"]["bc"]: record for record in Store(Path("results")).records()}
        means = {
            size: next(
                s["mean"]
                for s in record.summaries("rmse")
                if (s["subject"], s["output"], s["reference"]) == ("variant", "out", "golden")
            )
            for size, record in records.items()
        }
        found = yaml.safe_load(Path("results/sweep/optimization_results.yaml").read_text())
        best = min(means, key=lambda size: means[size])
        assert len(means) > 1
        assert found == {"name": "optuna", "best_params": {"tiling.bc": best}, "best_value": means[best]}

    @joblib
    def test_in_other_processes(self, tmp_path: Path) -> None:
        where = ("hydra/launcher=joblib", "hydra.launcher.n_jobs=2", "hydra.sweeper.n_jobs=2", "hydra.sweeper.max_failure_rate=1")
        sweep = ("-m", *SMALL, *OPTUNA, *where, "hydra.sweeper.n_trials=6", "tiling.bc=choice(0,16)", "objective=out.rmse")
        ran = python(*RUN, "measure", *sweep, cwd=tmp_path)
        assert ran.returncode == 2, "also where the sweeper tolerates failures"
        assert "objective=out.rmse: tiling.bc: 0 cannot be used" in ran.stderr
        assert len(list(Store(tmp_path / "results").records())) == 1
        found = yaml.safe_load((tmp_path / "results/sweep/optimization_results.yaml").read_text())
        assert found["best_params"] == {"tiling.bc": 16}

    def test_jobs_without_a_figure_fail(self, numdev: Command) -> None:
        Path("mine.py").write_text("def fails(q, k, v, mask, scale):\n    raise RuntimeError('deliberate')\n")
        mine = ("attention=custom", "attention.function=mine:fails", "precision=fp32")
        ran = numdev("measure", "-m", *SMALL, *OPTUNA, *mine, "hydra.sweeper.n_trials=2", "objective=out.rmse")
        assert (ran.code, len(jobs(ran.out))) == (1, 2)

    @pytest.mark.parametrize("command", ["measure", "speed", "paper"])
    def test_needs_a_figure(self, numdev: Command, command: str) -> None:
        ran = numdev(command, "-m", "hydra/sweeper=optuna", "problem.n=16")
        assert (ran.code, ran.out, len(ran.err.splitlines())) == (2, "", 1)
        assert ran.err.startswith(
            "hydra/sweeper: 'optuna' cannot be used; it minimises a figure; name one, as in objective=out.max"
        )
