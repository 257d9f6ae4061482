"""The report as one HTML file: whole, alone, legible to a program, and the table's numbers those of the summary."""

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

from numdev.report.document import pages
from numdev.report.document.context import Part
from numdev.report.document.export import summarise
from numdev.report.document.pages import write_html
from tests.report.document.conftest import Report

pytestmark = pytest.mark.xdist_group("report")
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
