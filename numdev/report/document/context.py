"""The content of a report as plain data, from which both documents, PDF and HTML, are set."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from string import Formatter
from typing import Any

import pandas as pd

from numdev.measurement.deviation import KIND as DEVIATION
from numdev.measurement.metrics import METRICS
from numdev.report.claims.verdicts import ClaimResult, Verdict, note, rules
from numdev.report.document.figures import Picture
from numdev.report.document.tables import bad_outputs, failures, points_table
from numdev.report.reading.frames import SHIPPED, SPEED, TRAINING, Results, is_own
from numdev.report.reading.scenarios import ROLES, of
from numdev.report.reading.wording import Words, circumstances
from numdev.report.studies.registry import CHAPTERS, WORDS, Chapter, chapter_of, words_of
from numdev.report.studies.speed import frame, latest, of_attention
from numdev.report.studies.training import run_table
from numdev.results.record import Use

WIDEST = 481.89  # points between the margins of a page: a figure is printed as large as it is drawn
_HIGHEST = 370.0  # points that the findings leave on the first page
_MOST_FINDINGS = 3
_ALL_FAILURES = "in points.csv and unsupported.csv"
_ABREAST = 3  # environments that one table has beside one another
_TONES = {"partly": "partly", "not ": "no", "undecided": "open"}  # by the start of a verdict: the class of its badge
_FIGURE = re.compile(r"Golden et al\. 2024, .*?(Figure \w+)")


@dataclass(frozen=True)
class Part:
    """The part of a report about one kind of measurement.

    Attributes:
        results: of one kind.
        claims: judged on them, all in one table: p-values are adjusted within a part.
        figures: that were drawn of each study, by their paths without suffix.
    """

    results: Results
    claims: Sequence[ClaimResult] = ()
    figures: Mapping[str, Mapping[Path, Picture]] = field(default_factory=dict)

    @property
    def is_own(self) -> bool:
        """Whether the kind is one of the user's own, of which only its columns tell."""
        return self.results.kind not in SHIPPED

    @property
    def deviates(self) -> bool:
        """Whether the rows are deviations of outputs."""
        return self.results.kind in (DEVIATION, SPEED)

    def drawn(self, *studies: str) -> dict[Path, Picture]:
        """The figures of some studies, or of all, by their files in SVG."""
        every = {path: own for study in studies or self.results.manifests for path, own in self.figures.get(study, {}).items()}
        return {path.with_name(f"{path.name}.svg"): every[path] for path in sorted(every)}


@dataclass(frozen=True)
class Markup:
    """How a document marks up text: a sentence with mathematics, one without, and text of a chapter, which is Typst markup."""

    plain: Callable[[str], str]
    escaped: Callable[[str], str]
    chapter: Callable[[str], str]


def context(parts: Sequence[Part], markup: Markup) -> dict[str, Any]:
    """Everything that a document on some parts shows; its first findings are those of the first part, and so is its title."""
    wholes = [part.results for part in parts]
    part_of = {name: part for part in parts for name in part.results.manifests}
    claims = [claim for part in parts for claim in part.claims]
    shipped = [part for part in parts if not part.is_own]
    operations = pd.unique(pd.concat([part.results.points["operation"] for part in shipped])) if shipped else []
    known = [chapter for chapter in CHAPTERS if chapter.operation in operations]
    named = [chapter for chapter in known if chapter.study in part_of]
    missing = [name for name in part_of if name not in {chapter.study for chapter in named}]
    chapters = [*named, *(chapter_of(part_of[name].results, name) for name in missing)]
    sections = [_section(chapter, part_of[chapter.study], markup, is_named=chapter in named) for chapter in chapters]
    sections.sort(key=lambda section: not section["source"])
    own = [words for words in map(WORDS.get, operations) if words]
    words = words_for(parts[0].results)
    judged = [_claim(claim, markup) for claim in claims]
    subtitle, summary = _first_words(wholes, claims)
    return {
        "title": words.title,
        "subtitle": subtitle,
        "bad": markup.escaped(" ".join(filter(None, map(bad_outputs, wholes)))),
        "highlights": _findings(parts, markup),
        "summary": markup.escaped(summary),
        "reading": markup.escaped(note(claims)),
        "judged": judged,
        "claims": _merged(judged),
        "headline": _headline(sections, words.headlines),
        "absent": [chapter.title for chapter in known if chapter not in named] if named else [],
        "sections": sections,
        "methods": [words.methods for words in own if words.methods],
        "rules": [list(rule) for rule in dict.fromkeys((*rules(), *(rule for words in own for rule in words.rules)))],
        "compares": bool(shipped),
        "deviates": any(part.deviates for part in parts),
        "metrics": list(_metrics(parts)),
        "environments": list(_environments(wholes)),
        "failures": failures(wholes, _ALL_FAILURES, {chapter.study: chapter.title for chapter in chapters}).values.tolist(),
    }


