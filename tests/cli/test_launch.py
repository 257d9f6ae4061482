"""A sweep's jobs, launchers and sweepers of other packages, what jobs say and return, and the figure that a sweeper minimises."""

from __future__ import annotations

import importlib.util
import os
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from hydra._internal.utils import get_args_parser
from omegaconf import DictConfig

from numdev.attention.operation import ATTENTION
from numdev.cli import launch
from numdev.cli.exit_codes import Ended
from numdev.measurement.deviation import Deviations
from numdev.measurement.speed import Speeds
from numdev.results.record import Column, Record, Status
from numdev.results.store import Store
from tests.cli.commands import SMALL, STUDY, Command, jobs, python


class TestSweep:
    def test_an_error_nobody_thought_of_stops_no_other_job(self, numdev: Command, monkeypatch: pytest.MonkeyPatch) -> None:
        from numdev.cli import build

        original = build.point

        def point(request: Any, *arguments: Any) -> Any:
            if request.config["tiling"]["bc"] == 8:
                raise ZeroDivisionError("deliberate")
            return original(request, *arguments)

        monkeypatch.setattr(build, "point", point)
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=4,8,16")
        assert (ran.code, len(jobs(ran.out))) == (1, 2)
        assert ran.err.endswith("numdev failed: ZeroDivisionError: deliberate; HYDRA_FULL_ERROR=1 shows where\n")
        assert len(ran.err.splitlines()) == 1


def test_flags_are_those_of_hydra_but_completion() -> None:
    known = {" ".join(a.option_strings): a.nargs != 0 for a in get_args_parser()._actions if a.option_strings}
    del known["--shell-completion -sc"]
    assert known == dict.fromkeys(launch.FLAGS, False) | dict.fromkeys(launch.FLAGS_WITH_VALUE, True)
    texts = ["a=1", "-m", "--config-dir", "mine", "b=2", "-cn", "other", "c=3", "--info", "defaults", "--cfg=job", "--bogus"]
    flags, unknown = launch.parsed(texts)
    assert (flags.overrides, unknown) == (["a=1", "b=2", "c=3"], ["--bogus"])
    assert (flags.multirun, flags.config_dir, flags.config_name, flags.cfg) == (True, "mine", "other", "job")


class TestObjective:
    ROWS = (
        {"subject": "variant", "reference": "golden", "output": "out", "rmse": 1.0, "seed": 0},
        {"subject": "variant", "reference": "golden", "output": "out", "rmse": 2.0, "seed": 1},
        {"subject": "variant", "reference": "golden", "output": "lse", "rmse": 7.0, "seed": 0},
        {"subject": "variant", "reference": "baseline", "output": "out", "rmse": 9.0, "seed": 0},
    )

    @staticmethod
    def record(rows: Sequence[Any]) -> Record:
        columns: dict[str, tuple[Column, ...]] = {"deviation": (Column("rmse", "absolute"),)}
        tables: dict[str, list[Any]] = {"deviation": list(rows)}
        return Record("k", "deviation", "attention", ("out", "lse"), columns, {}, {}, Status.OK, tables=tables)

    def test_is_the_mean_over_seeds_against_golden(self) -> None:
        record, kind = self.record(self.ROWS), Deviations(ATTENTION)
        assert [kind.figure(name, record) for name in ("out.rmse", "lse.rmse", "rmse")] == [1.5, 7.0, 1.5]
        assert kind.figure("out.rmse", self.record([])) is None
        assert kind.figure("out.rmse", replace(record, status=Status.NONFINITE)) is None
        with pytest.raises(ValueError, match="none"):
            float(Ended())

    def test_names_are_of_the_operation_and_of_the_kind(self) -> None:
        deviations, speeds = Deviations(ATTENTION), Speeds(ATTENTION)
        assert {"out.rmse", "lse.max_ulp"} < set(deviations.figures)
        assert {"latency", "tflops", "rmse"} < set(speeds.figures)
        assert not {"seed", "out.seed", "out.max_index", "algorithm"} & {*deviations.figures, *speeds.figures}


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


