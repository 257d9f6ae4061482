"""The report as one HTML file that asks no host for anything: claims, figures with their values, a table of the rows."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from html import unescape
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from numdev.report.claims.verdicts import ClaimResult, note
from numdev.report.document import overview
from numdev.report.document.export import summarise
from numdev.report.document.kinds import summary_of
from numdev.report.document.part import Part, all_claims, wholes
from numdev.report.document.training import summarise_weights
from numdev.report.reading.frames import DEFAULTS, LABEL, Results
from numdev.report.reading.kinds import is_own, places_of
from numdev.report.reading.once import is_repeated
from numdev.report.reading.scenarios import ROLES, SCENARIO
from numdev.report.studies.registry import CHAPTERS

_TEMPLATES = Path(__file__).resolve().parent / "templates"
_MOST_CHIEF = 3  # scenarios of a claim that stand above the list of all
MOST_ROWS = 20_000
"""Rows of the table; a browser takes some seconds to sort and to search as many."""
_DIGITS = 4  # of a number in the table; summary.csv has nine
_MEAN, _LOW, _HIGH = ".mean", ".low", ".high"
_ORDER = ("study", "scenario", "point", "attention", "format", "policy", "subject", "output", "reference", "step", "tensor")
_WORDS = {"reference": "compared with", "replicates": "replicates"}


def write_html(parts: Sequence[Part], notes: Sequence[str] = (), title: str = "", author: str = "") -> bytes:
    """The document on some parts; its table of rows is that of the first, and so is its title unless one is given."""
    every, claims, main = wholes(parts), all_claims(parts), parts[0].results
    titles = {name: str(own["title"]) for whole in every for name, own in whole.manifests.items()}
    rows, whole = table(parts[0])
    template = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    shown = template.get_template("report.html").render(
        title=title or overview.words_for(main).title,
        author=author,
        subtitle=overview.subtitle(every),
        counts=list(_counts(every, claims)),
        reading=note(claims) if claims else "",
        compares=not parts[0].is_own,
        claims=[_claim(result) for result in claims],
        sections=[_section(part, study) for part in parts for study in part.results.manifests],
        table=_json(rows),
        whole=whole if whole > rows["rows"] else 0,
        most=MOST_ROWS,
        environments=list(overview.environments(every)),
        failures=list(overview.failures(every, titles)),
        notes=list(notes),
        style=_part("report.css"),
        script=_part("report.js"),
    )
    return shown.encode()


def _part(name: str) -> Markup:
    return Markup((_TEMPLATES / name).read_text())


def _counts(wholes: Sequence[Results], claims: Sequence[ClaimResult]) -> Iterator[tuple[int, str]]:
    """How many points were measured, and how many claims have which verdict."""
    yield sum(whole.points["key"].nunique() for whole in wholes), "points measured"
    for word, count in Counter(result.word for result in claims).most_common():
        yield count, f"claim{'s' * (count > 1)} {word}"


def _claim(result: ClaimResult) -> dict[str, Any]:
    findings = [
        {
            "title": scenario.title,
            "role": ROLES[scenario.role],
            "verdict": finding.verdict.value,
            "figure": mathematical(finding.figure),
            "told": mathematical(finding.told),
            "sentence": mathematical(finding.sentence),
            "chief": scenario in result.chief[:_MOST_CHIEF],
        }
        for scenario, finding in result.findings.items()
    ]
    head = {"text": result.claim.text, "source": result.claim.source, "study": result.study}
    return head | {"word": result.word, "brief": result.brief, "tone": _tone(result.word), "findings": findings}


def _tone(word: str) -> str:
    """The class of a verdict's badge: its colour, beside the word."""
    return (
        "partly" if word.startswith("partly") else "no" if word.startswith("not ") else "open" if word == "undecided" else "yes"
    )


def _section(part: Part, study: str) -> dict[str, Any]:
    results, claims, figures = part.results, part.claims, part.figures
    manifest = results.manifests[study]
    chapter = next((chapter for chapter in CHAPTERS if chapter.study == study), None)
    others = [name for name in results.manifests if name != study and name.startswith(study)]
    paths = [path for path in sorted(figures.glob(f"{study}*.svg")) if re.fullmatch(rf"{re.escape(study)}(_\w+)?", path.stem)]
    return {
        "study": study,
        "title": str(manifest["title"]),
        "question": formatted(chapter.question) if chapter is not None else str(manifest.get("question", "")),
        "command": manifest.get("command") or ("" if is_own([manifest]) else f"numdev measure study={study}"),
        "claims": [{"text": own.claim.text, "brief": own.brief, "tone": _tone(own.word)} for own in claims if own.study == study],
        "figures": [figure(path) for path in paths if not any(path.stem.startswith(other) for other in others)],
    }


