"""The command `numdev train`: one rung, a study, and what it refuses."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from numdev.arithmetic.formats import FP32
from numdev.attention.exact import RoundedBackward
from numdev.attention.vendor.custom import CustomBackward
from numdev.cli import build
from numdev.cli.compose import composer
from numdev.cli.expand import Expander
from numdev.results.store import Store
from numdev.results.study import StudyPoint
from numdev.sources import config_folder
from numdev.training.rung import Numerics, Restart, Rung
from numdev.training.tasks import Language, TextToImage
from tests.cli.commands import Command, jobs, refusal

LIBRARY = composer((config_folder(),))
EXPANDER = Expander(composer((config_folder(),), operation="training"))
STUDIES = [name for name in LIBRARY.options("study") if LIBRARY.operation_of(name) == "training"]
SMALL = (
    *("task=language", "task.steps=2", "task.warmup=1", "task.batch=2", "task.width=16", "task.depth=1", "task.heads=2"),
    *("task.length=16", "device=cpu"),
)
STUDY = """\
defaults:
  - override /operation@_global_.operation: training
title: Toy
figure: training_ladder
claims: [training_sham]
axes:
  rung:
    sham: {role: control, rung.repeat: 1}
    one last place: {rung.ulp: 1}
"""
POWERED = STUDY.replace(
    "claims: [training_sham]",
    """\
claims:
  - {name: little, claim: One last place moves the weights little, kind: ratio, metric: wasserstein, of: {rung: one last place},
     to: {rung: sham}, below: 1}
  - training_sham