def test_a_launcher_that_loses_a_job_says_so_in_one_sentence() -> None:
    class Cancelled(launch.Keeping):
        def launch(self, *_: Any, **__: Any) -> Any:
            raise RuntimeError("Job 7_2 has not\nproduced any output (state: CANCELLED)\nError stream produced:\n...")

    keeping = launch.Keeping(DictConfig({}))
    keeping.job, keeping.launcher, keeping.is_own = launch.Job("train"), Cancelled(DictConfig({})), False
    with pytest.raises(launch.Lost, match=r"^hydra/launcher: RuntimeError: Job 7_2 has not produced any .*CANCELLED\); points"):
        keeping.launch([["shard=2"]], 0)


@pytest.mark.slow
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_jobs_that_run_elsewhere_say_what_they_did(tmp_path: Path, launcher: tuple[str, ...]) -> None:
    ran = python(*RUN, "measure", "-m", *SMALL, "tiling.bc=8,0,16", *launcher, cwd=tmp_path)
    assert ran.returncode == 2
    assert sorted(line.split()[0] for line in jobs(ran.stdout)) == ["16", "8"]
    (sentence,) = [line for line in ran.stderr.splitlines() if "tiling.bc: 0 cannot be used" in line]
    assert sentence.startswith("problem.n=32 ")
    assert len(list(Store(tmp_path / "results").records())) == 2


# Slurm's commands, as far as submitit calls them: `sbatch` runs the tasks of an array here, but for the cancelled one.
SLURM = {
    "sbatch": """\
        echo Submitted batch job $ARRAY
        last=$(sed -n 's/.*--array=0-\\([0-9]*\\).*/\\1/p' "$1")
        for i in $(seq 0 "$last"); do
            test "$i" = "$CANCELLED" && continue
            SLURM_JOB_ID=$ARRAY$i SLURM_ARRAY_JOB_ID=$ARRAY SLURM_ARRAY_TASK_ID=$i bash "$1" >/dev/null 2>&1 &
        done""",
    "srun": """\
        while [[ $1 == --* ]]; do
            [[ $1 == --unbuffered ]] || shift
            shift
        done
        exec "$@\"""",
    "sacct": """\
        echo 'JobID|State|NodeList'
        echo "${ARRAY}_$CANCELLED|CANCELLED by 0|here\"""",
}


@pytest.mark.slow
@submitit
class TestSlurm:
    def test_a_cancelled_job_is_named_and_measured_again(self, tmp_path: Path) -> None:
        commands, mine = tmp_path / "bin", tmp_path / "mine/study"
        commands.mkdir()
        for name, text in SLURM.items():
            (commands / name).write_text(f"#!/bin/bash\n{textwrap.dedent(text)}\n")
            (commands / name).chmod(0o755)
        mine.mkdir(parents=True)
        (mine / "toy.yaml").write_text(STUDY)
        study = (*RUN, "measure", "-m", "--config-dir", "mine", "study=toy", "shard=range(0,3)", "device=cpu")
        command = (*study, "hydra/launcher=submitit_slurm", "hydra.launcher.partition=any")
        path = f"{commands}{os.pathsep}{os.environ['PATH']}"
        lost = python(*command, cwd=tmp_path, PATH=path, ARRAY="7", CANCELLED="2")
        assert (lost.returncode, lost.stdout) == (1, "")
        assert lost.stderr.startswith("hydra/launcher: UncompletedJobError: Job 7_2 (task: 0) with path ")
        assert "(state: CANCELLED by 0); points that are finished are kept" in lost.stderr
        assert lost.stderr.count("\n") == 1
        assert len(list(Store(tmp_path / "results").records())) == 4
        again = python(*command, cwd=tmp_path, PATH=path, ARRAY="8", CANCELLED="")
        assert again.returncode == 0, again.stderr
        shards = [re.sub(r" in [\d.]+ s", "", line) for line in again.stdout.splitlines() if line.startswith("toy: ")]
        assert shards == [*["toy: 2 points, 0 measured, 2 already there"] * 2, "toy: 2 points, 2 measured"]


@pytest.mark.slow
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
