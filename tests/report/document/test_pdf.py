"""The PDF: what it says of every study, what it leaves out, and how it sets words."""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import typst

from numdev.attention.problem import Shape
from numdev.report.document.context import Part, command, context
from numdev.report.document.export import TEMPLATES
from numdev.report.document.pages import write_root
from numdev.report.document.report import make_report
from numdev.report.reading.frames import load
from numdev.report.studies.registry import CHAPTERS, CLAIMS
from numdev.results.store import Store
from tests.report.document.conftest import Report, texts
from tests.toy_studies import title_of

pytestmark = pytest.mark.xdist_group("report")
SHAPE = Shape(queries=32, keys=32, head_dim=16)


def section_of(shown: dict[str, Any], study: str) -> dict[str, Any]:
    (own,) = [section for section in shown["sections"] if section["study"] == study]
    return own


def test_every_section_has_its_figure_findings_and_command(report: Report) -> None:
    shown, results = report.shown, report.part.results
    pages = re.search(rb"/Type\s*/Pages\s*/Count (\d+)", report.pdf)
    assert pages
    assert int(pages[1]) >= 8
    titles = {chapter.study: chapter.title for chapter in CHAPTERS}
    expected = {study: titles.get(study, manifest["title"]) for study, manifest in results.manifests.items()}
    assert {section["study"]: section["title"] for section in shown["sections"]} == expected
    again = [bool(section["source"]) for section in shown["sections"]]
    assert again == sorted(again, reverse=True), "the source's figures come first"
    for section in shown["sections"]:
        assert section["figures"][0]["alt"]
        assert f"study={section['study']} device=cpu" in section["command"]
        rows = results.study(section["study"])
        findings = [finding for claim in section["claims"] for finding in claim["findings"]]
        for finding in findings:  # shape, tile and seeds come from the points, not from a text
            own = rows[rows["scenario.title"] == finding["title"]]
            assert f"({own['seed'].nunique()} here)" in finding["about"]
            assert f"N = {own['problem.shape.keys'].iloc[0]}" in finding["about"] or section["study"] == "fig5"
    assert {finding["title"] for finding in section_of(shown, "fig5")["claims"][0]["findings"]} >= {title_of("uniform_end")}
    assert shown["headline"]["file"] in {figure["file"] for section in shown["sections"] for figure in section["figures"]}
    absent = [c.title for c in CHAPTERS if c.operation == "attention" and c.study not in results.manifests]
    assert shown["absent"] == absent != []


def test_the_first_page_quotes_the_results_and_every_claim(report: Report) -> None:
    shown, claims = report.shown, report.part.claims
    rows = report.part.results.study("fig4").query("scenario == 'uniform_end'")
    assert CLAIMS["fig4"].find(rows).figure in shown["highlights"][0]["sentence"]
    assert 1 <= len(shown["highlights"]) <= 3
    assert [claim["text"] for claim in shown["claims"]] == [result.claim.text for result in claims]
    for claim, result in zip(shown["claims"], claims, strict=True):
        assert [own["title"] for own in claim["findings"] if own["chief"]] == [scenario.title for scenario in result.chief]
    assert f"Of {len(claims)} claims" in shown["summary"]
    counted = re.findall(r"(\d+) (?:is|are) (?:undecided|(?:partly |not )?(?:reproduced|borne out))", shown["summary"])
    assert sum(map(int, counted)) == len(claims)
    assert len(shown["failures"]) == 2  # FlexAttention in two scenarios
    assert all("CUDA" in row[3] for row in shown["failures"])


def test_a_reader_meets_no_internal_name(report: Report) -> None:
    """Commands, the environment and the names of metrics are to be typed; nothing else is a name of the code."""
    told = {key: value for key, value in report.shown.items() if key not in ("environments", "metrics", "headline", "methods")}
    scenarios = {name for name in report.part.results.points["scenario"] if "_" in name}
    for text in texts(told):
        if re.match(r"\d+ points: ", text):  # the entries of the axes of a user's own study, as they are to be typed
            continue
        assert not scenarios & set(re.findall(r"\w+", text)), text
        # Formulae, and the labels of points without a result, such as `precision=kernel_bf16`, are left out.
        assert not re.findall(r"\b[a-z]+\d*\\?_[a-z]\w*", re.sub(r"\$.*?\$|[\w.]+=\S+", "", text)), text


def test_figures_and_tables_stand_once_with_captions_in_one_sequence_of_numbers(report: Report, tmp_path: Path) -> None:
    def queried(selector: str) -> list[dict[str, Any]]:
        return json.loads(typst.query(str(tmp_path / "report.typ"), selector, root=str(tmp_path), ignore_system_fonts=True))

    write_root([report.part], tmp_path)
    pictures, tables = queried("figure.where(kind: image)"), queried("figure.where(kind: table)")
    assert sorted(one["body"]["source"] for one in pictures) == sorted(picture.svg.name for picture in report.part.pictures)
    assert len(tables) == len(queried("table")) > 5
    assert all(one["numbering"] == "1" and one["caption"] for one in (*pictures, *tables))
    assert len(queried("outline")) == 1


