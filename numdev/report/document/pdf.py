"""The report as a PDF, set by Typst from the figures in SVG and tables of the results. The same results give the same bytes.

Each chapter of `numdev.report.studies` is a section: those that make a figure of a source again first, then our own. A chapter
whose study has no results is left out and listed.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
import typst

from numdev.measurement.deviation.metrics import METRICS
from numdev.report.claims.finding import rules
from numdev.report.claims.verdicts import ClaimResult
from numdev.report.document import overview
from numdev.report.document.part import Part, all_claims, wholes
from numdev.report.document.tables import bad_outputs, deviations, figures_table
from numdev.report.document.typeset import escaped, typeset
from numdev.report.figures.plot import Plot
from numdev.report.reading.frames import Results
from numdev.report.reading.kinds import is_own
from numdev.report.reading.scenarios import ROLES, of
from numdev.report.reading.words import Words, circumstances
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.latency import frame, latest, of_attention
from numdev.report.studies.registry import CHAPTERS, FIGURES, WORDS, chapter_of, words_of
from numdev.results.record import Use

HERE = Path(__file__).resolve().parent
_FIGURES = (Use.CHIEF, Use.FIGURE)
WIDEST = 481.89  # points between the margins: a figure is printed as large as it is drawn
_HIGHEST = 370.0  # points that the findings leave on the first page
_FIGURE = re.compile(r"Golden et al\. 2024, .*?(Figure \w+)")


def _unnamed(results: Results, study: str) -> Chapter:
    """The section of a study without a chapter in the package: what its file says, as markup; its title is plain text."""
    own = chapter_of(results, study)
    return replace(own, question=typeset(own.question), measured=typeset(own.measured))


def write_pdf(parts: Sequence[Part], title: str = "", author: str = "") -> bytes:
    """The document on some parts; its first findings are those of the first, and so is its title unless one is given."""
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        write_root(parts, root, title, author)
        return bytes(typst.compile(str(root / "report.typ"), root=str(root), ignore_system_fonts=True))


def write_root(parts: Sequence[Part], root: Path, title: str = "", author: str = "") -> None:
    """Write what Typst reads, templates, figures and `data.json`, into a folder."""
    for path in [*(HERE / "templates").glob("*.typ"), *(path for part in parts for path in part.drawn().values())]:
        shutil.copy(path, root)
    (root / "data.json").write_text(json.dumps(contents(parts) | ({"title": title} if title else {}) | {"author": author}))


def contents(parts: Sequence[Part]) -> dict[str, Any]:
    """Everything that the template shows, as plain data."""
    every, claims, of = wholes(parts), all_claims(parts), {name: part for part in parts for name in part.results.manifests}
    shipped = [part for part in parts if not part.is_own]
    operations = pd.unique(pd.concat([part.results.points["operation"] for part in shipped])) if shipped else []
    known = [chapter for chapter in CHAPTERS if chapter.operation in operations]
    words = overview.words_for(every[0])
    told = [section for section in known if section.study in of]
    present = [*told, *(_unnamed(of[name].results, name) for name in of if name not in {section.study for section in known})]
    shown = [_section(section, of[section.study]) for section in present]
    shown = [*(one for one in shown if one["source"]), *(one for one in shown if not one["source"])]
    own = [one for one in map(WORDS.get, operations) if one]
    return {
        "title": words.title,
        "subtitle": overview.subtitle(every),
        "bad": escaped(" ".join(filter(None, map(bad_outputs, every)))),
        "highlights": overview.findings(parts),
        "summary": overview.summary(every, claims),
        "reading": overview.reading(claims),
        "claims": list(overview.claims(claims)),
        "headline": _headline(shown, words.headlines),
        "absent": [section.title for section in known if section not in present] if told else [],
        "sections": shown,
        "compiled": overview.compiled_code(every),
        "methods": [one.methods for one in own if one.methods],
        "rules": [list(rule) for rule in dict.fromkeys((*rules(), *(rule for one in own for rule in one.rules)))],
        "compares": bool(shipped),
        "deviates": any(part.deviates for part in parts),
        "metrics": list(_metrics(parts)),
        "environments": list(overview.environments(every)),
        "failures": list(overview.failures(every, {section.study: section.title for section in present})),
    }


def _metrics(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """A table for outputs, and one for every part that compares none: name, unit and definition of every figure that it has."""
    if any(part.deviates for part in parts):
        yield {"of": "outputs", "rows": [(name, unit, text) for name, (unit, text) in METRICS.items()]}
    for part in parts:
        if not part.deviates:
            columns = (column for name, column in part.results.columns.items() if name in part.results.stored)
            found = [(own.name, own.unit, own.meaning) for own in columns if own.use in _FIGURES]
            yield {"of": "weights" if part.is_of_training else part.kind, "rows": found}


def _section(section: Chapter, part: Part) -> dict[str, Any]:
    results, drawn = part.results, part.drawn()
    own = [result for result in part.claims if result.study == section.study]
    by_claim = section.by_claim or len(own) > 1
    words = words_of(results.points[results.points["study"] == section.study])
    wanted = re.compile(rf"{section.study}(_\w+)?\.svg")
    others = [name for name in results.manifests if name != section.study and name.startswith(section.study)]
    mine = [name for name in drawn if wanted.fullmatch(name) and not any(name.startswith(other) for other in others)]
    return {
        "title": section.title,
        "source": _source(own),
        "question": section.question,
        "measured": section.measured,
        "paper": section.paper,
        "figures": [_figure(drawn[name], _plot(results.manifests[section.study], section.study, name)) for name in mine],
        "found": "" if by_claim else " ".join(typeset(result.findings[result.main].sentence) for result in own),
        "compact": not by_claim and not any(result.claim.across for result in own),
        "findings": list(_found(own, results.study(section.study), words, by_claim=by_claim)) if own else [],
        "tables": list(_tables(section, results, with_claims=bool(own))),
        "verdict": "" if by_claim else " ".join(typeset(f"{result.claim.text}: {result.brief}.") for result in own),
        "command": command(results, section.study),
    }


def _source(own: Sequence[ClaimResult]) -> str:
    """The figure of Golden et al. that a section makes again, by the claims that it serves; empty for a question of ours."""
    found = (_FIGURE.match(result.claim.source) for result in own if not result.claim.is_ours)
    return next((match[1] for match in found if match), "")


def _found(own: Sequence[ClaimResult], rows: pd.DataFrame, words: Words, *, by_claim: bool) -> Iterator[dict[str, str]]:
    """What is found for every claim, the first of each under its text where a section has several."""
    for result in own:
        for place, found in enumerate(_findings(result, rows, words)):
            told = typeset(f"{result.claim.text}: {result.brief}.") if by_claim and place == 0 else ""
            yield found | {"claim": told}


def _findings(result: ClaimResult, rows: pd.DataFrame, words: Words) -> Iterator[dict[str, str]]:
    """What is found in every scenario, and what the scenario is."""
    for scenario, finding in result.findings.items():
        about = circumstances(rows if result.claim.across else of(rows, scenario), words)
        role = ROLES[scenario.role]
        head = {
            "title": typeset(scenario.title),
            "role": role,
            "about": typeset("; ".join(part for part in (role, about) if part)),
        }
        beside = finding.beside
        yield head | {
            "verdict": finding.verdict.value,
            "told": typeset(finding.told.partition(" (")[2].rstrip(")")),
            "figure": typeset(finding.figure),
            "beside": "" if beside is None else f"{beside.verdict.value}, {typeset(beside.figure)}",
            "sentence": typeset(finding.sentence),
        }


def _tables(section: Chapter, results: Results, *, with_claims: bool) -> Iterator[dict[str, Any]]:
    """The table of its chapter; of a study without one, or without a claim, its speed or the deviation of every point."""
    study = section.study
    if section.table is not None and len(found := section.table(results, study)):
        yield {"caption": f"{section.title}: the runs.", "columns": list(found.columns), "rows": found.values.tolist()}
    if section.table is not None or (with_claims and not section.with_points):
        return
    timed = of_attention(frame(results))
    found = latest(timed[timed["study"] == study]) if len(timed) else timed
    if found.empty:
        found = figures_table(results, study) if is_own([results.manifests[study]]) else deviations(results, study)
    shown = found.drop(columns="study", errors="ignore")
    if len(shown):
        yield {"caption": f"{section.title}: the points.", "columns": list(shown.columns), "rows": shown.values.tolist()}


def _headline(shown: Sequence[dict[str, Any]], wanted: Sequence[str]) -> dict[str, Any] | None:
    """The figure of the first page: the first of those wanted that is drawn and not too high, or else the first of all."""
    every = (figure for section in shown for figure in section["figures"])
    figures = {figure["file"]: figure for figure in every if figure["height"] <= _HIGHEST}
    return next((figures[name] for name in (*wanted, *figures) if name in figures), None)


def _plot(manifest: Mapping[str, Any], study: str, file: str) -> Plot | None:
    """What drew a file: the study's first figure has its name, others have their own behind that."""
    own = file.removesuffix(".svg").removeprefix(study).removeprefix("_")
    names = [own] if own else [manifest["figure"], *manifest["claims"]]
    return next((FIGURES[name] for name in names if name in FIGURES), None)


