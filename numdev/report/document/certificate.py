"""The page of a certificate of a kernel, as PDF or HTML, from what `certificate.json` holds."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typst
from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from matplotlib.figure import Figure

from numdev.report.document.export import TEMPLATES
from numdev.report.document.pages import inline
from numdev.report.figures.marks import Dot, draw_rows, page, swatch
from numdev.report.figures.theme import BLUE, MEANINGS, freeze, styled, to_svg
from numdev.report.statistics import Interval

_TITLE = "The error of each output over what the policy permits, case by case"
_LEAST = 0.1  # ratio that is shown
_OUTPUTS = {"out": BLUE, "dq": MEANINGS["dQ"], "dk": MEANINGS["dK"], "dv": MEANINGS["dV"]}


def write_page(summary: Mapping[str, Any], table: Sequence[Sequence[str]], kind: str) -> bytes:
    """The page, `pdf` or `html`, of the summary of a certificate and its table of cases, whose first row is its head."""
    svg = to_svg(_figure(summary), _TITLE, f"{_TITLE}. {summary['sentence']}")
    data = {**summary, "head": table[0], "rows": table[1:], "figure": "certificate.svg", "caption": _TITLE}
    if kind == "html":
        templates = Environment(loader=FileSystemLoader(TEMPLATES), autoescape=True, trim_blocks=True, lstrip_blocks=True)
        style = Markup((TEMPLATES / "report.css").read_text())
        picture = Markup(inline(svg.decode(), "certificate"))
        return templates.get_template("certificate.html").render(data | {"style": style, "svg": picture}).encode()
    with tempfile.TemporaryDirectory() as name:
        root = Path(name)
        for template in TEMPLATES.glob("*.typ"):
            shutil.copy(template, root)
        (root / "certificate.svg").write_bytes(svg)
        (root / "data.json").write_text(json.dumps(data))
        return bytes(typst.compile(str(root / "certificate.typ"), root=str(root), ignore_system_fonts=True))


@styled()
def _figure(summary: Mapping[str, Any]) -> Figure:
    """The ratio of the RMSE with its interval, in one row for each case."""
    cases = [case for case in summary["cases"] if not case["skipped"]]
    figure = page(0.7 + 0.19 * len(cases))
    axes, dots = figure.subplots(), []
    outputs = dict.fromkeys(each["output"] for case in cases for each in case["judged"] if each["output"] in _OUTPUTS)
    for row, case in enumerate(cases):
        judged = [each for each in case["judged"] if each["figure"] == "rmse" and each["output"] in outputs]
        for place, each in enumerate(judged):
            ratio, low, high = (max(each[end], _LEAST) for end in ("ratio", "low", "high"))
            interval = Interval(ratio, low, high, case["seeds"])
            down = 0.2 * (place - (len(judged) - 1) / 2)
            dots.append(Dot(row + down, interval, _OUTPUTS[each["output"]], look={"markersize": 3}, name=each["output"]))
    margin = summary["margin"]
    draw_rows(axes, [case["name"] for case in cases], dots, at={1: "", margin: f"margin {margin:g}"})
    axes.set_xlabel("RMSE over what the policy permits")
    if len(outputs) > 1:
        axes.legend(handles=[swatch(_OUTPUTS[each]) for each in outputs], labels=list(outputs), loc="lower right")
    return freeze(figure)
