"""The report as a PDF, set by Typst from the figures in SVG and tables of the results. The same results give the same bytes.

What is said of a study stands in one small file of `numdev/report/sections`; a file more is a section more. A section whose
study has no results is left out and listed.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
import tomllib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import unescape
from pathlib import Path
from typing import Any

import typst

from numdev.deviation import METRICS
from numdev.report.claims import ClaimResult
from numdev.report.frames import Results
from numdev.report.speed import frame, latest
from numdev.report.tables import place

HERE = Path(__file__).resolve().parent
_WIDEST = 430.0  # points, of 481 between the margins: a figure and the text of its section share a page
_MOST_FAILURES = 40  # rows; the rest are in points.csv
_HEADLINES = ("fig5a_parting.svg", "fig4.svg")  # the first that is drawn stands beside the claims
_TITLE = "How far fast attention strays from exact attention"


@dataclass(frozen=True)
class Section:
    """What a report says of one study besides its results; texts are Typst markup.

    Attributes:
        title: of the section.
        study: whose results it shows.
        question: what the study asks.
        setting: on what it was measured.
        paper: what the source says.
    """

    title: str
    study: str
    question: str
    setting: str
    paper: str


def sections(folder: Path = HERE / "sections") -> list[Section]:
    """Every section, in the order of the numbers in front of the files' names."""
    files = sorted(folder.glob("*.toml"), key=lambda path: int(path.name.partition("_")[0]))
    return [Section(**tomllib.loads(path.read_text())) for path in files]


def write_pdf(results: Results, claims: Sequence[ClaimResult], figures: Path, speed: Results | None = None) -> bytes:
    """The document. `figures` is the folder with the studies' figures in SVG, `speed` the results of `numdev speed`."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for path in (HERE / "templates").glob("*.typ"):
            shutil.copy(path, root)
        drawn = {path.name: path for path in sorted(figures.glob("*.svg"))}
        for path in drawn.values():
            shutil.copy(path, root)
        (root / "data.json").write_text(json.dumps(contents(results, claims, drawn, speed)))
        return bytes(typst.compile(str(root / "report.typ"), root=str(root), ignore_system_fonts=True))


def contents(
    results: Results, claims: Sequence[ClaimResult], drawn: Mapping[str, Path], speed: Results | None = None
) -> dict[str, Any]:
    """Everything that the template shows, as plain data."""
    known, wholes = sections(), [whole for whole in (results, speed) if whole]
    of = {name: whole for whole in wholes for name in whole.manifests}
    present = [section for section in known if section.study in of]
    untold = [name for name in of if name not in {section.study for section in known}]
    return {
        "title": _TITLE,
        "subtitle": f"numdev {_fact(results, 'numdev')}: {', '.join(results.manifests)}",
        "summary": _summary(wholes, claims),
        "claims": [_claim(claim) for claim in claims],
        "headline": _headline(present, drawn),
        "absent": [section.title for section in known if section not in present],
        "sections": [_section(section, of[section.study], claims, drawn, first=not i) for i, section in enumerate(present)],
        "metrics": [{"name": name, "unit": unit, "text": text} for name, (unit, text) in METRICS.items()],
        "environments": list(_environments(wholes)),
        "commands": [[name, command(of[name], name)] for name in [*(s.study for s in present), *untold]],
        "failures": list(_failures(wholes)),
    }


def _fact(results: Results, name: str) -> str:
    return ", ".join(dict.fromkeys(environment.get(name, "") for environment in results.environments))


def _summary(wholes: Sequence[Results], claims: Sequence[ClaimResult]) -> str:
    """The first paragraph, in Typst markup."""
    counted = Counter("not" if result.overall == "not reproduced" else result.overall.partition(" ")[0] for result in claims)
    only = sum(result.overall.startswith("reproduced only") for result in claims)
    words = [
        (counted["reproduced"] - only, "reproduced in every setting"),
        (only, "reproduced in some settings only"),
        (counted["not"], "not reproduced"),
        (counted["undecided"], "undecided"),
    ]
    verdicts = ", ".join(f"{count} {text}" for count, text in words if count)
    devices = " and ".join(dict.fromkeys(_device(environment) for whole in wholes for environment in whole.environments))
    measured = sum(len(whole.points["key"].unique()) for whole in wholes)
    head = f"{measured} points were measured on {_escaped(devices)}, each over the seeds of its study."
    seen = f" Of {len(claims)} claims {verdicts}." if claims else ""
    rule = " Settings whose names begin with _uniform_ are those of the paper; where else a claim holds is told beside them."
    return head + seen + (rule if claims else "")


def _device(environment: Mapping[str, str]) -> str:
    return environment["processor"] if environment["device"] == "cpu" else environment["device"]


def _escaped(text: str) -> str:
    """Text with what Typst's markup gives a meaning to taken literally."""
    return re.sub(r"([\\#*_`$<>@\[\]~])", r"\\\1", text)


