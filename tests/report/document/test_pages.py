"""The PDF and the HTML file: what they say of every study and leave out, how they set words, and that programs can read them."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typst

from numdev.attention.problem import Shape
from numdev.report.document import pages
from numdev.report.document.context import Part, command, context
from numdev.report.document.export import TEMPLATES, summarise
from numdev.report.document.pages import write_html, write_root
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


VOID = {"meta", "input", "br", "link", "img"}


class Page(HTMLParser):
    """Every element with its attributes, in the order of the page; `open` has those that are not closed yet."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, {name: value or "" for name, value in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open
        assert self.open.pop() == tag, f"</{tag}> closes another element"

    def all(self, tag: str) -> list[dict[str, str]]:
        return [found for name, found in self.elements if name == tag]


def data_of(page: str) -> dict[str, Any]:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match
    read: dict[str, Any] = json.loads(match[1])
    return read


@pytest.fixture(scope="module")
def page(report: Report) -> Page:
    return Page(report.html)


def test_the_page_is_whole_and_asks_no_host_for_anything(report: Report, page: Page) -> None:
    assert page.open == []
    names = [element["id"] for _, element in page.elements if "id" in element]
    assert len(names) == len(set(names))
    used = {element[key].lstrip("#") for _, element in page.elements for key in ("href", "aria-describedby") if key in element}
    assert used <= set(names)
    assert [element for _, element in page.elements if "src" in element] == page.all("link") == []
    assert all(element["href"].startswith("#") for _, element in page.elements if "href" in element)
    assert re.findall(r"(?:https?:)?//[\w.]+\.\w+|@import|url\((?!#)", re.sub(r'"[^"]*//[^"]*"', "", report.html)) == []


def test_claims_have_verdicts_and_figures_have_words_and_values(report: Report, page: Page) -> None:
    for result in report.part.claims:
        article = report.html[report.html.index(f"<h3>{pages.mathematical(result.claim.text)}") :]
        article = article[: article.index("</article>")]
        assert f">{result.word}</span>" in article
        assert article.count('<th scope="row">') == len(result.findings)
    plots = [element for element in page.all("div") if element.get("class") == "plot"]
    assert len(plots) == len(report.part.pictures)
    assert all(element["tabindex"] == "0" and len(element["aria-label"]) > 30 for element in plots)
    assert len(page.all("circle")) >= 4 * len(plots)


def test_the_table_has_the_numbers_of_the_summary(report: Report, monkeypatch: pytest.MonkeyPatch) -> None:
    data, expected = data_of(report.html), summarise(report.part.results)
    assert data["rows"] == len(expected)
    texts = {each["name"]: [each["words"][code] for code in each["codes"]] for each in data["texts"]}
    assert texts["subject"] == expected["subject"].tolist()
    assert texts["compared with"] == expected["reference"].tolist()
    titles = zip(texts["point"], expected["scenario.title"], strict=True)
    assert all(point.startswith(title) for point, title in titles), "a reader sees the scenario's title"
    for metric in data["metrics"]:
        means = pd.Series(metric["mean"], dtype=float)
        pd.testing.assert_series_equal(means, expected[f"{metric['name']}.mean"], check_names=False, rtol=1e-3)
    assert {metric["name"] for metric in data["metrics"]} >= {"max_difference", "rmse", "max_ulp"}
    monkeypatch.setattr(pages, "MOST_ROWS", 5)
    page = write_html([Part(report.part.results)]).decode()
    short = data_of(page)
    assert (short["rows"], len(short["replicates"])) == (5, 5)
    assert [metric["mean"] for metric in short["metrics"]] == [metric["mean"][:5] for metric in data["metrics"]]
    said = f"The table has the first 5 of {data['rows']} rows; summary.csv beside this file has all of them."
    assert said in page
    assert "The table has the first" not in report.html


def test_a_title_cannot_leave_its_place(report: Report) -> None:
    """Titles are the user's: markup in one stays text, also in the data of the table."""
    results = report.part.results
    manifests = {name: own | {"title": "</script><b>x"} for name, own in results.manifests.items()}
    made = write_html([Part(replace(results, manifests=manifests))], ["<i>a note"]).decode()
    assert "</script><b>" not in made
    assert "<i>" not in made
    assert "&lt;i&gt;a note" in made


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_TRY = """<script>
addEventListener("load", () => {
  const form = document.querySelector(".filters");
  const all = (wanted) => [...document.querySelectorAll(`#table ${wanted}`)];
  const press = (name) => all("thead button").find((button) => button.textContent.startsWith(name)).click();
  const numbers = () => all("tbody td.number").filter((_, i) => i % 4 === 0).map((cell) => +cell.textContent);
  form.text.value = "fp16 golden variant";
  form.dispatchEvent(new Event("input"));
  press("max_difference"); press("max_difference");
  const plot = document.querySelector(".plot");
  plot.dispatchEvent(new KeyboardEvent("keydown", {key: "ArrowRight"}));
  const found = {rows: all("tbody tr").length, numbers: numbers(), tip: document.getElementById("tip").textContent,
    wide: document.scrollingElement.scrollWidth <= innerWidth};
  document.body.dataset.found = JSON.stringify(found);
});</script>"""


@pytest.mark.slow
@pytest.mark.xdist_group("docs")
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome on PATH")
def test_a_browser_filters_sorts_and_shows_values(report: Report, tmp_path: Path) -> None:
    assert BROWSER is not None
    text, data = report.html, data_of(report.html)
    path = tmp_path / "report.html"
    path.write_text(text.replace("</body>", f"{_TRY}</body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=3000", "--dump-dom", "--window-size=800,900"]
    command = [BROWSER, *flags, f"--user-data-dir={tmp_path / 'profile'}", path.as_uri()]
    ran = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)
    shown = re.search(r'<body data-found="([^"]*)"', ran.stdout)
    assert shown, "the page's scripts did not run"
    found = json.loads(shown[1].replace("&quot;", '"'))
    texts = [" ".join(each["words"][each["codes"][row]] for each in data["texts"]) for row in range(data["rows"])]
    matching = sum(all(word in each.lower() for word in ("fp16", "golden", "variant")) for each in texts)
    assert found["rows"] == min(matching, 100)
    assert found["numbers"] == sorted(found["numbers"], reverse=True)
    assert found["tip"]
    assert found["wide"]
