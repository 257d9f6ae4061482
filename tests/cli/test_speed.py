"""`numdev speed` from its command line: a point, a sweep, a study with its report, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd

from numdev.results.store import Store
from tests.cli.commands import Command

POINT = ("problem.n=32", "problem.head_dim=8", "device=cpu", "timing.seconds=0.001", "timing.least=3", "timing.most=3")
STUDY = """\
title: Toy
base: {baseline: none, problem.head_dim: 8, precision: fp32, seeds: 1}
axes:
  kernel: {vanilla: {attention: vanilla}, math: {attention: sdpa, attention.backend: math}, none: {attention: flex}}
  problem.n: [16, 32]
"""


def test_one_point_shows_every_figure(numdev: Command) -> None:
    ran = numdev("speed", *POINT, "attention=vanilla", "precision=fp32", "metrics=all")
    assert ran.code == 0
    for word in ("latency", "tflops", "peak_bytes", "intensity", "rmse"):
        assert word in ran.out
    assert len(list(Store(Path("results/speed")).records())) == 1
    assert "already measured" in numdev("speed", *POINT, "attention=vanilla", "precision=fp32").out


def test_a_sweep_is_a_line_each(numdev: Command) -> None:
    ran = numdev("speed", *POINT, "-m", "attention=vanilla,tiled,flex")
    assert ran.code == 3, "flex has no figures here"
    _, names, *lines = ran.out.splitlines()
    assert names.split() == ["attention", "ms", "TFLOP/s", "of", "matmul", "MiB", "RMSE", "status"]
    assert [line.split()[0] for line in lines] == ["vanilla", "tiled", "flex"]
    assert float(lines[0].split()[1]) > 0
    assert "unsupported, attention: FlexAttention" in lines[2]


def test_a_study_ends_with_its_report_and_goes_on_where_it_stopped(numdev: Command, own_study: Any) -> None:
    own_study(STUDY)
    command = ("speed", "--config-dir", "mine", "study=toy", *POINT[2:], "out=shown")
    first = numdev(*command)
    assert first.code == 0
    assert "6 points, 6 measured" in first.out
    assert len(pd.read_csv("shown/speed.csv")) == 4
    assert (pd.read_csv("shown/points.csv")["status"] == "unsupported").sum() == 2
    assert Path("shown/figures/toy_memory.svg").is_file()
    assert "0 measured" in numdev(*command).out
    told = Store(Path("results/speed")).studies()["toy"]["command"]
    assert told == "numdev speed --config-dir mine study=toy timing.seconds=0.001 timing.least=3 timing.most=3"
