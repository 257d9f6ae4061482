"""The documents: one HTML file that asks no host for anything, and a PDF that Typst sets. The same results give the same bytes.

Each chapter of `numdev.report.studies` is a section: those that make a figure of a source again first, then our own. A chapter
whose study has no results is left out and listed.
"""

from __future__ import annotations

import json
import math
import re
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup, escape
from matplotlib.figure import Figure

from numdev.report.document.context import Part, context
from numdev.report.document.export import TEMPLATES, summarise
from numdev.report.document.tables import place
from numdev.report.figures.marks import DASHED, Dot, draw_rows, page, swatch
from numdev.report.figures.theme import BLUE, GREY, MEANINGS, freeze, styled, to_svg
from numdev.report.reading.frames import places_of
from numdev.report.statistics import Interval

MOST_ROWS = 20_000
"""Rows of the table; a browser takes some seconds to sort and to search as many."""
_DIGITS = 4  # of a number in the table; summary.csv has nine
_TEXTS = ("study", "point", "attention", "format", "policy", "subject", "output", "reference")
_WORDS = {"reference": "compared with"}


def write_html(parts: Sequence[Part], notes: Sequence[str] = (), title: str = "", author: str = "") -> bytes:
    """The document on some parts; its table of rows is that of the first, and so is its title unless one is given."""
    whole = summarise(parts[0].results)
    return _rendered(
        "report.html",
        context(parts, title, author)
        | {
            "notes": notes,
            "svg": {own.svg.name: Markup(inline(own.svg.read_text(), own.path.name)) for part in parts for own in part.pictures},
            "table": table(parts[0], whole[:MOST_ROWS]),
            "whole": len(whole) if len(whole) > MOST_ROWS else 0,
            "most": MOST_ROWS,
            "script": Markup((TEMPLATES / "report.js").read_text()),
        },
    )


def _rendered(template: str, data: Mapping[str, Any]) -> bytes:
    """A page in HTML from its template, with the style of every page."""
    templates = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
    templates.filters |= {"mathematical": mathematical, "formatted": formatted}
    return templates.get_template(template).render({**data, "style": Markup((TEMPLATES / "report.css").read_text())}).encode()


def mathematical(text: str) -> Markup:
    """Words with powers such as N^0.5 and 2e-4 as HTML."""
    powers = re.sub(r"(?<=[\w)])\^(-?\d+(?:\.\d+)?)", r"<sup>\1</sup>", str(escape(text)))
    return Markup(re.sub(r"(?<=\d)e(-?\d+)\b", r" × 10<sup>\1</sup>", powers).replace("<sup>-", "<sup>\N{MINUS SIGN}"))


def formatted(text: str) -> Markup:
    """Words of a chapter, whose symbols stand between dollar signs, as HTML."""
    plain = re.sub(r"\\(.)", r"\1", str(escape(text)))
    lowered = (r"_(\w+)", r"<sub>\1</sub>")
    return Markup(re.sub(r"\$([^$]+)\$", lambda match: f"<var>{re.sub(*lowered, match[1])}</var>", plain))


def inline(svg: str, name: str) -> str:
    """An SVG as a part of a page, its identifiers its own among those of other figures.

    Its title and description stand beside it: a browser would show the title wherever one points. Points keep their titles.
    """
    svg = re.sub(r"<(metadata|title|desc)>.*?</\1>", "", svg[svg.index("<svg") :], count=3, flags=re.DOTALL)
    svg = re.sub(r'(\bid="|href="#|url\(#)', rf"\1{name}-", svg.replace("xlink:href", "href"))
    return svg.replace("<svg ", '<svg aria-hidden="true" focusable="false" ', 1)


def table(part: Part, rows: pd.DataFrame) -> dict[str, Any]:
    """Rows of the summary by column: text as a list of words and the place of each row's in it, metrics with intervals."""
    rows = rows.assign(point=[place(row) for row in rows.to_dict("records")])
    names = dict.fromkeys([*_TEXTS, *places_of(part.results.columns, rows)])
    metrics = [str(name).removesuffix(".mean") for name in rows if str(name).endswith(".mean")]
    return {
        "texts": [_text(name, rows[name]) for name in names if name in rows and (rows[name].astype(str) != "").any()],
        "replicates": rows["replicates"].tolist(),
        "metrics": [
            {"name": name, "unit": part.results.columns[name].unit, "meaning": part.results.columns[name].meaning}
            | {end: list(map(_number, rows[f"{name}.{end}"])) for end in ("mean", "low", "high")}
            for name in metrics
            if name in part.results.columns
        ],
        "rows": len(rows),
    }


def _text(name: str, values: pd.Series[Any]) -> dict[str, Any]:
    codes, words = pd.factorize(values.fillna("").astype(str))
    return {"name": _WORDS.get(name, name), "words": words.tolist(), "codes": codes.tolist()}


def _number(value: float) -> float | None:
    """Of few digits; null for NaN and infinity, which JSON does not know."""
    return float(f"{value:.{_DIGITS}g}") if math.isfinite(value) else None


