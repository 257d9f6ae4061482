"""The content of a report as plain data without markup: Jinja makes a page of it, and Typst a PDF."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from string import Formatter
from typing import Any

import pandas as pd

from numdev.measurement.deviation import KIND as DEVIATION
from numdev.measurement.metrics import METRICS
from numdev.report.claims.verdicts import ClaimResult, Verdict, note, rules
from numdev.report.document.figures import Picture
from numdev.report.document.tables import bad_outputs, failures, points_table
from numdev.report.reading.frames import ROLES, SHIPPED, SPEED, TRAINING, Results, is_own, of_scenario
from numdev.report.reading.wording import Words, circumstances
from numdev.report.studies.registry import CHAPTERS, WORDS, Chapter, chapter_of, words_of
from numdev.report.studies.speed import latest, of_attention
from numdev.report.studies.training import run_table
from numdev.results.record import Use

_MOST_FINDINGS = 3
_TONES = {"partly": "partly", "not ": "no", "undecided": "open"}  # by the start of a verdict: the class of its badge
_FIGURE = re.compile(r"Golden et al\. 2024, .*?(Figure \w+)")


@dataclass(frozen=True)
class Part:
    """The part of a report about one kind of measurement."""

    results: Results  # of one kind
    claims: Sequence[ClaimResult] = ()  # judged on them, all in one table: p-values are adjusted within a part
    figures: Mapping[str, Sequence[Picture]] = field(default_factory=dict)  # that were drawn, by study

    @property
    def is_own(self) -> bool:
        """Whether the kind is one of the user's own, of which only its columns tell."""
        return self.results.kind not in SHIPPED

    @property
    def deviates(self) -> bool:
        """Whether the rows are deviations of outputs."""
        return self.results.kind in (DEVIATION, SPEED)

    @property
    def pictures(self) -> list[Picture]:
        """The figures of all studies."""
        return [picture for own in self.figures.values() for picture in own]


def context(parts: Sequence[Part], title: str = "", author: str = "") -> dict[str, Any]:
    """Everything that a document on some parts shows; its first findings are those of the first part, and so is its title."""
    wholes = [part.results for part in parts]
    part_of = {name: part for part in parts for name in part.results.manifests}
    shipped = [part for part in parts if not part.is_own]
    operations = pd.unique(pd.concat([part.results.points["operation"] for part in shipped])) if shipped else []
    known = [chapter for chapter in CHAPTERS if chapter.operation in operations]
    named = [chapter for chapter in known if chapter.study in part_of]
    as_shipped = [name for name in (own.study for own in named) if not part_of[name].results.manifests[name]["overrides"]]
    missing = [name for name in part_of if name not in {chapter.study for chapter in named}]
    chapters = [*named, *(chapter_of(part_of[name].results, name) for name in missing)]
    claims = [claim for part in parts for claim in _claims(part)]
    sections = [_section(chapter, part_of[chapter.study], claims) | {"shipped": chapter in named} for chapter in chapters]
    sections.sort(key=lambda section: not section["source"])
    figures = {figure["file"]: figure for section in sections for figure in section["figures"]}
    own, words = [words for words in map(WORDS.get, operations) if words], words_for(parts[0].results)
    judged = [result for part in parts for result in part.claims]
    return _first_words(wholes, judged) | {
        "title": title or words.title,
        "author": author,
        "bad": " ".join(filter(None, map(bad_outputs, wholes))),
        "highlights": _findings(parts),
        "reading": note(judged),
        "claims": claims,
        "headline": next((figures[name] for name in (*words.headlines, *figures) if name in figures), None),
        "absent": [chapter.title for chapter in known if chapter not in named] if len(as_shipped) > 1 else [],
        "sections": sections,
        "methods": [words.methods for words in own if words.methods],
        "rules": [list(rule) for rule in dict.fromkeys((*rules(), *(rule for words in own for rule in words.rules)))],
        "compares": bool(shipped),
        "deviates": any(part.deviates for part in parts),
        "metrics": list(_metrics(parts)),
        "environments": list(_environments(wholes)),
        "failures": failures(wholes, {chapter.study: chapter.title for chapter in chapters}).values.tolist(),
    }


def words_for(results: Results) -> Words:
    """The words of a report on some results; one on kinds of the user's own names them."""
    manifests = results.manifests.values()
    if is_own(manifests):
        kinds = dict.fromkeys(str(manifest["kind"]).replace("_", " ") for manifest in manifests)
        return Words(title=f"Measurements of {_listed(list(kinds))}")
    return words_of(results.points)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}"


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _first_words(wholes: Sequence[Results], claims: Sequence[ClaimResult]) -> dict[str, Any]:
    """How much was measured where by which version, and how many claims have which verdict: in counts and in sentences."""
    environments = [environment for whole in wholes for environment in whole.environments]
    devices = " and ".join(dict.fromkeys(one["processor" if one["device"] == "cpu" else "device"] for one in environments))
    count, versions = sum(whole.points["key"].nunique() for whole in wholes), dict.fromkeys(one["numdev"] for one in environments)
    different = {(result.claim.text, result.word): result for result in claims}.values()  # two studies may judge one alike
    words = Counter(result.word for result in different).most_common()
    subtitle = f"numdev {', '.join(versions)}: {count} point{'s' * (count != 1)} on {devices}"
    summary = f"{count} point{'s were' if count != 1 else ' was'} measured on {devices}."
    if claims:
        verdicts = _listed([f"{count} {'is' if count == 1 else 'are'} {word}" for word, count in words])
        same, number = sum(result.everywhere for result in different), len(different)
        summary += f" Of {number} {'claim' if number == 1 else 'claims'}, {verdicts};"
        summary += f" {same} {'has' if same == 1 else 'have'} the same verdict in all scenarios."
    return {"subtitle": subtitle, "summary": summary, "points": count, "verdicts": words}


