"""The documentation: what it says to type works, it builds, and a browser shows formulae and figures."""

from __future__ import annotations

import csv
import html
import json
import os
import re
import shutil
import subprocess
import sys
from enum import EnumType
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from matplotlib.image import imread

import numdev as nd
from tests.docs_commands import ROOT, blocks, check

DOCS = ROOT / "docs"
PAGES = sorted(path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md"))


@pytest.mark.slow
@pytest.mark.parametrize("page", [page for page in PAGES if blocks(DOCS / page)])
def test_what_a_page_says_to_type_works(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are written, Python is run and commands are composed in the order of the page, in one folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    module = ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)  # where dataclasses look for the names of their annotations
    for block in blocks(DOCS / page):
        if block.file:
            file = tmp_path / block.file
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(block.text)
        elif block.language == "python":
            exec(compile(block.text, page, "exec", dont_inherit=True), vars(module))
        elif block.language == "sh":
            check(block.text, tmp_path)
    for path in tmp_path.glob("*.py"):
        sys.modules.pop(path.stem, None)


def test_every_public_name_is_in_the_reference() -> None:
    listed = [
        name
        for path in (DOCS / "reference" / "api").glob("*.md")
        for name in re.findall(r"^::: numdev\.(\w+)$", path.read_text(), re.MULTILINE)
    ]
    assert sorted(listed) == sorted(nd.__all__)


@pytest.fixture(scope="session")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built site. A warning, such as a link to nowhere, ends the build."""
    out = tmp_path_factory.mktemp("docs") / "site"
    ran = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        check=False,
        cwd=ROOT,
        env=os.environ | {"NO_MKDOCS_2_WARNING": "1", "NUMDEV_NOTEBOOK_SMALL": "1"},
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    return out


@pytest.mark.slow
@pytest.mark.xdist_group("docs")
class TestSite:
    def test_has_every_page(self, site: Path) -> None:
        assert [page for page in PAGES if not (site / page).with_suffix(".html").is_file()] == []

    def test_asks_no_other_host(self, site: Path) -> None:
        """Links may lead elsewhere; scripts, styles, fonts and images are all its own."""
        foreign = re.compile(
            r'<(?:script|img|iframe|source)[^>]*\ssrc="?(?:https?:)?//[^>]*>|<link(?![^>]*rel="?canonical)[^>]*href="?(?:https?:)?//[^>]*>'
        )
        found = {path.name: foreign.findall(path.read_text()) for path in site.rglob("*.html")}
        assert {name: tags for name, tags in found.items() if tags} == {}

    def test_no_formula_or_block_is_left(self, site: Path) -> None:
        for path in site.rglob("*.html"):
            text = path.read_text()
            assert 'class="arithmatex"' not in text, path
            assert "{{ " not in text, path

    def test_reference_has_methods_and_members(self, site: Path) -> None:
        text = "".join(path.read_text() for path in (site / "reference" / "api").glob("*.html"))
        assert {'id="numdev.Format.ulp"', 'id="numdev.Tiling.rescales"'} <= set(re.findall(r'id="[\w.]+"', text))
        choices = [each for each in (getattr(nd, name) for name in nd.__all__) if isinstance(each, EnumType)]
        assert len(choices) > 10
        assert [member for choice in choices for member in choice.__members__ if f">{member}<" not in text] == []

    def test_gallery_has_every_figure_with_its_verdict(self, site: Path) -> None:
        text = (site / "gallery.html").read_text()
        paths = sorted((ROOT / "reports" / "reference").glob("**/*.svg"))
        assert {path.parent.name for path in paths} == {"figures", "elements"}
        for path in paths:
            folder = path.parent.relative_to(ROOT / "reports" / "reference").as_posix().removesuffix("/figures")
            source = f"figures/{folder}/{path.name}"
            assert re.search(rf'<img alt="[^"]{{40,}}" src="{source}" />', text)
            assert text.count(f'href="{source}"') == 1
        tables = list((ROOT / "reports" / "reference").glob("**/claims.csv"))
        drawn = [study for path in tables for study in claimed(path) if (path.parent / "figures" / f"{study}.svg").is_file()]
        assert drawn
        assert text.count("<strong>Verdict:</strong>") == len(drawn)

    def test_notebooks_are_shown_with_their_figures(self, site: Path) -> None:
        for path in sorted((ROOT / "notebooks").glob("*.ipynb")):
            text = (site / "notebooks" / f"{path.stem}.html").read_text()
            shown = re.findall(r'<img [^>]*class="notebook"[^>]*src="([^"]+)"', text)
            assert shown or "need a running notebook" in text, path.stem
            assert all((site / "notebooks" / name).stat().st_size > 5000 for name in shown)
            assert f"notebooks/{path.stem}.html" in (site / "notebooks.html").read_text()

    @pytest.mark.parametrize("page", ["gallery", "notebooks"])
    def test_commands_of_generated_blocks_work(self, site: Path, tmp_path: Path, page: str) -> None:
        found = re.findall(r'<div class="language-sh highlight">(.*?)</div>', (site / f"{page}.html").read_text(), re.DOTALL)
        assert len(found) > 3
        for text in dict.fromkeys(found):
            check(html.unescape(re.sub(r"<[^>]+>", "", text)), tmp_path)


def claimed(path: Path) -> list[str]:
    """The study of each claim; a claim that several studies serve is judged on each of them."""
    with path.open(newline="") as file:
        return [study for _, study in dict.fromkeys((row["claim"], row["study"]) for row in csv.DictReader(file))]


BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
WIDE, NARROW, HEIGHT = 1280, 390, 2400
_PROBE = """<script>
const errors = [];
addEventListener("error", (e) => errors.push(e.message || "no " + (e.target.src || e.target.href)), true);
addEventListener("unhandledrejection", (e) => errors.push(String(e.reason)));
addEventListener("load", () => setTimeout(() => {
  const size = (e) => { const box = e.getBoundingClientRect(); return [box.width, box.height]; };
  parent.postMessage({
    errors, width: innerWidth, needed: document.scrollingElement.scrollWidth,
    loaded: performance.getEntriesByType("resource").map((r) => r.name),
    images: [...document.images].map((i) => [i.naturalWidth, i.naturalHeight]),
    formulae: [...document.querySelectorAll("math")].map(size),
    cut: [...document.querySelectorAll(".formula")].filter((e) => e.scrollWidth > e.clientWidth).map((e) => e.textContent),
    results: document.querySelectorAll(".md-search-result__item").length,
  }, "*");
}, 500));</script>"""
_FRAMES = """<body style="margin: 0; display: flex"><script>
const found = [];
addEventListener("message", (e) => { found.push(e.data); document.body.dataset.found = JSON.stringify(found); });
</script>"""


@pytest.mark.slow
@pytest.mark.xdist_group("docs")
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome on PATH")
@pytest.mark.parametrize(
    ("page", "images", "formulae"),
    [
        ("index", 1, 0),
        ("findings", 0, 5),
        ("concepts/recurrence", 0, 10),
        ("reference/configuration", 0, 0),
        ("gallery", 26, 0),
        ("notebooks/1_first_measurement", 2, 0),
    ],
)
def test_a_browser_shows_it(site: Path, tmp_path: Path, page: str, images: int, formulae: int) -> None:
    """At the width of a desktop and at that of a phone, side by side."""
    picture = tmp_path / "picture.png"
    for found in browse(site, page, picture):
        assert found["errors"] == []
        assert [name for name in found["loaded"] if not name.startswith(("file:", "data:"))] == []
        assert found["needed"] <= found["width"], "it is wider than the screen"
        assert found["cut"] == []
        assert len(found["images"]) >= images
        assert len(found["formulae"]) >= formulae
        assert all(width > 0 and height > 0 for width, height in found["images"] + found["formulae"])
    pixels = imread(picture)[..., :3]
    assert pixels.shape[:2] == (HEIGHT, WIDE + NARROW)


@pytest.mark.slow
@pytest.mark.xdist_group("docs")
@pytest.mark.skipif(BROWSER is None, reason="there is no chromium, chromium-browser or google-chrome on PATH")
def test_the_search_needs_no_server(site: Path, tmp_path: Path) -> None:
    for found in browse(site, "index", tmp_path / "picture.png", "?q=rescale"):
        assert found["errors"] == []
        assert found["results"] > 3


def browse(site: Path, page: str, picture: Path, query: str = "") -> list[dict[str, Any]]:
    """Both widths in frames of one page, since a window of Chromium has a least width; what each frame says of itself."""
    assert BROWSER is not None
    shown, both = site / f"{page}.probe.html", site / "both.probe.html"
    shown.write_text((site / f"{page}.html").read_text().replace("<head>", f"<head>{_PROBE}", 1))
    frames = [
        f'<iframe src="{page}.probe.html{query}" style="border: 0; width: {w}px; height: {HEIGHT}px"></iframe>'
        for w in (WIDE, NARROW)
    ]
    both.write_text(_FRAMES + "".join(frames))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--virtual-time-budget=8000", "--dump-dom"]
    size = [f"--window-size={WIDE + NARROW},{HEIGHT}", f"--screenshot={picture}", f"--user-data-dir={picture.parent / 'profile'}"]
    try:
        ran = subprocess.run([BROWSER, *flags, *size, both.as_uri()], check=True, capture_output=True, text=True, timeout=120)
    finally:
        shown.unlink()
        both.unlink()
    found = re.search(r'data-found="([^"]*)"', ran.stdout)
    assert found, "the page's scripts did not run"
    told: list[dict[str, Any]] = json.loads(html.unescape(found[1]))
    assert sorted(each["width"] for each in told) == [NARROW, WIDE]
    return told