def write_pdf(parts: Sequence[Part], title: str = "", author: str = "") -> bytes:
    """The document on some parts; its title is that of the first unless one is given."""
    with tempfile.TemporaryDirectory() as name:
        write_root(parts, Path(name), title, author)
        return _typeset("report.typ", Path(name))


def write_root(parts: Sequence[Part], root: Path, title: str = "", author: str = "") -> None:
    """Write what Typst reads, templates, figures and `data.json`, into a folder."""
    for picture in (picture.svg for part in parts for picture in part.pictures):
        shutil.copy(picture, root)
    _write_data(context(parts, title, author), root)


def _write_data(data: Mapping[str, Any], root: Path) -> None:
    for template in TEMPLATES.glob("*.typ"):
        shutil.copy(template, root)
    (root / "data.json").write_text(json.dumps(data))


def _typeset(template: str, root: Path) -> bytes:
    """The PDF of a template and the data in its folder."""
    import typst  # late: the typesetter is large

    return bytes(typst.compile(str(root / template), root=str(root), ignore_system_fonts=True))


_OUTPUTS = {"out": BLUE, "dq": MEANINGS["dQ"], "dk": MEANINGS["dK"], "dv": MEANINGS["dV"]}
_LEAST = 0.1  # ratio that is shown


def write_certificate(certificate: Mapping[str, Any], kind: str) -> bytes:
    """The page of a certificate of a kernel, `pdf` or `html`, from what `certificate.json` holds."""
    caption = "The error of each output over what the policy permits, case by case"
    svg = to_svg(_ratios(certificate), caption, f"{caption}. {certificate['sentence']}")
    data = {**certificate, "figure": "certificate.svg", "caption": caption}
    if kind == "html":
        return _rendered("certificate.html", data | {"svg": Markup(inline(svg.decode(), "certificate"))})
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        (root / "certificate.svg").write_bytes(svg)
        _write_data(data, root)
        return _typeset("certificate.typ", root)


@styled()
def _ratios(certificate: Mapping[str, Any]) -> Figure:
    """The ratio of the RMSE with its interval, in one row for each case."""
    cases, margin, dots = [case for case in certificate["cases"] if not case["skipped"]], certificate["margin"], list[Dot]()
    figure = page(0.7 + 0.19 * len(cases))
    axes, outputs = figure.subplots(), dict.fromkeys(each["output"] for case in cases for each in case["judged"])
    shades = {name: _OUTPUTS[name] for name in outputs if name in _OUTPUTS}
    for row, case in enumerate(cases):
        judged = [each for each in case["judged"] if each["figure"] == "rmse" and each["output"] in shades]
        for number, each in enumerate(judged):
            ratio, low, high = (max(each[end], _LEAST) for end in ("ratio", "low", "high"))
            down = 0.2 * (number - (len(judged) - 1) / 2)
            interval = Interval(ratio, low, high, case["seeds"])
            dots.append(Dot(row + down, interval, shades[each["output"]], look={"markersize": 3}, name=each["output"]))
    draw_rows(axes, [case["name"] for case in cases], dots, at={1: "", margin: f"margin {margin:g}"})
    axes.set_xlabel("RMSE over what the policy permits")
    if len(shades) > 1:
        axes.legend(handles=list(map(swatch, shades.values())), labels=list(shades), loc="lower right")
    return freeze(figure)


def write_diagnosis(diagnosis: Mapping[str, Any]) -> bytes:
    """The page of a loss spike, from what `diagnosis.json` holds."""
    caption = "The loss of the run, and of the same steps replayed"
    replays = diagnosis["replays"]
    svg = to_svg(_losses(diagnosis), caption, f"{caption}. {diagnosis['sentence']}") if replays else b""
    columns = list(diagnosis["heads"][0]) if diagnosis["heads"] else []
    data = {**diagnosis, "columns": columns, "caption": caption, "svg": Markup(inline(svg.decode(), "doctor")) if svg else ""}
    return _rendered("doctor.html", data)


@styled()
def _losses(diagnosis: Mapping[str, Any]) -> Figure:
    """The losses by step, a gap where one is not finite: the run, exact attention, and in grey everything else."""
    figure, shades = page(2.6), {"the run": BLUE, "exact attention": MEANINGS["fp64"]}
    axes = figure.subplots()
    for replay in reversed(diagnosis["replays"]):
        losses = [math.nan if loss is None else loss for loss in replay["losses"]]
        steps, shade = range(diagnosis["first"], diagnosis["first"] + len(losses)), shades.get(replay["title"], GREY)
        axes.plot(steps, losses, color=shade, linewidth=1.4 if replay["title"] in shades else 0.5)
    axes.axvline(diagnosis["spike"], **DASHED)
    everything = [loss for replay in diagnosis["replays"] for loss in replay["losses"] if loss is not None]
    if everything and min(everything) > 0 and max(everything) > 20 * min(everything):
        axes.set_yscale("log")
    axes.set_xlabel("step")
    axes.set_ylabel("loss")
    shown = {**shades, "other replays": GREY}
    axes.legend(handles=[swatch(shade, "", linestyle="-") for shade in shown.values()], labels=list(shown))
    return freeze(figure)