def words_for(results: Results) -> Words:
    """The words of a report on some results; one on kinds of the user's own names them."""
    manifests = results.manifests.values()
    if is_own(manifests):
        kinds = dict.fromkeys(str(manifest["kind"]).replace("_", " ") for manifest in manifests)
        return Words(title=f"Measurements of {_listed(list(kinds))}")
    return words_of(results.points)


def points_of(wholes: Sequence[Results]) -> int:
    """The number of points that were measured."""
    return sum(whole.points["key"].nunique() for whole in wholes)


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _first_words(wholes: Sequence[Results], claims: Sequence[ClaimResult]) -> tuple[str, str]:
    """The subtitle, and the summary: how much was measured where by which version, and how many claims have which verdict."""
    environments = [environment for whole in wholes for environment in whole.environments]
    devices = " and ".join(dict.fromkeys(one["processor" if one["device"] == "cpu" else "device"] for one in environments))
    count, versions = points_of(wholes), ", ".join(dict.fromkeys(one["numdev"] for one in environments))
    subtitle = f"numdev {versions}: {count} point{'s' * (count != 1)} on {devices}"
    head = f"{count} point{'s were' if count != 1 else ' was'} measured on {devices}."
    if not claims:
        return subtitle, head
    claims = list({(result.claim.text, result.word): result for result in claims}.values())  # one that two studies judge alike
    counted = Counter(result.word for result in claims)
    words = _listed([f"{count} {'is' if count == 1 else 'are'} {word}" for word, count in counted.most_common()])
    same = sum(result.everywhere for result in claims)
    verdicts = f"Of {len(claims)} {'claim' if len(claims) == 1 else 'claims'}, {words};"
    return subtitle, f"{head} {verdicts} {same} {'has' if same == 1 else 'have'} the same verdict in all scenarios."


def _findings(parts: Sequence[Part], markup: Markup) -> list[dict[str, str]]:
    """The first findings, each a heading and a sentence: those of the operation, or else the first claims.

    A further part that has findings has one of them.
    """
    first, *others = [list(_findings_of(part)) for part in parts]
    further = [own[0] for own in others if own]
    chief = [*first[: max(1, _MOST_FINDINGS - len(further))], *further][:_MOST_FINDINGS]
    return [{"heading": markup.plain(heading), "sentence": markup.plain(sentence)} for heading, sentence in chief]


def _findings_of(part: Part) -> Iterator[tuple[str, str]]:
    """Heading and sentence of each finding: by the operation's templates, or else the claims."""
    first = {one.claim.name: one for one in reversed(part.claims)}
    declared = {
        heading: _filled(first[name], text) for name, (heading, text) in words_for(part.results).findings.items() if name in first
    }
    known = [(heading, sentence) for heading, sentence in declared.items() if sentence]
    yield from known
    for result in part.claims if not known else ():
        figure = f"{result.main.title}: {result.findings[result.main].figure}"
        yield result.claim.text, f"{result.brief[0].upper()}{result.brief[1:]}. {figure}."


def _filled(result: ClaimResult, text: str) -> str:
    """A template with figures of a claim: `{main}` of its main scenario, else of the first with such words in its title."""
    figures = {}
    for key in (key for _, key, _, _ in Formatter().parse(text) if key):
        scenario = next((one for one in result.findings if key == "main" or key in one.title), None)
        if scenario is None or result.findings[scenario].figure in ("unknown", "not measured"):
            return ""
        figures[key] = result.findings[scenario].figure
    undecided = f" Undecided: “{result.claim.text}”." if result.word == Verdict.UNDECIDED.value else ""
    return text.format_map(figures) + undecided