def _claim(result: ClaimResult) -> dict[str, Any]:
    papers = [
        {"setting": name, "figure": result.findings[name].figure, "verdict": result.findings[name].verdict.value}
        for name in result.papers
    ]
    rest = Counter(finding.verdict.value for name, finding in result.findings.items() if name not in result.papers)
    elsewhere = ", ".join(f"{verdict} in {count}" for verdict, count in rest.items())
    return {"text": result.claim.text, "source": result.claim.source, "papers": papers, "elsewhere": elsewhere}


def _section(
    section: Section, results: Results, claims: Sequence[ClaimResult], drawn: Mapping[str, Path], *, first: bool
) -> dict[str, Any]:
    own = [result for result in claims if result.study == section.study]
    wanted = re.compile(rf"{section.study}(_\w+)?\.svg")
    others = [name for name in results.manifests if name != section.study and name.startswith(section.study)]
    mine = [name for name in drawn if wanted.fullmatch(name) and not any(name.startswith(other) for other in others)]
    return {
        "title": section.title,
        "first": first,
        "question": section.question,
        "setting": section.setting,
        "paper": section.paper,
        "figures": [_figure(drawn[name]) for name in mine],
        "findings": [
            {"setting": name, "verdict": finding.verdict.value, "sentence": finding.sentence}
            for result in own
            for name, finding in result.findings.items()
        ],
        "tables": _tables(results, section.study),
        "verdict": " ".join(f"{result.claim.text}: {result.brief}." for result in own) or "No claim is judged here.",
        "command": command(results, section.study),
    }


def _tables(results: Results, study: str) -> list[dict[str, Any]]:
    """What a study of speed found at its greatest length; nothing of other studies."""
    rows = frame(results)
    found = latest(rows[rows["study"] == study]) if len(rows) else rows
    if found.empty:
        return []
    shown = found.drop(columns="study")
    return [{"columns": list(shown.columns), "rows": shown.values.tolist()}]


def _headline(present: Sequence[Section], drawn: Mapping[str, Path]) -> dict[str, Any] | None:
    """The figure of the first page, which its section names too."""
    studies = {section.study for section in present}
    names = (name for name in _HEADLINES if name in drawn and re.split(r"[_.]", name)[0] in studies)
    return next((_figure(drawn[name]) for name in names), None)


def _figure(path: Path) -> dict[str, Any]:
    """A picture with its width and the words that it brings: its title is its caption."""
    text = path.read_text()
    width = re.search(r'<svg[^>]*\bwidth="([\d.]+)pt"', text)
    title, alt = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("title", "desc"))
    caption, words = (unescape(found[1]) if found else "" for found in (title, alt))
    points = float(width[1]) if width else _WIDEST
    return {"file": path.name, "width": min(points, _WIDEST), "alt": words, "caption": caption}


def command(results: Results, study: str) -> str:
    """What measures a study again, on the kind of device on which it was measured."""
    own = results.points[results.points["study"] == study]
    numbers = own["environment"].unique().tolist()
    devices = {"cpu" if results.environments[int(i)]["device"] == "cpu" else "cuda" for i in numbers}
    stated = results.manifests[study].get("command") or f"numdev measure study={study}"
    return " ".join([stated, *(f"device={name}" for name in sorted(devices))])


def _environments(wholes: Sequence[Results]) -> Iterator[dict[str, Any]]:
    """Each once, those of the first results under the numbers that their tables give them."""
    counts: dict[tuple[tuple[str, str], ...], int] = {}
    for whole in wholes:
        for number, environment in enumerate(whole.environments):
            facts = tuple(environment.items())
            counts[facts] = counts.get(facts, 0) + int((whole.points["environment"] == number).sum())
    for number, (facts, count) in enumerate(counts.items()):
        yield {"title": f"Environment {number}, {count} points", "facts": [list(fact) for fact in facts]}


def _failures(wholes: Sequence[Results]) -> Iterator[list[str]]:
    failed = [point for whole in wholes for _, point in whole.points[whole.points["status"] != "ok"].iterrows()]
    for point in failed[:_MOST_FAILURES]:
        yield [point["study"], place(point), point["status"], point["reason"]]
    if len(failed) > _MOST_FAILURES:
        yield ["", f"and {len(failed) - _MOST_FAILURES} more", "", "in points.csv and unsupported.csv"]
