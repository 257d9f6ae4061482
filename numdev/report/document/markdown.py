"""The claims with their verdicts as Markdown."""

from __future__ import annotations

from collections.abc import Iterator

from numdev.report.claims.verdicts import ClaimResult
from numdev.report.claims.verdicts import note as note_on
from numdev.report.reading.scenarios import ROLES


def claims_markdown(claims: list[ClaimResult]) -> str:
    """The claims as Markdown: a table of all, then each with its scenarios."""
    return "\n".join(_markdown(claims)) + "\n"


def _markdown(claims: list[ClaimResult]) -> Iterator[str]:
    yield "# Claims"
    yield ""
    yield note_on(claims)
    yield from ("", "| claim | source | measured | verdict |", "|---|---|---|---|")
    for result in claims:
        figure = f"{result.main.title}: {result.findings[result.main].figure}"
        yield f"| {_cell(result.claim.text)} | {_cell(result.claim.source)} | {_cell(figure)} | {_cell(result.brief)} |"
    for result in claims:
        yield from ("", f"## {result.claim.text}", "")
        yield f"{result.claim.source}. Study `{result.study}`. **{result.overall[0].upper()}{result.overall[1:]}.**"
        yield from ("", "| scenario | verdict | found | generalises |", "|---|---|---|---|")
        for scenario, finding in result.findings.items():
            role = ROLES[scenario.role]
            cells = (f"{scenario.title} ({role})" if role else scenario.title, finding.told, finding.sentence, finding.over)
            yield f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return text.replace("|", chr(92) + "|")
