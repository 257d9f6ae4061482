"""The report as one HTML file that asks no host for anything: claims, figures with their values, a table of the rows."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape

from numdev.report.document import context
from numdev.report.document.context import Part
from numdev.report.document.export import summarise
from numdev.report.reading.frames import DEFAULTS, Results, places_of
from numdev.report.reading.scenarios import LABEL, SCENARIO

_TEMPLATES = Path(__file__).resolve().parent / "templates"
MOST_ROWS = 20_000
"""Rows of the table; a browser takes some seconds to sort and to search as many."""
_DIGITS = 4  # of a number in the table; summary.csv has nine
_ORDER = ("study", "scenario", "point", "attention", "format", "policy", "subject", "output", "reference", "step", "tensor")
_WORDS = {"reference": "compared with"}


def write_html(parts: Sequence[Part], notes: Sequence[str] = (), title: str = "", author: str = "") -> bytes:
    """The document on some parts; its table of rows is that of the first, and so is its title unless one is given."""
    data = context.context(parts, HTML)
    rows, count = table(parts[0])
    figures = [path for part in parts for path in part.drawn()]
    words = Counter(claim["word"] for claim in data["judged"])
    counts = [(context.points_of([part.results for part in parts]), "points measured")]
    counts += [(count, f"claim{'s' * (count > 1)} {word}") for word, count in words.most_common()]
    templates = Environment(loader=FileSystemLoader(_TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    page = templates.get_template("report.html").render(
        data
        | {
            "title": title or data["title"],
            "author": author,
            "counts": counts,
            "notes": notes,
            "svg": {path.name: Markup(inline(path.read_text(), path.stem)) for path in figures},
            "table": Markup(json.dumps(rows, separators=(",", ":"), allow_nan=False, ensure_ascii=False).replace("<", "\\u003c")),
            "whole": count if count > rows["rows"] else 0,
            "most": MOST_ROWS,
            "style": Markup((_TEMPLATES / "report.css").read_text()),
            "script": Markup((_TEMPLATES / "report.js").read_text()),
        }
    )
    return page.encode()


def mathematical(text: str) -> Markup:
    """Words with powers such as N^0.5 and 2e-4 as HTML."""
    powers = re.sub(r"(?<=[\w)])\^(-?\d+(?:\.\d+)?)", r"<sup>\1</sup>", str(escape(text)))
    return Markup(re.sub(r"(?<=\d)e(-?\d+)\b", r" × 10<sup>\1</sup>", powers).replace("<sup>-", "<sup>\N{MINUS SIGN}"))


def formatted(text: str) -> Markup:
    """Words of a chapter, whose symbols stand between dollar signs, as HTML."""
    plain = re.sub(r"\\(.)", r"\1", str(escape(text)))
    lowered = (r"_(\w+)", r"<sub>\1</sub>")
    return Markup(re.sub(r"\$([^$]+)\$", lambda match: f"<var>{re.sub(*lowered, match[1])}</var>", plain))


HTML = context.Markup(mathematical, str, formatted)


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
    svg = re.sub(r'\s(?:d|x|y)="[^"]*"', lambda match: re.sub(r"(\.\d\d)\d+", r"\1", match[0]), svg)
    svg = re.sub(r'^<svg\s+width="[^"]*"\s+height="[^"]*"', '<svg aria-hidden="true" focusable="false"', svg)
    return re.sub(r"\n\s*", "\n", svg).strip()


def table(part: Part) -> tuple[dict[str, Any], int]:
    """The first rows of the summary by column: text as a list of words and the place of each row's in it, metrics with intervals.

    Beside it stands the number of rows of the whole summary.
    """
    results, whole = part.results, summarise(part.results)
    rows = whole[:MOST_ROWS]
    titles = {study: results.scenarios(study) for study in results.manifests}
    scenarios = [titles[study][name].title for study, name in zip(rows["study"], rows[SCENARIO], strict=True)]
    rows = rows.assign(scenario=scenarios, point=_labels(rows))
    places = places_of(results.columns, rows) if part.is_own else []
    names = [name for name in dict.fromkeys([*_ORDER, *places]) if name in rows and (rows[name].astype(str) != "").any()]
    figures = [str(name) for name in rows][list(rows).index("replicates") :]  # a setting too may be called `mean`
    data = {
        "texts": [_text(name, rows[name]) for name in names],
        "replicates": rows["replicates"].tolist(),
        "metrics": [_metric(name.removesuffix(".mean"), rows, results) for name in figures if name.endswith(".mean")],
        "rows": len(rows),
    }
    return data, len(whole)


def _labels(rows: pd.DataFrame) -> list[str]:
    """The labels of each row in one line."""
    names = [str(name) for name in rows if str(name).startswith(LABEL)]
    cells = zip(*(rows[name] for name in names), strict=True) if names else [()] * len(rows)
    return [
        " ".join(f"{name.removeprefix(LABEL)}={value}" for name, value in zip(names, row, strict=True) if not pd.isna(value))
        or (DEFAULTS if names else "")
        for row in cells
    ]


def _text(name: str, values: pd.Series[Any]) -> dict[str, Any]:
    codes, words = pd.factorize(values.fillna("").astype(str))
    return {"name": _WORDS.get(name, name), "words": [str(word) for word in words], "codes": codes.tolist()}


def _metric(name: str, rows: pd.DataFrame, results: Results) -> dict[str, Any]:
    column = results.columns.get(name)
    head = {"name": name, "unit": column.unit if column else "", "meaning": column.meaning if column else ""}
    return head | {part: [_number(value) for value in rows[f"{name}.{part}"]] for part in ("mean", "low", "high")}


def _number(value: float) -> float | None:
    """Of few digits; null for NaN and infinity, which JSON does not know."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None