def _figure(path: Path, plot: Plot | None) -> dict[str, Any]:
    """An SVG with its width, its descriptions, and its title as the caption."""
    text = path.read_text()
    size = re.search(r'<svg[^>]*\bwidth="([\d.]+)pt" height="([\d.]+)pt"', text)
    title, alt = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("title", "desc"))
    caption, words = (unescape(found[1]) if found else "" for found in (title, alt))
    width, height = (float(size[1]), float(size[2])) if size else (WIDEST, WIDEST)
    scale = min(1.0, WIDEST / width)
    shape = {"width": scale * width, "height": scale * height}
    about = typeset(plot.alt) if plot else ""
    return {"file": path.name, **shape, "alt": words, "caption": caption, "about": about}


def command(results: Results, study: str) -> str:
    """The command that measures a study again on the same kind of device; none of a kind that no command measures."""
    if is_own([results.manifests[study]]) and not results.manifests[study].get("command"):
        return ""
    own = results.points[results.points["study"] == study]
    numbers = own["environment"].unique().tolist()
    devices = {"cpu" if results.environments[int(i)]["device"] == "cpu" else "cuda" for i in numbers}
    stated = results.manifests[study].get("command") or f"numdev measure study={study}"
    at = "".join(f" device={name}" for name in sorted(devices) if "device=" not in stated)
    return " && ".join(f"{each}{at}" for each in stated.split(" && "))