def _findings(parts: Sequence[Part]) -> list[dict[str, str]]:
    """The first findings, each a heading and a sentence: those of the first part, and one of each further part that has any."""
    first, *others = [list(_findings_of(part)) for part in parts]
    further = [own[0] for own in others if own]
    chief = [*first[: max(1, _MOST_FINDINGS - len(further))], *further][:_MOST_FINDINGS]
    return [{"heading": heading, "sentence": sentence} for heading, sentence in chief]


def _findings_of(part: Part) -> list[tuple[str, str]]:
    """Heading and sentence of each finding: by the operation's templates, or else the claims."""
    first = {one.claim.name: one for one in reversed(part.claims)}
    templates = words_for(part.results).findings.items()
    declared = [(heading, _filled(first[name], text)) for name, (heading, text) in templates if name in first]
    of_claims = (
        (one.claim.text, f"{_sentence(one.brief)}. {_sentence(one.main.title)}: {one.findings[one.main].figure}.")
        for one in part.claims
    )
    return [(heading, text) for heading, text in declared if text] or list(of_claims)


def _filled(result: ClaimResult, text: str) -> str:
    """A template with figures of a claim: `{main}` of its main scenario, else of the first with such words in its title."""
    figures = {}
    for key in (key for _, key, _, _ in Formatter().parse(text) if key):
        figures[key] = next((one.figure for own, one in result.findings.items() if key == "main" or key in own.title), "unknown")
        if figures[key] in ("unknown", "not measured"):
            return ""
    undecided = f" Undecided: “{result.claim.text}”." if result.word.startswith(Verdict.UNDECIDED.value) else ""
    return text.format_map(figures) + undecided


def _claims(part: Part) -> Iterator[dict[str, Any]]:
    """Each claim of a part with what is found in each scenario; figures and sentences say all that claims.csv has."""
    rows_of = {study: part.results.study(study) for study in {result.study for result in part.claims}}
    for result in part.claims:
        rows, words = rows_of[result.study], words_of(part.results.points[part.results.points["study"] == result.study])
        findings = [
            {
                "title": scenario.title,
                "role": ROLES[scenario.role],
                "chief": scenario in result.chief,
                "verdict": finding.verdict.value,
                "p": finding.verdict_text.partition(" (")[2].rstrip(")"),
                "figure": finding.figure,
                "beside": f"{finding.beside.verdict.value}, {finding.beside.figure}" if finding.beside else "",
                "sentence": finding.sentence,
                "about": circumstances(rows if result.claim.across else of_scenario(rows, scenario), words),
            }
            for scenario, finding in result.findings.items()
        ]
        rest = Counter(finding["verdict"] for finding in findings if not finding["chief"])
        figure = None if result.claim.is_ours else _FIGURE.match(result.claim.source)
        yield {
            "text": result.claim.text,
            "source": result.source,
            "figure": figure[1] if figure else "",  # of the source, which the study makes again
            "study": result.study,
            "across": result.claim.across,
            "word": result.word,
            "brief": result.brief,
            "tone": next((tone for start, tone in _TONES.items() if result.word.startswith(start)), "yes"),
            "findings": findings,
            "elsewhere": ", ".join(f"{verdict} in {count}" for verdict, count in rest.items()),
        }


def _section(chapter: Chapter, part: Part, claims: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """A study: its words, figures, claims and tables."""
    results, study = part.results, chapter.study
    own = [claim for claim in claims if claim["study"] == study]
    by_claim = chapter.by_claim or len(own) > 1
    return {
        "study": study,
        "title": chapter.title,
        "source": next((claim["figure"] for claim in own if claim["figure"]), ""),
        "question": chapter.question,
        "measured": chapter.measured,
        "paper": chapter.paper,
        "claims": own,
        "by_claim": by_claim,
        "compact": not by_claim and not any(claim["across"] for claim in own),
        "figures": [
            {"file": one.svg.name, "alt": one.alt, "caption": one.caption, "about": one.about}
            for one in part.figures.get(study, ())
        ],
        "tables": list(_tables(chapter, results, with_claims=bool(own))),
        "command": command(results, study),
    }


def _tables(chapter: Chapter, results: Results, *, with_claims: bool) -> Iterator[dict[str, Any]]:
    """The runs of training; of a study without a claim its speed or the deviation of every point."""
    study, timed = chapter.study, of_attention(results, chapter.study)
    if chapter.operation == TRAINING:
        name, table = "runs", run_table(results, study)
    elif with_claims and not chapter.with_points:
        return
    elif len(timed):
        name, table = "points", latest(timed).drop(columns="study")
    else:
        name, table = "points", points_table(results, study)
    if len(table):
        yield {"caption": f"{chapter.title}: the {name}.", "columns": list(table.columns), "rows": table.values.tolist()}


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
    """Each environment once, with the number of its points; those of the first results keep their numbers."""
    counts = Counter[tuple[tuple[str, str], ...]]()
    for whole in wholes:
        numbers = whole.points.drop_duplicates("key")["environment"].value_counts()
        counts.update({tuple(facts.items()): int(numbers.get(number, 0)) for number, facts in enumerate(whole.environments)})
    for number, (facts, count) in enumerate(counts.items()):
        yield {"title": f"Environment {number}, {count} points", "facts": facts}