def test_long_titles_push_nothing_off_a_page(report: Report, tmp_path: Path) -> None:
    write_root([report.part], tmp_path)
    data = json.loads((tmp_path / "data.json").read_text())
    for section in data["sections"]:
        for finding in (own for claim in section["claims"] for own in claim["findings"]):
            finding["title"] += " in many words" * 60
    (tmp_path / "data.json").write_text(json.dumps(data))
    page = tmp_path / "report.typ"
    ends = '#context [#metadata(query(raw.where(lang: "sh")).map(own => own.location().position().y / 1pt)) <ends>]'
    page.write_text(f"{page.read_text()}\n{ends}\n")
    places = json.loads(typst.query(str(page), "<ends>", "value", one=True, root=str(tmp_path), ignore_system_fonts=True))
    assert len(places) == len(data["sections"])
    assert max(places) < 842 - 54, "the height of A4 without the lower margin, in pt"


def test_the_context_keeps_the_command_and_merges_environments(report: Report) -> None:
    results = report.part.results
    manifest = results.manifests["fig3"] | {"command": "numdev measure study=fig3 'problem.key_lengths=[3,4]'"}
    changed = replace(results, manifests={"fig3": manifest})
    assert command(changed, "fig3") == f"{manifest['command']} device=cpu"
    (facts,) = results.environments
    other, count = replace(changed, environments=[facts | {"device": "another"}]), results.points["key"].nunique()
    first, second = context([Part(each) for each in (changed, changed, other)])["environments"]
    assert (first["title"], second["title"]) == (f"Environment 0, {2 * count} points", f"Environment 1, {count} points")
    assert dict(second["facts"]) == facts | {"device": "another"}


def test_a_study_without_a_claim_shows_every_point(toy_results: Store, tmp_path: Path) -> None:
    store = Store(shutil.copytree(toy_results.path, tmp_path / "results"))
    store.put_study("mine", store.studies()["sign"] | {"name": "mine", "title": "A study_of #mine", "figure": None, "claims": []})
    make_report(store.path, tmp_path / "out", ["mine"], formats=("pdf",))
    assert (tmp_path / "out" / "report.pdf").read_bytes().startswith(b"%PDF-")
    results = load(store, ["mine"])
    shown = context([Part(results)])
    assert shown["absent"] == [], "one study misses no other"
    (table,) = shown["sections"][0]["tables"]
    of_golden = [row for row in table["rows"] if row[1] == "golden"]
    assert len(of_golden) == results.points["key"].nunique() == 4
    rows = results.rows.query("output == 'out' and subject == 'variant' and reference == 'golden'")
    for row in of_golden:
        values = rows[rows["scenario.title"] + " precision=" + rows["label.precision"] == row[0]]["max_difference"]
        assert values.min() / 1.1 <= float(row[2].split()[0]) <= values.max() * 1.1


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("goes as N^0.58 [0.54, 0.61].", ["[N]", "t: equation(block: false, body: [0.58])", "[0.54,\u00a00.61]."]),
        ("area^-0.310, U[0, 1)", ["[A]", "body: [\N{MINUS SIGN}0.310]", "U[0,\u00a01)"]),
        ("8.3e-16 at fp64", ["[8.3]", "attach(base: [10], t: [\N{MINUS SIGN}16])", "[FP64]"]),
        ("-0.3 of |D| (p < 0.001)", ["[\N{MINUS SIGN}0]", "lr(body: sequence([|], [D], [|]))", "body: [p]", "body: [0.001]"]),
        ("Br, N = 4, FlashAttention-2", ["attach(base: [B], b: [r])", "body: [N]", "[FlashAttention-2]"]),
        ("a_b *x* #let $5 `a` [x] a<b> a@b", ["[a_b *x* #let $5 `a` [x] a<b> a@b]"]),
    ],
)
def test_mathematics_is_set_as_mathematics_and_nothing_else_is_markup(text: str, pieces: list[str], tmp_path: Path) -> None:
    shutil.copy(TEMPLATES / "parts.typ", tmp_path)
    page = tmp_path / "page.typ"
    page.write_text('#import "parts.typ": typeset\n#metadata(repr(typeset(sys.inputs.text))) <set>')
    found = typst.query(str(page), "<set>", "value", one=True, root=str(tmp_path), sys_inputs={"text": text})
    content = re.sub(r"[ \n]+", " ", json.loads(found))
    assert [piece for piece in pieces if piece not in content] == []


def test_a_study_of_speed_has_its_section_figures_and_table(
    toy_results: Store, speed_results: Path, tmp_path: Path, documented: list[Part]
) -> None:
    """Its results lie in the folder `speed` of the results, as `numdev speed` leaves them."""
    for name in ("records", "studies"):
        shutil.copytree(toy_results.path / name, tmp_path / "results" / name)
    shutil.copytree(speed_results, tmp_path / "results" / "speed")
    make_report(tmp_path / "results", tmp_path / "out", ["fig3"], formats=("html",))
    whole = context(documented)
    last = whole["sections"][-1]
    assert last["title"] == "A toy"
    assert len({figure["caption"] for figure in last["figures"]}) == len(last["figures"]) == 2
    assert {row[2] for row in last["tables"][0]["rows"]} == {"vanilla", "tiled"}
    count = sum(part.results.points["key"].nunique() for part in documented)
    assert [one["title"] for one in whole["environments"]] == [f"Environment 0, {count} points"]
    failed = [row[1:3] for row in whole["failures"] if row[0] == last["title"]]
    assert failed == [["normal kernel=cudnn", "unsupported"]] * 4
    assert whole["summary"].startswith(f"{count} points were measured")
