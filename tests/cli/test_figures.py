"""The figure that `numdev measure plot=` asks for: refused before anything is measured, drawn after all of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from numdev.attention.operation import ATTENTION
from numdev.cli.commands import refuse_plot
from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import Deviations
from numdev.results.store import Store
from tests.cli.test_cli import Command, jobs, numdev

__all__ = ["numdev"]  # the fixture

TINY = ("problem.head_dim=8", "seeds=2", "device=cpu")
SWEEP = (*TINY, "-m", "problem.n=16,32", "precision=bf16,fp16")
STUDY = """\
title: Toy
base: {problem.head_dim: 8, seeds: 1}
axes: {precision: [bf16, fp16], problem.n: [8, 16]}
"""
NAMES = ("problem.n", "precision")


def refused(**plot: Any) -> str:
    """What is wrong with a figure; empty where nothing is."""
    try:
        refuse_plot(OmegaConf.create({"plot": plot}), NAMES, Deviations(ATTENTION))
    except BadInput as error:
        return str(error)
    return ""


@pytest.mark.parametrize("output", ["", "out.", "lse."])
@pytest.mark.parametrize("name", [*NAMES, "subject", "format"])
def test_what_a_command_states_can_be_drawn(output: str, name: str) -> None:
    assert refused(x=name, y=f"{output}rmse", colour=[name], facet=name, reference="baseline") == ""


@pytest.mark.parametrize("part", ["x", "y", "colour", "facet", "reference"])
def test_any_part_that_names_nothing_is_refused(part: str) -> None:
    whole = {"x": "problem.n", "y": "out.rmse", "colour": "precision", "facet": "format", "reference": "golden"}
    assert refused(**whole) == ""
    assert refused(**whole | {part: f"{whole[part]}z"}).startswith(f"plot.{part}: '{whole[part]}z' cannot be used; did you mean ")


def test_a_sweep_that_goes_on_draws_all_of_its_points(numdev: Command) -> None:
    assert numdev("measure", *TINY, "-m", "problem.n=8,16", "precision=bf16,fp16").code == 0
    ran = numdev("measure", *SWEEP, "plot=x: precision, y: lse.max_ulp, colour: problem.n", "out=o")
    ((name, manifest),) = Store(Path("results")).studies().items()
    assert (ran.code, ran.err) == (0, "")
    assert [line.endswith("measured already") for line in jobs(ran.out)[:-1]] == [True, True, False, False]
    assert ran.out.splitlines()[-1] == f"figure: o/{name}.png and .svg"
    drawn = Path(f"o/{name}.svg").read_text()
    assert "Largest difference of lse from golden over precision policy, by sequence length N" in drawn
    assert Path(f"o/{name}.png").is_file()
    assert all(f"<!-- {n} -->" in drawn for n in (8, 16, 32))  # in the legend
    assert "plot" not in manifest["command"] + ran.out.splitlines()[0]
    assert not [key for point in manifest["points"] for key in point["composed"] if key.startswith("plot")]


def test_a_study_draws_what_it_has(numdev: Command) -> None:
    study = Path("mine/study")
    study.mkdir(parents=True)
    for name in ("one", "two"):
        (study / f"{name}.yaml").write_text(STUDY)
    given = ("--config-dir", "mine", "device=cpu")
    wrong = numdev("measure", *given, "-m", "study=one,two", "plot=x: tiling.bc")
    assert (wrong.code, Path("results/records").exists()) == (2, False)
    assert wrong.err.startswith("plot.x: 'tiling.bc' cannot be used; use one of precision, problem.n")
    assert len(wrong.err.splitlines()) == 1, "once for all jobs"
    part = numdev("measure", *given, "study=two", "shard=0", "shards=2", "plot=x: problem.n, y: out.rmse")
    assert (part.code, Path("reports/measure/two.png").is_file()) == (0, True)
    assert "note: two: 2 of 4 points are not measured yet" in part.out


def test_single_points_are_drawn_together(numdev: Command) -> None:
    for n, plot in ((16, ()), (32, ("plot=x: problem.n, y: rmse",))):
        assert numdev("measure", *TINY, f"problem.n={n}", *plot).code == 0
    drawn = Path("reports/measure/points_attention.svg").read_text()
    assert all(f"<!-- {n} -->" in drawn for n in (16, 32))  # ticks


@pytest.mark.parametrize(
    ("command", "error"),
    [
        ((*SWEEP, "dry_run=true", "plot=x: problem.m"), "plot.x: 'problem.m' cannot be used; did you mean problem.n"),
        ((*TINY, "plot=y: rmse"), "plot.x: None cannot be used; there is no sweep that says what the figure is over"),
        ((*TINY, "out=o"), "out: 'o' cannot be used; it is the folder of the figure that plot= asks for"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_measured(numdev: Command, command: tuple[str, ...], error: str) -> None:
    ran = numdev("measure", *command)
    assert (ran.code, len(ran.err.splitlines())) == (2, 1)
    assert ran.err.startswith(error)
    assert not Path("results/records").exists()


def test_a_dry_run_checks_the_figure_and_draws_none(numdev: Command) -> None:
    ran = numdev("measure", *TINY, "problem.n=16", "dry_run=true", "plot=x: problem.n")
    assert (ran.code, list(Path().iterdir())) == (0, [])


def test_what_cannot_be_drawn_after_all_leaves_the_points(numdev: Command) -> None:
    ran = numdev("measure", *TINY, "-m", "problem.n=16,32", "baseline=none", "plot=reference: baseline")
    assert ran.code == 2
    assert ran.err.startswith(
        "plot.reference: 'baseline' cannot be used; the results have golden, golden_same_inputs; the points"
    )
    assert len(list(Store(Path("results")).records())) == 2
