from __future__ import annotations

import dataclasses
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from rich.console import Console

from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import METRICS
from numdev.report.document.report import make_report
from numdev.report.reading.columns import meaning
from numdev.report.studies.registry import CLAIMS
from numdev.results.record import Status
from numdev.results.store import Store
from tests.toy_studies import title_of

TABLES = ("deviations.csv", "summary.csv", "points.csv", "timings.csv", "claims.csv")


def report(results: Path, out: Path, studies: list[str] | None = None) -> str:
    """Make a report; what it printed."""
    console = Console(file=io.StringIO(), width=160)
    make_report(results, out, studies, console=console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture(scope="module")
def made(toy_results: Store, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    """A report of three studies, and what making it printed."""
    out = tmp_path_factory.mktemp("report")
    return out, report(toy_results.path, out, ["fig4", "fig5", "sign"])


def test_a_report_is_complete(made: tuple[Path, str]) -> None:
    names = set(files(made[0]))
    assert names >= {*TABLES, "results.parquet", "claims.md", "columns.md", "environment.json"}
    figures = ("fig4", "fig5", "fig5_fig5b", "sign")
    assert {name for name in names if "/" in name} == {f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")}


def test_the_same_results_give_the_same_report(toy_results: Store, made: tuple[Path, str], tmp_path: Path) -> None:
    report(toy_results.path, tmp_path, ["sign"])
    first = files(tmp_path)
    report(toy_results.path, tmp_path, ["sign"])
    assert files(tmp_path) == first
    whole = files(made[0])
    assert {name: whole[name] for name in first if name.startswith("figures/")} == {
        name: data for name, data in first.items() if name.startswith("figures/")
    }


@pytest.mark.parametrize("name", [*TABLES, "results.parquet"])
def test_every_column_is_in_the_dictionary(made: tuple[Path, str], name: str) -> None:
    columns = (pd.read_parquet if name.endswith(".parquet") else pd.read_csv)(made[0] / name).columns
    dictionary = (made[0] / "columns.md").read_text()
    section = dictionary.split(f"## {name}\n")[1].split("\n## ")[0]
    for column in columns:
        assert meaning(column), column
        assert f"| `{column}` |" in section


def test_every_metric_is_a_column(made: tuple[Path, str]) -> None:
    assert set(METRICS) <= set(pd.read_parquet(made[0] / "results.parquet"))


def test_deviations_have_a_row_for_each_point_and_reference(made: tuple[Path, str]) -> None:
    rows, points = pd.read_parquet(made[0] / "results.parquet"), pd.read_csv(made[0] / "points.csv")
    found = pd.read_csv(made[0] / "deviations.csv").set_index(["study", "scenario.title", "key", "reference"])
    assert found.index.is_unique
    assert len(found) == 2 * len(points)
    own = rows[(rows["subject"] == "variant") & (rows["output"] == "out")]
    means = own.groupby(["study", "scenario.title", "key", "reference"])["rmse"].mean()
    assert found["rmse.mean"].to_dict() == pytest.approx(means.loc[found.index].to_dict(), rel=1e-8)  # nine digits are written


def test_rows_are_text_where_that_is_asked_for(toy_results: Store, tmp_path: Path) -> None:
    make_report(toy_results.path, tmp_path / "csv", ["sign"], console=Console(quiet=True), formats=("csv",))
    make_report(toy_results.path, tmp_path / "parquet", ["sign"], console=Console(quiet=True))
    names = {kind: {path.name for path in (tmp_path / kind).glob("results.*")} for kind in ("csv", "parquet")}
    assert names == {"csv": {"results.csv"}, "parquet": {"results.parquet"}}
    text, whole = pd.read_csv(tmp_path / "csv" / "results.csv"), pd.read_parquet(tmp_path / "parquet" / "results.parquet")
    assert list(text) == list(whole)
    assert text["rmse"].to_numpy() == pytest.approx(whole["rmse"].to_numpy(), rel=1e-8)


def test_timings_stand_alone(made: tuple[Path, str]) -> None:
    with_seconds = [name for name in TABLES if "seconds" in pd.read_csv(made[0] / name, nrows=1).columns]
    assert with_seconds == ["timings.csv"]


def test_claims_stand_in_the_files_and_on_the_screen(made: tuple[Path, str]) -> None:
    out, printed = made
    claims = pd.read_csv(out / "claims.csv")
    judged = {"fig4", "fig5a", "fig5b", "sign"}
    assert set(claims["claim"]) == judged
    assert set(claims[claims["claim"] == "fig4"]["scenario"]) == {"uniform_end", "normal_end", "kernel_uniform"}
    markdown = (out / "claims.md").read_text()
    for name in judged:
        assert f"## {CLAIMS[name].text}" in markdown
    assert "Claims" in printed
    assert "Furthest from golden" in printed
    assert "note:" not in printed
    names = set(claims["scenario"]) & {"uniform_end", "normal_end", "kernel_uniform"}
    assert names, "the columns of a table of data have the names of the study's file"
    assert not [name for name in names if name in markdown or name in printed], "what a reader sees has titles"
    assert set(claims["scenario.role"]) == {"assumed", "beyond"}
    assert claims["questions"].nunique() == 1
    assert claims["p_verdict"].dropna().between(0, 1).all()
    decided = claims[claims["verdict"] != "undecided"]
    assert (decided["p_verdict"] < 0.05).all()
    assert f"all {claims['questions'].iloc[0]} questions of this table (Holm)" in markdown
    assert "(our assumption)" in markdown
    assert "(3 here)" in markdown


def test_a_figure_describes_itself_in_numbers(made: tuple[Path, str]) -> None:
    claims = pd.read_csv(made[0] / "claims.csv").set_index(["claim", "scenario"])
    figure = str(claims.loc[("fig4", "uniform_end"), "figure"])
    assert f"{title_of('uniform_end')}: {figure}." in (made[0] / "figures" / "fig4.svg").read_text()


def test_environment_tells_where_and_how_many(made: tuple[Path, str]) -> None:
    (found,) = json.loads((made[0] / "environment.json").read_text())
    assert found["facts"]["device"] == "cpu"
    assert found["points"]["sign"] == 4


def changed(toy_results: Store, path: Path) -> Store:
    """A copy of the toy results that a test may change."""
    shutil.copytree(toy_results.path, path)
    return Store(path)


def test_what_an_older_numdev_stored_is_refused_in_one_sentence(toy_results: Store, tmp_path: Path) -> None:
    store = changed(toy_results, tmp_path / "results")
    manifest = store.studies()["sign"]
    old = {key: value for key, value in manifest.items() if key not in ("scenarios", "overrides")}
    points = [{"key": p["key"], "setting": p["scenario"], "labels": p["labels"]} for p in manifest["points"]]
    store.put_study("sign", old | {"points": points})
    with pytest.raises(BadInput, match=r"^results: .*holds sign as an older numdev stored it.*run the study again"):
        report(store.path, tmp_path / "out", ["sign"])


def test_a_report_of_a_study_with_overrides_says_so(toy_results: Store, tmp_path: Path) -> None:
    store = changed(toy_results, tmp_path / "results")
    store.put_study("sign", store.studies()["sign"] | {"overrides": ["problem.n=64"]})
    report(store.path, tmp_path / "out", ["sign"])
    text = (tmp_path / "out" / "claims.md").read_text()
    assert "with overrides: problem.n=64" in text
    assert "(our assumption)" not in text.split("## ", 1)[1]
    table = pd.read_csv(tmp_path / "out" / "claims.csv")
    assert set(table["scenario.role"]) == {"beyond"}


def test_missing_and_torn_records_are_noted(toy_results: Store, tmp_path: Path) -> None:
    store = changed(toy_results, tmp_path / "results")
    first, second, *_ = [store.path / "records" / f"{p['key']}.json" for p in store.studies()["sign"]["points"]]
    first.unlink()
    second.write_bytes(second.read_bytes()[:100])
    printed = report(store.path, tmp_path / "out", ["sign"])
    assert "note: sign: 2 of 4 points are not measured yet" in printed
    assert f"{second.name} is damaged" in printed.replace("\n", "")


def test_failures_are_listed_with_their_reasons(toy_results: Store, tmp_path: Path) -> None:
    store = changed(toy_results, tmp_path / "results")
    key = store.studies()["sign"]["points"][0]["key"]
    old = store.get(key)
    assert old is not None
    nothing: dict[str, list[dict[str, Any]]] = {name: [] for name in old.tables}
    store.put(dataclasses.replace(old, status=Status.UNSUPPORTED, reason="attention.mask: [no] windows", tables=nothing))
    printed = report(store.path, tmp_path / "out", ["sign"])
    assert "Points without a full result" in printed
    assert "attention.mask: [no] windows" in printed


def test_unknown_claims_and_figures_are_noted(toy_results: Store, tmp_path: Path) -> None:
    store = changed(toy_results, tmp_path / "results")
    manifest = store.studies()["sign"] | {"figure": "fig99", "claims": ["mine"]}
    store.put_study("sign", manifest)
    printed = report(store.path, tmp_path / "out", ["sign"])
    assert "note: sign: there is no claim mine" in printed
    assert "note: sign: there is no figure fig99" in printed
    assert not (tmp_path / "out" / "figures").exists()


def test_a_figure_that_the_points_cannot_fill_is_noted(toy_results: Store, tmp_path: Path) -> None:
    store = changed(toy_results, tmp_path / "results")
    store.put_study("sign", store.studies()["sign"] | {"figure": "fig6a", "claims": []})
    printed = report(store.path, tmp_path / "out", ["sign"])
    assert "figure fig6a needs points with the labels tiling.shape, tiling.sram" in printed


def test_a_study_without_a_figure_or_claims_has_its_tables(toy_results: Store, tmp_path: Path) -> None:
    store = changed(toy_results, tmp_path / "results")
    store.put_study("sign", store.studies()["sign"] | {"figure": None, "claims": []})
    assert "Claims" not in report(store.path, tmp_path / "out", ["sign"])
    assert len(pd.read_parquet(tmp_path / "out" / "results.parquet")) > 0


def test_no_results_say_how_to_make_some(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="numdev measure study=fig3") as caught:
        report(tmp_path / "nowhere", tmp_path / "out")
    assert caught.value.field == "results"
    assert not (tmp_path / "out").exists()


def test_importing_numdev_loads_neither_pandas_nor_matplotlib() -> None:
    code = "import sys, numdev, numdev.report; assert not {'pandas', 'matplotlib', 'pyarrow'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