def mathematical(text: str) -> Markup:
    """Words with powers such as N^0.5 and 2e-4 as HTML."""
    powers = re.sub(r"(?<=[\w)])\^(-?\d+(?:\.\d+)?)", r"<sup>\1</sup>", str(escape(text)))
    return Markup(re.sub(r"(?<=\d)e(-?\d+)\b", r" × 10<sup>\1</sup>", powers).replace("<sup>-", "<sup>\N{MINUS SIGN}"))


def formatted(text: str) -> Markup:
    """Words of a chapter, whose symbols stand between dollar signs, as HTML."""
    plain = re.sub(r"\\(.)", r"\1", str(escape(text)))
    return Markup(re.sub(r"\$([^$]+)\$", lambda found: f"<var>{_lowered(found[1])}</var>", plain))


def _lowered(symbol: str) -> str:
    return re.sub(r"_(\w+)", r"<sub>\1</sub>", symbol)


def figure(path: Path) -> dict[str, Any]:
    """A figure in SVG as a part of a page, its title and its description."""
    text = path.read_text()
    title, alt = (re.search(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL) for tag in ("title", "desc"))
    return {
        "name": path.stem,
        "title": unescape(title[1]) if title else path.stem,
        "alt": unescape(alt[1]) if alt else "",
        "svg": Markup(inline(text, path.stem)),
    }


def inline(svg: str, name: str) -> str:
    """An SVG without what a page has already, its identifiers its own among those of other figures, its numbers of two decimals.

    Title and description stand beside the figure instead: a browser would show the title wherever one points.
    """
    start = svg.index("<svg")
    for pattern in (r"<!--.*?-->", r"<metadata>.*?</metadata>", r"<title>.*?</title>", r"<desc>.*?</desc>"):
        count = 1 if "title" in pattern or "desc" in pattern else 0  # points have titles too
        svg = svg[:start] + re.sub(pattern, "", svg[start:], count=count, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:xlink)?="[^"]*"', "", svg[start:]).replace("xlink:href", "href")
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(href="|url\()#', rf"\1#{name}-", svg)
    svg = re.sub(r'\s(?:d|x|y)="[^"]*"', lambda found: re.sub(r"(\.\d\d)\d+", r"\1", found[0]), svg)
    svg = re.sub(r'^<svg\s+width="[^"]*"\s+height="[^"]*"', '<svg aria-hidden="true" focusable="false"', svg)
    return re.sub(r"\n\s*", "\n", svg).strip()


def table(part: Part) -> tuple[dict[str, Any], int]:
    """The first rows of the summary by column: text as a list of words and the place of each row's in it, metrics with intervals.

    Beside it stands the number of rows of the whole summary.
    """
    results = part.results
    every = _summary(part)
    found = every[:MOST_ROWS]
    found = found.assign(scenario=_titles(found, results), point=_labels(found))
    places = places_of(results.columns, found) if part.is_own else []
    names = [name for name in dict.fromkeys([*_ORDER, *places]) if name in found and (found[name].astype(str) != "").any()]
    figures = [str(name).removesuffix(_MEAN) for name in found if str(name).endswith(_MEAN)]
    data = {
        "texts": [_text(name, found[name]) for name in names],
        "replicates": found["replicates"].tolist(),
        "metrics": [_metric(name, found, results) for name in figures],
        "rows": len(found),
    }
    return data, len(every)


def _summary(part: Part) -> pd.DataFrame:
    results = part.results
    if part.is_own:
        return summary_of(results)
    if part.is_of_training:
        return summarise_weights(results.rows)
    return summarise(results.stored, results.points, ~is_repeated(results.stored))


def _titles(found: pd.DataFrame, results: Results) -> list[str]:
    titles = {study: results.scenarios(study) for study in results.manifests}
    return [titles[study][name].title for study, name in zip(found["study"], found[SCENARIO], strict=True)]


def _labels(found: pd.DataFrame) -> list[str]:
    """The labels of each row in one line."""
    names = [str(name) for name in found if str(name).startswith(LABEL)]
    rows = zip(*(found[name] for name in names), strict=True) if names else [()] * len(found)
    return [
        " ".join(f"{name.removeprefix(LABEL)}={value}" for name, value in zip(names, row, strict=True) if not pd.isna(value))
        or (DEFAULTS if names else "")
        for row in rows
    ]


def _text(name: str, values: pd.Series[Any]) -> dict[str, Any]:
    codes, words = pd.factorize(values.fillna("").astype(str))
    return {"name": _WORDS.get(name, name), "words": [str(word) for word in words], "codes": codes.tolist()}


def _metric(name: str, found: pd.DataFrame, results: Results) -> dict[str, Any]:
    column = results.columns.get(name)
    said = {"name": name, "unit": column.unit if column else "", "meaning": column.meaning if column else ""}
    return said | {part: [_number(value) for value in found[f"{name}.{part}"]] for part in ("mean", "low", "high")}


def _number(value: float) -> float | None:
    """Of few digits; null for NaN and infinity, which JSON does not know."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def _json(data: dict[str, Any]) -> Markup:
    """For a script element, which ends at the first `</`."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False, ensure_ascii=False)
    return Markup(text.replace("<", "\\u003c"))
