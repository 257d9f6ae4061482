"""The documentation: what it says to type works, and it builds with every page, formula and figure, asking no other host."""

from __future__ import annotations

import csv
import html
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

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
        result = {path.name: foreign.findall(path.read_text()) for path in site.rglob("*.html")}
        assert {name: tags for name, tags in result.items() if tags} == {}

    def test_no_formula_or_block_is_left(self, site: Path) -> None:
        for path in site.rglob("*.html"):
            text = path.read_text()
            assert 'class="arithmatex"' not in text, path
            assert "{{ " not in text, path

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
        result = re.findall(r'<div class="language-sh highlight">(.*?)</div>', (site / f"{page}.html").read_text(), re.DOTALL)
        assert len(result) > 3
        for text in dict.fromkeys(result):
            check(html.unescape(re.sub(r"<[^>]+>", "", text)), tmp_path)


def claimed(path: Path) -> list[str]:
    """The study of each claim; a claim that several studies serve is judged on each of them."""
    with path.open(newline="") as file:
        return [study for _, study in dict.fromkeys((row["claim"], row["study"]) for row in csv.DictReader(file))]
