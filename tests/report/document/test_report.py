"""The files of a report, what it prints, and what it says of results that are not whole."""

from __future__ import annotations

import dataclasses
import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from numdev.errors import BadInput
from numdev.measurement.metrics import METRICS
from numdev.report.document.report import make_report
from numdev.report.document.tables import MOST_FAILURES, failures
from numdev.report.reading.columns import meaning
from numdev.report.reading.frames import Results, Rows
from numdev.report.studies.registry import CLAIMS
from numdev.results.record import Status
from numdev.results.store import Store
from tests.report.document.conftest import STUDIES, Report
from tests.toy_studies import title_of

pytestmark = pytest.mark.xdist_group("report")
TABLES = ("summary.csv", "points.csv", "timings.csv", "claims.csv")


def printed_of(results: Path, out: Path, **options: Any) -> str:
    """Make a report of the study of signs; what it printed."""
    console = Console(file=(printed := io.StringIO()), width=160)
    make_report(results, out, ["sign"], console=console, **options)
    return printed.getvalue()


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def read(path: Path) -> pd.DataFrame:
    return (pd.read_parquet if path.suffix == ".parquet" else pd.read_csv)(path)


def test_a_report_is_complete_and_every_column_is_in_the_dictionary(report: Report) -> None:
    names = set(files(report.out))
    assert names >= {*TABLES, "results.parquet", "claims.md", "columns.md", "environment.json"}
    figures = {*STUDIES, "fig5_fig5b"}
    assert {name for name in names if "/" in name} == {f"figures/{name}.{kind}" for name in figures for kind in ("png", "svg")}
    dictionary = (report.out / "columns.md").read_text()
    for name in (*TABLES, "results.parquet"):
        section = dictionary.split(f"## {name}\n")[1].split("\n## ")[0]
        for column in read(report.out / name).columns:
            assert meaning(column), column
            assert f"| `{column}` |" in section
    assert set(METRICS) <= set(read(report.out / "results.parquet"))
    assert [name for name in TABLES if "seconds" in read(report.out / name)] == ["timings.csv"]
    (facts,) = json.loads((report.out / "environment.json").read_text())
    assert (facts["facts"]["device"], facts["points"]["sign"]) == ("cpu", 4)


def test_the_same_results_give_the_same_report(toy_results: Store, tmp_path: Path, report: Report) -> None:
    printed_of(toy_results.path, tmp_path / "a", formats=("pdf", "html"))
    printed_of(toy_results.path, tmp_path / "b", formats=("pdf", "html", "csv"))
    first, second = files(tmp_path / "a"), files(tmp_path / "b")
    text, whole = second.pop("results.csv"), pd.read_parquet(io.BytesIO(first.pop("results.parquet")))
    assert {name for name in first if first[name] != second[name]} == {"columns.md"}, "which names the file of the rows"
    rows = pd.read_csv(io.BytesIO(text))
    assert list(rows) == list(whole)
    assert rows["rmse"].to_numpy() == pytest.approx(whole["rmse"].to_numpy(), rel=1e-8)  # nine digits are written
    drawn = {name: data for name, data in first.items() if name.startswith("figures/")}
    assert drawn.items() <= files(report.out).items()


def test_claims_stand_in_the_files_and_on_the_screen(report: Report) -> None:
    claims, markdown = read(report.out / "claims.csv"), (report.out / "claims.md").read_text()
    assert set(claims["claim"]) == {"fig3", "fig4", "fig5a", "fig5b", "sign", "kernels"} & set(CLAIMS)
    assert all(f"## {CLAIMS[name].text}" in markdown for name in set(claims["claim"]))
    assert "note:" not in report.printed
    names = set(claims["scenario"]) & {"uniform_end", "normal_end", "kernel_uniform"}
    assert names, "the columns of a table of data have the names of the study's file"
    assert not [name for name in names if name in markdown or name in report.printed], "what a reader sees has titles"
    assert set(claims["scenario.role"]) == {"assumed", "beyond"}
    assert claims["questions"].nunique() == 1
    assert claims["p_verdict"].dropna().between(0, 1).all()
    assert (claims[claims["verdict"] != "undecided"]["p_verdict"].dropna() < 0.05).all()
    assert f"all {claims['questions'].iloc[0]} questions of this table (Holm)" in markdown
    assert "(our assumption)" in markdown
    (figure,) = claims.query("claim == 'fig4' and scenario == 'uniform_end'")["figure"].tolist()
    svg = (report.out / "figures" / "fig4.svg").read_text()
    assert f"{title_of('uniform_end')}: {figure}." in svg, "a figure describes itself in numbers"