def _claim(result: ClaimResult, markup: Markup) -> dict[str, Any]:
    """A claim with what is found in each scenario."""
    rest = Counter(finding.verdict.value for scenario, finding in result.findings.items() if scenario not in result.chief)
    plain = markup.plain
    findings = [
        {
            "title": plain(scenario.title),
            "role": ROLES[scenario.role],
            "chief": scenario in result.chief,
            "verdict": finding.verdict.value,
            "told": plain(finding.verdict_text),
            "p": plain(finding.verdict_text.partition(" (")[2].rstrip(")")),
            "figure": plain(finding.figure),
            "beside": f"{finding.beside.verdict.value}, {plain(finding.beside.figure)}" if finding.beside else "",
            "sentence": plain(finding.sentence),
        }
        for scenario, finding in result.findings.items()
    ]
    return {
        "text": plain(result.claim.text),
        "source": result.claim.source,
        "study": result.study,
        "word": result.word,
        "brief": result.brief,
        "tone": next((tone for start, tone in _TONES.items() if result.word.startswith(start)), "yes"),
        "verdict": plain(f"{result.claim.text}: {result.brief}."),
        "findings": findings,
        "elsewhere": ", ".join(f"{verdict} in {count}" for verdict, count in rest.items()),
    }


def _merged(judged: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Each claim once for the table, with what is measured in the scenarios that stand for its source.

    Two studies that judge one claim, such as the control of two figures, share a row; what is equal in them stands once.
    """
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for claim in judged:
        row = rows.setdefault((claim["text"], claim["source"]), {"text": claim["text"], "source": claim["source"], "chief": []})
        for finding in claim["findings"]:
            chief = {name: finding[name] for name in ("title", "role", "figure", "verdict")}
            if finding["chief"] and chief not in row["chief"]:
                row["chief"].append(chief)
        row["elsewhere"] = "; ".join(dict.fromkeys(filter(None, (row.get("elsewhere"), claim["elsewhere"]))))
    return list(rows.values())


def _section(chapter: Chapter, part: Part, markup: Markup, *, is_named: bool) -> dict[str, Any]:
    """A study: its words, figures, findings and tables; the words of a study that has no chapter here are plain text."""
    results, study = part.results, chapter.study
    own = [result for result in part.claims if result.study == study]
    sources = (_FIGURE.match(result.claim.source) for result in own if not result.claim.is_ours)  # what the section makes again
    by_claim = chapter.by_claim or len(own) > 1
    text = markup.chapter if is_named else markup.plain
    rows = results.study(study) if own else pd.DataFrame()
    words = words_of(results.points[results.points["study"] == study])
    claims, findings = [_claim(result, markup) for result in own], []
    for result, claim in zip(own, claims, strict=True):
        for i, (scenario, finding) in enumerate(zip(result.findings, claim["findings"], strict=True)):
            about = circumstances(rows if result.claim.across else of(rows, scenario), words)
            heading = claim["verdict"] if by_claim and i == 0 else ""
            further = {"about": markup.plain("; ".join(filter(None, (finding["role"], about)))), "claim": heading}
            findings.append(finding | further)
    return {
        "study": study,
        "title": chapter.title,
        "source": next((match[1] for match in sources if match), ""),
        "question": text(chapter.question),
        "measured": text(chapter.measured),
        "paper": text(chapter.paper),
        "claims": claims,
        "figures": [_figure(path, picture, markup) for path, picture in part.drawn(study).items()],
        "found": "" if by_claim else " ".join(markup.plain(result.findings[result.main].sentence) for result in own),
        "compact": not by_claim and not any(result.claim.across for result in own),
        "findings": findings,
        "tables": list(_tables(chapter, results, with_claims=bool(own))),
        "verdict": "" if by_claim else " ".join(claim["verdict"] for claim in claims),
        "command": command(results, study),
    }


def _tables(chapter: Chapter, results: Results, *, with_claims: bool) -> Iterator[dict[str, Any]]:
    """The runs of training; of a study without a claim its speed or the deviation of every point."""
    study = chapter.study
    if chapter.operation == TRAINING:
        if len(runs := run_table(results, study)):
            yield {"caption": f"{chapter.title}: the runs.", "columns": list(runs.columns), "rows": runs.values.tolist()}
        return
    if with_claims and not chapter.with_points:
        return
    timed = of_attention(frame(results))
    points = latest(timed[timed["study"] == study]) if len(timed) else timed
    if points.empty:
        points = points_table(results, study)
    points = points.drop(columns="study", errors="ignore")
    if len(points):
        yield {"caption": f"{chapter.title}: the points.", "columns": list(points.columns), "rows": points.values.tolist()}


def _figure(path: Path, picture: Picture, markup: Markup) -> dict[str, Any]:
    """An SVG with its width, its descriptions, and its title as the caption."""
    size = re.search(r'<svg[^>]*\bwidth="([\d.]+)pt" height="([\d.]+)pt"', path.read_text())
    width, height = (float(size[1]), float(size[2])) if size else (WIDEST, WIDEST)
    scale = min(1.0, WIDEST / width)
    return {
        "file": path.name,
        "width": scale * width,
        "height": scale * height,
        "alt": picture.alt,
        "caption": picture.caption or path.stem,
        "about": markup.plain(picture.about),
    }


def _headline(sections: Sequence[Mapping[str, Any]], names: Sequence[str]) -> dict[str, Any] | None:
    """The figure of the first page: the first of some names that is drawn and not too high, or else the first of all."""
    every = (figure for section in sections for figure in section["figures"])
    figures = {figure["file"]: figure for figure in every if figure["height"] <= _HIGHEST}
    return next((figures[name] for name in (*names, *figures) if name in figures), None)


def command(results: Results, study: str) -> str:
    """The command that measures a study again on the same kind of device; none of a kind that no command measures."""
    manifest = results.manifests[study]
    line = manifest.get("command") or ("" if is_own([manifest]) else f"numdev measure study={study}")
    if not line or "device=" in line:
        return line
    numbers = results.points["environment"][results.points["study"] == study].unique().tolist()
    devices = {"cpu" if results.environments[int(i)]["device"] == "cpu" else "cuda" for i in numbers}
    device = "".join(f" device={name}" for name in sorted(devices))
    return " && ".join(f"{each}{device}" for each in line.split(" && "))


def _metrics(parts: Sequence[Part]) -> Iterator[dict[str, Any]]:
    """A table for outputs, and one for every part that compares none: name, unit and definition of every figure that it has."""
    if any(part.deviates for part in parts):
        yield {"of": "outputs", "rows": [(name, unit, text) for name, (unit, text) in METRICS.items()]}
    for part in parts:
        if not part.deviates:
            columns = (column for name, column in part.results.columns.items() if name in part.results.primary)
            figures = [(own.name, own.unit, own.meaning) for own in columns if own.use in (Use.CHIEF, Use.FIGURE)]
            yield {"of": "weights" if part.results.kind == TRAINING else part.results.kind, "rows": figures}


def _environments(wholes: Sequence[Results]) -> Iterator[dict[str, Any]]:
    """Each environment once with the number of its points, as a column; those of the first results keep their numbers."""
    counts: dict[tuple[tuple[str, str], ...], int] = {}
    for whole in wholes:
        points = whole.points.drop_duplicates("key")
        for number, environment in enumerate(whole.environments):
            facts = tuple(environment.items())
            counts[facts] = counts.get(facts, 0) + int((points["environment"] == number).sum())
    columns = [(f"Environment {number}, {count} points", dict(facts)) for number, (facts, count) in enumerate(counts.items())]
    for some in (columns[start : start + _ABREAST] for start in range(0, len(columns), _ABREAST)):
        names = dict.fromkeys(name for _, facts in some for name in facts)
        rows = [[name, *(facts.get(name, "") for _, facts in some)] for name in names]
        yield {"titles": [title for title, _ in some], "facts": rows}
