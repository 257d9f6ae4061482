"""The report of training runs: its files, its sections, and that no internal name is in them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from numdev.api import Bench
from numdev.attention.exact import Exact
from numdev.cli import compare
from numdev.errors import BadInput
from numdev.measurement.studies import run
from numdev.report.claims.verdicts import judge
from numdev.report.document.context import Part, context
from numdev.report.document.report import make_report, write_part
from numdev.report.reading.frames import TRAINING, load
from numdev.report.studies.registry import CHAPTERS, CLAIMS
from numdev.results.store import Store
from tests.report.document.conftest import texts
from tests.toy_studies import toy
from tests.toy_training import STEPS, Law, ladder, stored

FEW = [point for point in ladder() if point.label in ("sham", "triton", "one_ulp", "init_1", "fp16")]
OF_8 = ("fig8", "fig8_precision", "fig8_ulp", "fig8_order", "training_sham")
pytestmark = pytest.mark.xdist_group("reports of training")
KEY = re.compile(r"\b[a-z0-9]+_[a-z0-9_]+\b")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """The folder of a report on two studies, and the content of its PDF."""
    path = tmp_path_factory.mktemp("report")
    store = stored(path / "results", FEW, claims=OF_8, losses=True)
    stored(path / "results", [point for point in FEW if point.label in ("sham", "triton")], "fig7", ("fig7", "training_sham"))
    part, _ = write_part(load(store, kind=TRAINING), path / "out", Console(quiet=True))
    return path, context([part])


def test_the_files_of_a_report(made: tuple[Path, dict[str, Any]]) -> None:
    out = made[0] / "out"
    tables = {"weights.parquet", "summary.csv", "loss.csv", "runs.csv", "points.csv", "timings.csv", "claims.csv"}
    assert {path.name for path in out.iterdir()} == {*tables, "claims.md", "columns.md", "environment.json", "figures"}
    figures = {path.stem for path in (out / "figures").glob("*.png")}
    assert figures == {"fig7", "fig8", "fig8_training_loss"}
    weights, summary = pd.read_parquet(out / "weights.parquet"), pd.read_csv(out / "summary.csv")
    assert len(summary) * 3 == len(weights)
    assert set(summary["step"]) == set(STEPS)
    last = summary.query("study == 'fig8' and `label.rung` == 'triton' and step == 256 and tensor == 'model'").iloc[0]
    own = weights.query("study == 'fig8' and `label.rung` == 'triton' and step == 256 and tensor == 'model'")["wasserstein"]
    assert last["wasserstein.mean"] == pytest.approx(own.mean(), rel=1e-8)
    assert last["wasserstein.low"] < own.min() <= last["wasserstein.min"] * (1 + 1e-8)
    said = (out / "columns.md").read_text()
    assert "| `wasserstein.mean` | absolute, in the units of the weights | mean over seeds of: Wasserstein-1" in said
    assert "| `variant.ulp` | ulp | by how many" in said
    assert not re.findall(r"^\| `(?:seed|step|tensor|max_difference|loss|score)` \|[^|]*\|\s*\|$", said, re.MULTILINE)
    assert "softmax" not in said


@pytest.mark.parametrize(("law", "is_decided"), [(Law(1e-4), True), (Law(1e-4, noise=0.4), False)])
def test_what_is_undecided_is_no_finding_of_the_first_page(tmp_path: Path, law: Law, is_decided: bool) -> None:
    results = load(stored(tmp_path, ladder(triton=law), "fig7", ("fig7",)), kind=TRAINING)
    (claim,) = judge(CLAIMS, results)
    assert (claim.word != "undecided") is is_decided
    sentence = context([Part(results, [claim])])["highlights"][0]["sentence"]
    assert "part from those of the same model" in sentence
    assert ("Undecided: “From the first step to the last, the weights with flash" in sentence) is not is_decided


def test_the_document_has_its_sections_and_tells_no_internal_name(made: tuple[Path, dict[str, Any]]) -> None:
    shown = made[1]
    titles = [section.title for section in CHAPTERS if section.study in ("fig7", "fig8")]
    assert [section["title"] for section in shown["sections"]] == titles
    assert shown["methods"] == ["training.typ"]
    assert shown["headline"]["file"] == "fig7.svg"
    (metrics,) = shown["metrics"]
    assert [name for name, *_ in metrics["rows"]][:3] == ["max_difference", "wasserstein", "relative_frobenius"]
    for section in shown["sections"]:
        assert section["figures"]
        (table,) = section["tables"]
        assert table["rows"][0][0] == "sham"
    claims = shown["sections"][1]["claims"]
    assert [claim["text"] for claim in claims] == [CLAIMS[name].text for name in CLAIMS if name in OF_8]
    assert any(claim["brief"] == "not measured" for claim in claims)  # no run saw the data in another order
    assert [text for text in texts({key: shown[key] for key in ("claims", "sections")}) if KEY.search(text)] == []


def test_one_document_has_every_figure_of_the_paper(toy_results: Store, tmp_path: Path, documented: list[Part]) -> None:
    """Those of training come last; they lie in the folder `training` of the results, where `numdev train` leaves them."""
    for name in ("records", "studies"):
        shutil.copytree(toy_results.path / name, tmp_path / "results" / name)
    few = [point for point in FEW if point.label in ("sham", "triton")]
    stored(tmp_path / "results" / "training", few, claims=OF_8)
    stored(tmp_path / "results" / "training", few, "fig7", ("fig7", "training_sham"))
    make_report(tmp_path / "results", tmp_path / "out", ["fig4", "fig6a"], console=Console(quiet=True), formats=("html",))
    parts = documented
    told, alone = context(parts), [context([part]) for part in parts]
    sources = [section["source"] for section in told["sections"] if section["source"]]
    assert sources == ["Figure 4", "Figure 6a", "Figure 7", "Figure 8"]
    assert all(section["figures"] for section in told["sections"])
    assert told["title"] == alone[0]["title"]
    assert told["highlights"] == [own["highlights"][0] for own in alone]
    assert [table["of"] for table in told["metrics"]] == ["outputs", "weights"]
    assert told["methods"] == ["attention.typ", "training.typ"]
    assert [claim["text"] for claim in told["claims"]] == [claim["text"] for own in alone for claim in own["claims"]]
    asked = [part.claims[0].questions for part in parts]
    assert f"{asked[0]} and {asked[1]}" in told["reading"]
    page = (tmp_path / "out" / "report.html").read_text()
    assert all(CLAIMS[name].text in page for name in ("fig4", "fig7", "fig8"))
    assert not (tmp_path / "out" / "training").exists(), "its tables are those of its own report"


def test_a_comparison_of_training_runs_is_refused(made: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(BadInput, match="compares weights of training runs, which numdev report shows"):
        compare.run([str(made[0] / "results")] * 2)


def test_training_beside_other_studies_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """One study of training is a user's own and names no figure; a run of the other stopped, and is drawn to its end."""
    stopped = [point for point in ladder(fp16=Law(4e-4, until=16)) if point.label in ("sham", "triton", "fp16")]
    store = stored(tmp_path / "results", stopped, claims=("fig8_precision",))
    stored(store.path, FEW[:2], "mine")
    store.put_study("mine", store.studies()["mine"] | {"figure": None})
    run(toy("sign", ("uniform",), base={"problem.n": 16, "problem.head_dim": 8, "seeds": 2}), Bench(Exact(), "cpu"), store)
    store.put_study("sign", store.studies()["sign"] | {"figure": None, "claims": []})
    make_report(store.path, tmp_path / "out", console=Console(quiet=True))
    assert (tmp_path / "out" / "results.parquet").is_file()
    own = tmp_path / "out" / "training"
    assert {path.stem for path in (own / "figures").iterdir()} == {"fig8", "mine"}
    assert "no run reached step 256" in (own / "claims.md").read_text()
    (section,) = (one for one in context([Part(load(store, kind=TRAINING))])["sections"] if one["study"] == "mine")
    assert (section["title"], len(section["tables"])) == ("Weights over training", 1)