@pytest.fixture
def store(toy_results: Store, tmp_path: Path) -> Store:
    """A copy of the toy results that a test may change."""
    shutil.copytree(toy_results.path, tmp_path / "results")
    return Store(tmp_path / "results")


def with_manifest(store: Store, **changes: Any) -> Store:
    store.put_study("sign", store.studies()["sign"] | changes)
    return store


def test_a_report_of_a_study_with_overrides_says_so(store: Store, tmp_path: Path) -> None:
    printed_of(with_manifest(store, overrides=["problem.n=64"]).path, tmp_path / "out")
    text = (tmp_path / "out" / "claims.md").read_text()
    assert text.count("with overrides: problem.n=64") == 2 * text.count("\n## ") > 0, "in the table and the section of a claim"
    assert "with overrides: problem.n=64" in (tmp_path / "out" / "figures" / "sign.svg").read_text()
    assert "(our assumption)" not in text.split("## ", 1)[1]
    assert set(read(tmp_path / "out" / "claims.csv")["scenario.role"]) == {"beyond"}


def test_records_that_are_missing_torn_or_failed_are_told(store: Store, tmp_path: Path) -> None:
    first, second, third, *_ = [point["key"] for point in store.studies()["sign"]["points"]]
    paths = [store.path / "records" / f"{key}.json" for key in (first, second)]
    paths[0].unlink()
    paths[1].write_bytes(paths[1].read_bytes()[:100])
    old = store.get(third)
    assert old is not None
    nothing: dict[str, list[dict[str, Any]]] = {name: [] for name in old.tables}
    store.put(dataclasses.replace(old, status=Status.UNSUPPORTED, reason="attention.mask: [no] windows", tables=nothing))
    printed = printed_of(store.path, tmp_path / "out")
    assert "note: sign: 2 of 4 points are not measured yet" in printed
    assert f"{paths[1].name} is damaged" in printed.replace("\n", "")
    assert "Points without a full result" in printed
    assert "attention.mask: [no] windows" in printed


def test_claims_and_figures_that_there_are_not_are_noted(store: Store, tmp_path: Path) -> None:
    printed = printed_of(with_manifest(store, figure="fig99", claims=["mine"]).path, tmp_path / "a")
    assert "note: sign: there is no claim mine" in printed
    assert "note: sign: there is no figure fig99" in printed
    assert not (tmp_path / "a" / "figures").exists()
    printed = printed_of(with_manifest(store, figure="fig6a", claims=[]).path, tmp_path / "b")
    assert "figure fig6a needs points with the labels tiling.shape, tiling.sram" in printed
    assert "Claims" not in printed
    assert len(read(tmp_path / "b" / "results.parquet")) > 0


def test_results_that_cannot_be_read_are_refused_in_one_sentence(store: Store, tmp_path: Path) -> None:
    manifest = store.studies()["sign"]
    old = {key: value for key, value in manifest.items() if key not in ("scenarios", "overrides")}
    store.put_study("sign", old)
    with pytest.raises(BadInput, match=r"^results: .*holds sign as an older numdev stored it.*run the study again"):
        printed_of(store.path, tmp_path / "out")
    with pytest.raises(BadInput, match="^results: .*numdev measure study=fig3"):
        make_report(tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def failing(count: int) -> Results:
    points = [{"study": "s", "scenario.title": "", "label.n": n, "status": "error", "reason": f"r{n}"} for n in range(count)]
    return Results(
        Rows(pd.DataFrame(), pd.DataFrame(), np.zeros(0, np.int32)), pd.DataFrame([*points, points[0] | {"status": "ok"}]), {}
    )


def test_of_very_many_failures_the_first_are_told_and_where_all_are() -> None:
    half = MOST_FAILURES - 10
    lines = failures([failing(half), failing(half)], {"s": "A study"}).values.tolist()
    assert lines[:-1] == [["A study", f"n={n}", "error", f"r{n}"] for n in (*range(half), *range(10))]
    assert lines[-1] == ["", f"and {half - 10} more", "", "all are in points.csv"]
    assert len(failures([failing(half)])) == half
