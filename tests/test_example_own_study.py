"""Studies of one's own, as YAML alone: measured, judged and reported as the named ones are."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import yaml

from numdev.report.claims.verdicts import judge
from numdev.report.document.context import Part, context
from numdev.report.reading.frames import load
from numdev.report.studies.registry import claims_of
from numdev.results.store import Store
from tests.cli.commands import Command
from tests.test_docs import blocks

ROOT = Path(__file__).resolve().parent.parent
STUDIES = ROOT / "examples" / "own_study" / "configs" / "study"
SMALL = {"problem.n": [16, 64]}
BASE = {"problem.head_dim": 8, "tiling.br": 16, "tiling.bc": 16, "seeds": 3}


def small(name: str) -> dict[str, Any]:
    """A study of the example at toy size, written to `mine/study`."""
    study: dict[str, Any] = yaml.safe_load((STUDIES / f"{name}.yaml").read_text())
    study["base"] |= BASE
    study["axes"] |= SMALL
    folder = Path("mine/study")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.yaml").write_text(yaml.safe_dump(study, sort_keys=False))
    return study


def test_the_guide_shows_the_example() -> None:
    """So that what the guide explains is what is run here."""
    (shown,) = (block for block in blocks(ROOT / "docs/how-to/add-study.md") if block.file == "mine/study/accumulator.yaml")
    assert shown.text == (STUDIES / "accumulator.yaml").read_text()


@pytest.mark.parametrize("name", ["accumulator", pytest.param("gradient_of_q", marks=pytest.mark.slow)])
def test_it_has_question_table_figure_and_verdicts(name: str, numdev: Command) -> None:
    study = small(name)
    ran = numdev("measure", "--config-dir", "mine", f"study={name}", "device=cpu")
    assert ran.code == 0, ran.err
    ran = numdev("report", "results=results", "out=out", "format=csv")
    assert ran.code == 0, ran.err
    assert "note:" not in ran.out
    with Path("out/claims.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    texts = [claim["claim"] for claim in study["claims"]]
    assert list(dict.fromkeys(row["text"] for row in rows)) == texts
    titles = [own["title"] for own in study.get("scenarios", {"default": {"title": study["title"]}}).values()]
    assert [row["scenario.title"] for row in rows] == titles * len(texts)
    assert {row["verdict"] for row in rows} <= {"holds", "fails", "undecided"}, "everything was measured"
    assert {row["verdict"] for row in rows} & {"holds", "fails"}, "and something is decided"
    assert {path.name for path in Path("out/figures").iterdir()} == {f"{name}.svg", f"{name}.png"}
    drawn = Path(f"out/figures/{name}.svg")
    metric = "RMSE of dq from golden" if name == "gradient_of_q" else "RMSE of out from golden"
    assert f"{metric} over " in drawn.read_text()

    results = load(Store(Path("results")))
    (section,) = context([Part(results, judge(claims_of(results), results))])["sections"]
    assert (section["title"], section["question"]) == (study["title"], study["question"])
    assert section["measured"].startswith(f"{len(results.points)} points: sequence length N (16, 64), ")
    assert [claim["text"] for claim in section["claims"]] == texts
    assert [len(table["rows"]) for table in section["tables"]] == [2 * len(results.points)]
