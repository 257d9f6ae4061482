"""The reference results say what the code says now: words of claims, titles of figures, and who made them."""

from __future__ import annotations

import csv
import re
from pathlib import Path

import pytest

from numdev.cli.library import Library, config_folder
from numdev.report.claims import CLAIMS, ClaimResult
from numdev.report.finding import Finding, Verdict

REFERENCE = Path(__file__).resolve().parent.parent / "reports" / "reference"
LIBRARY = Library((config_folder(),))


def verdicts(path: Path) -> tuple[dict[str, ClaimResult], dict[str, str]]:
    """The claims of a file, judged again from their findings, and the words that the file has for them."""
    findings: dict[tuple[str, str], dict[str, Finding]] = {}
    words = {}
    for row in csv.DictReader(path.open(newline="")):
        own = findings.setdefault((row["claim"], row["study"]), {})
        own[row["setting"]] = Finding(Verdict(row["verdict"]), row["figure"], row["sentence"])
        words[row["claim"]] = row["overall"]
    return {name: ClaimResult(CLAIMS[name], study, own) for (name, study), own in findings.items()}, words


@pytest.mark.parametrize("path", sorted(REFERENCE.glob("*/claims.csv")), ids=lambda path: path.parent.name)
def test_the_words_follow_from_the_findings(path: Path) -> None:
    results, words = verdicts(path)
    assert results
    assert {name: result.overall for name, result in results.items()} == words
    text = path.with_suffix(".md").read_text()
    assert all(f"| {result.claim.text} | {result.claim.source} |" in text for result in results.values())
    assert all(f"{result.overall[1:]}.**" in text for result in results.values())


@pytest.mark.parametrize(
    "path", sorted(REFERENCE.glob("*/figures/*.svg")), ids=lambda path: f"{path.parent.parent.name} {path.stem}"
)
def test_a_studys_figure_has_its_title(path: Path) -> None:
    title = re.search(r"<title>(.*?)</title>", path.read_text(), re.DOTALL)
    assert title
    if (config_folder() / "study" / f"{path.stem}.yaml").is_file():
        assert title[1].replace("&gt;", ">") == LIBRARY.study(path.stem)["title"]
    else:
        assert title[1], "a further figure has a title of its own"


def test_every_folder_is_in_the_table_of_the_readme() -> None:
    text = (REFERENCE / "README.md").read_text()
    for path in REFERENCE.glob("**/*"):
        if path.is_dir() and path.name != "figures":
            assert f"| `{path.relative_to(REFERENCE).as_posix()}` | " in text