pilot: {source: a paper, seeds: 8, ratios: {little: [[0.1, 0.06, 0.17]]}}""",
)


def cells(out: str) -> dict[str, list[str]]:
    """The rows of a table by the text of their first cells."""
    rows: dict[str, list[str]] = {}
    lines: list[list[str]] = []
    for line in out.splitlines():
        if line.startswith("\u2502"):
            lines.append([cell.strip() for cell in line.strip("\u2502").split("\u2502")])
        elif lines:
            first, *rest = (" ".join(filter(None, column)) for column in zip(*lines, strict=True))
            rows[first], lines = rest, []
    return rows


def point(**settings: Any) -> StudyPoint:
    return build.point(EXPANDER.composer.request({name.replace("__", "."): value for name, value in settings.items()}))


class TestWhatIsMade:
    def test_by_default(self) -> None:
        made = point()
        assert made.problem == TextToImage()
        assert made.variant == made.baseline
        assert (made.variant.numerics, made.variant.attention.format.name, made.seeds) == (Numerics.BF16, "bf16", 1)

    def test_the_full_size(self) -> None:
        assert point(task="scenes_full").problem == TextToImage.full()
        assert point(task="language").problem == Language()

    def test_numerics_follow_the_format_of_attention(self) -> None:
        for fmt, numerics in (("fp32", Numerics.FP32), ("fp16", Numerics.FP16)):
            made = point(precision=f"eager_{fmt}")
            assert (made.variant.numerics, made.baseline.numerics) == (numerics, numerics)
        made = point(rung__numerics="bf16_weights", baseline__numerics="fp32")
        assert made.variant.numerics is Numerics.BF16_WEIGHTS
        assert (made.baseline.numerics, made.baseline.attention.format.name) == (Numerics.FP32, "fp32")

    def test_a_reference_with_exact_attention(self) -> None:
        made = point(baseline__exact=True)
        assert made.baseline == replace(made.variant, attention=RoundedBackward(made.variant.attention.format))

    def test_a_function_of_ones_own_is_trained_with(self) -> None:
        made = point(backward="custom", backward__function="tests.attention.vendor.test_custom:plain", precision="fp32")
        assert made.variant.attention == CustomBackward("tests.attention.vendor.test_custom:plain", FP32)
        assert made.variant.numerics is Numerics.FP32

    def test_a_rung_has_what_is_stated_and_its_reference_has_not(self) -> None:
        stated = {"rung.init": 1, "rung.order": 2, "rung.ulp": 3, "rung.ranks": 2, "rung.restart": "lossy", "rung.repeat": 4}
        made = build.point(EXPANDER.composer.request(stated))
        assert made.variant == Rung(point().variant.attention, Numerics.BF16, 1, 2, 3, 2, Restart.LOSSY, 4)
        assert made.baseline == point().variant


@pytest.mark.parametrize("name", STUDIES)
def test_rungs_of_a_study_differ_in_one_thing(name: str) -> None:
    """But for FP16 and weights in BF16, which are held against FP32 training."""
    made = Expander(LIBRARY).of(name).study(name, LIBRARY.study(name))
    shams = [point for point in made.points if point.variant.repeat]
    assert len(shams) == len({(point.scenario, point.replicate) for point in made.points})
    for point in made.points:
        ours, theirs = point.variant, point.baseline
        names = [field for field in Rung.__dataclass_fields__ if getattr(ours, field) != getattr(theirs, field)]
        if names == ["attention", "numerics"]:
            assert theirs.numerics is Numerics.FP32
            assert type(ours.attention) is type(theirs.attention)
        elif ours.noise is not None:  # of the size that this attention's difference has
            assert names == ["attention", "noise"]
        else:
            assert len(names) == 1


class TestCommand:
    def test_one_point(self, numdev: Command) -> None:
        ran = numdev("train", *SMALL, "rung.ulp=1", "metrics=all")
        assert ran.code == 0, ran.err
        assert all(word in ran.out for word in ("same bits no", "held_out_loss", "seconds_per_step", "ok, 1 replicate"))
        again = numdev("train", *SMALL, "-m", "rung.ulp=1", "rung.repeat=0,1")
        assert again.code == 0
        lines = jobs(again.out)
        assert ["measured already" in line for line in lines] == [True, False]
        assert len(list(Path("results/training/runs").iterdir())) == 3

    def test_a_study_ends_with_its_report(self, numdev: Command, own_study: Any) -> None:
        own_study(STUDY)
        ran = numdev("train", "--config-dir", "mine", "study=toy", *SMALL, "seeds=2", "results=r", "out=o")
        assert ran.code == 0, ran.err
        assert "toy: 4 points, 4 measured" in ran.out
        assert "report: o" in ran.out
        assert {"claims.md", "claims.csv"} <= {path.name for path in Path("o").iterdir()}
        assert list(Path("o/figures").glob("toy*.svg"))
        assert Store(Path("r")).studies()["toy"]["kind"] == "training"
        assert len(list(Path("r/runs").iterdir())) == 6, "the reference is shared"
        shown = json.loads(next(Path("r/records").glob("*.json")).read_text())["config"]
        assert shown["problem"]["type"] == "Language"

    @pytest.mark.slow
    def test_processes_share_rungs_times_seeds_and_a_report_says_what_is_missing(
        self, numdev: Command, own_study: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The second process is a rank of torchrun, which tells it by the environment."""
        own_study(STUDY)
        monkeypatch.setenv("RANK", "1")
        study = ("train", "--config-dir", "mine", "study=toy", *SMALL, "seeds=3", "out=o")
        first = numdev(*study, "results=r", "shard=0", "shards=2")
        assert first.code == 0, first.err
        missing = "3 of 6 points are not measured yet: sham (seed 1); one last place (seeds 0, 2)"
        assert f"note: toy: {missing}; run the study again to finish it" in " ".join(first.out.split())
        (row,) = csv.DictReader(Path("o/claims.csv").read_text().splitlines())
        assert row["verdict"] == "holds, partial"
        assert row["overall"] == "borne out, partial"
        assert (
            row["sentence"] == f"Partial: {missing}. The largest difference of any weight at any step is exactly 0, over 2 runs."
        )
        assert numdev(*study, "results=r", "shard=${oc.env:RANK}", "shards=2").code == 0
        (row,) = csv.DictReader(Path("o/claims.csv").read_text().splitlines())
        assert (row["verdict"], row["overall"]) == ("holds", "borne out")
        assert "exactly 0, over 3 runs" in row["sentence"]
        assert "toy: 6 points, 0 measured" in numdev(*study, "results=r").out
        assert numdev(*study[:-1], "out=p", "results=alone").code == 0
        tables = (
            {path.name: json.loads(path.read_text())["tables"]["weights"] for path in Path(of).glob("*.json")}
            for of in ("r/records", "alone/records")
        )
        assert next(tables) == next(tables)

    def test_a_dry_run_says_what_the_seeds_can_decide(self, numdev: Command, own_study: Any) -> None:
        own_study(POWERED)
        dry = ("train", "--config-dir", "mine", "study=toy", *SMALL, "dry_run=true", "results=r")
        before = numdev(*dry, "seeds=6")
        assert before.code == 0, before.err
        rows = cells(before.out)
        assert rows["One last place moves the weights little"] == ["0.10 [0.06, 0.17]", "holds: > 99% (> 99%)", "4 (4)"]
        assert rows["The reference, trained again, has the same weights to the bit"] == ["none", "unknown", "unknown"]
        assert "pilot: a paper (8 replicates), as the study's file states" in before.out
        assert not Path("r").exists()
        assert numdev(*(one for one in dry if one != "dry_run=true"), "seeds=2", "out=o").code == 0
        after = numdev(*dry, "seeds=6")
        rows = cells(after.out)
        assert rows["The reference, trained again, has the same weights to the bit"][1:] == ["seen, not inferred", "1"]
        assert "pilot: the records of toy in r; else a paper (8 replicates), as the study's file states" in after.out
        assert "12 points, 4 measured already" in after.out, "the pilot's seeds are the first of the study"

    @pytest.mark.parametrize("own", ["3", "[[0.1, 0.2, 0.3]]", "[[0.1, -0.2, 0.3]]", "[]"])
    def test_a_pilot_without_intervals_is_refused(self, numdev: Command, own_study: Any, own: str) -> None:
        own_study(POWERED.replace("[[0.1, 0.06, 0.17]]", own))
        assert refusal(numdev("train", "--config-dir", "mine", "study=toy", "dry_run=true")).startswith("pilot.little: ")

    def test_one_replicate_is_that_of_a_study(self, numdev: Command) -> None:
        for settings in (("rung.seed=1",), ("seeds=2",)):
            assert numdev("train", *SMALL, "rung.ulp=1", *settings).code == 0
        assert len(list(Path("results/training/runs").iterdir())) == 4, "the second command trains replicate 0 alone"
