"""A sweep's jobs, what they return, and the figure that a sweeper may minimise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
from hydra._internal.utils import get_args_parser

from numdev.attention.operation import ATTENTION
from numdev.cli import launch
from numdev.cli.exit_codes import Ended
from numdev.measurement.deviation import Deviations
from numdev.measurement.speed import Speeds
from numdev.results.record import Column, Record, Status
from tests.cli.commands import SMALL, Command, jobs


class TestSweep:
    def test_batches(self, numdev: Command) -> None:
        ran = numdev("measure", *SMALL, "-m", "tiling.bc=4,8,0", "hydra.sweeper.max_batch_size=2")
        assert (ran.code, len(jobs(ran.out))) == (2, 2)

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
