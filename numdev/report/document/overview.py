"""The parts of a report that cover all of its results, as plain data: the first page and the last ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from numdev.report.claims.finding import Verdict
from numdev.report.claims.verdicts import ClaimResult, note
from numdev.report.document.part import Part
from numdev.report.document.tables import MOST_FAILURES, place
from numdev.report.document.typeset import escaped, typeset
from numdev.report.reading.frames import Results
from numdev.report.reading.kinds import is_own
from numdev.report.reading.scenarios import ROLES
from numdev.report.reading.words import Words
from numdev.report.studies.registry import words_of
from numdev.results.record import points_by_kernel

_MOST_FINDINGS = 3


def subtitle(wholes: Sequence[Results]) -> str:
    """The version, the number of points and the devices."""
    versions = dict.fromkeys(environment["numdev"] for whole in wholes for environment in whole.environments)
    count = _points(wholes)
    return f"numdev {', '.join(versions)}: {count} point{'s' * (count != 1)} on {_devices(wholes)}"


def words_for(results: Results) -> Words:
    """The words of a report on some results; one on kinds of the user's own names them."""
    manifests = results.manifests.values()
    if is_own(manifests):
        kinds = dict.fromkeys(str(manifest["kind"]).replace("_", " ") for manifest in manifests)
        return Words(title=f"Measurements of {_listed(list(kinds))}")
    return words_of(results.points)


def findings(parts: Sequence[Part]) -> list[dict[str, str]]:
    """The first findings, each a heading and a sentence: those of the operation, or else the first claims.

    A further part that has findings has one of them.
    """
    first, *others = [_told(part) for part in parts]
    further = [told[0] for told in others if told]
    shown = [*first[: max(1, _MOST_FINDINGS - len(further))], *further][:_MOST_FINDINGS]
    return [{"heading": typeset(heading), "sentence": typeset(sentence)} for heading, sentence in shown]


def _told(part: Part) -> list[tuple[str, str]]:
    found = words_for(part.results).findings(part.results)
    told = [(heading, sentence + _undecided(part, claims)) for heading, sentence, claims in found]
    return told or [(result.claim.text, _found(result)) for result in part.claims]


def _undecided(part: Part, claims: Sequence[str]) -> str:
    """A sentence on those of some claims that are undecided, or nothing."""
    texts = [f"“{one.claim.text}”" for one in part.claims if one.claim.name in claims and one.word == Verdict.UNDECIDED.value]
    return f" Undecided: {', '.join(dict.fromkeys(texts))}." if texts else ""


def _found(result: ClaimResult) -> str:
    word = result.brief
    return f"{word[0].upper()}{word[1:]}. {result.main.title}: {result.findings[result.main].figure}."


def _points(wholes: Sequence[Results]) -> int:
    return sum(whole.points["key"].nunique() for whole in wholes)


def _devices(wholes: Sequence[Results]) -> str:
    return " and ".join(dict.fromkeys(_device(environment) for whole in wholes for environment in whole.environments))


def summary(wholes: Sequence[Results], claims: Sequence[ClaimResult]) -> str:
    """How much was measured where, and how many claims have which verdict, in Typst markup."""
    count = _points(wholes)
    head = f"{count} point{'s were' if count != 1 else ' was'} measured on {escaped(_devices(wholes))}."
    if not claims:
        return head
    claims = list({(result.claim.text, result.word): result for result in claims}.values())  # one that two studies judge alike
    counted = Counter(result.word for result in claims)
    words = [f"{count} {'is' if count == 1 else 'are'} {word}" for word, count in counted.most_common()]
    same = sum(result.everywhere for result in claims)
    seen = f"Of {len(claims)} {'claim' if len(claims) == 1 else 'claims'}, {_listed(words)};"
    rest = f"{same} {'has' if same == 1 else 'have'} the same verdict in all scenarios."
    return f"{head} {seen} {rest}"


def compiled_code(wholes: Sequence[Results]) -> str:
    """How many points ran by compiled code of numdev, as plain text; empty where none did."""
    known = [whole.points.drop_duplicates("key") for whole in wholes if "kernel" in whole.points]
    counted = points_by_kernel(kernel for points in known for kernel in points["kernel"].fillna(""))
    if not counted:
        return ""
    ran = _listed([f"{count} ran by {kernel}" for kernel, count in counted.items()])
    return f"Of {_points(wholes)} points {ran}, as the column kernel of the tables says."


def reading(claims: Sequence[ClaimResult]) -> str:
    """How to read the table of claims, in Typst markup."""
    return escaped(note(list(claims)))


def _listed(words: Sequence[str]) -> str:
    return " and ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _device(environment: Mapping[str, str]) -> str:
    return environment["processor"] if environment["device"] == "cpu" else environment["device"]


def claims(results: Sequence[ClaimResult]) -> Iterator[dict[str, Any]]:
    """Each claim once for the table, with what is measured in the scenarios that stand for its source.

    Two studies that judge one claim, such as the control of two figures, share a row; what is equal in them stands once.
    """
    shared: dict[tuple[str, str], dict[str, Any]] = {}
    for result in results:
        own = _claim(result)
        row = shared.setdefault((result.claim.text, result.claim.source), own)
        if row is not own:
            row["chief"] += [chief for chief in own["chief"] if chief not in row["chief"]]
            row["elsewhere"] = "; ".join(dict.fromkeys(filter(None, (row["elsewhere"], own["elsewhere"]))))
    yield from shared.values()


def _claim(result: ClaimResult) -> dict[str, Any]:
    chief = [
        {
            "title": typeset(scenario.title),
            "role": ROLES[scenario.role],
            "figure": typeset(result.findings[scenario].figure),
            "verdict": result.findings[scenario].verdict.value,
        }
        for scenario in result.chief
    ]
    rest = Counter(finding.verdict.value for scenario, finding in result.findings.items() if scenario not in result.chief)
    elsewhere = ", ".join(f"{verdict} in {count}" for verdict, count in rest.items())
    return {"text": typeset(result.claim.text), "source": result.claim.source, "chief": chief, "elsewhere": elsewhere}


_ABREAST = 3
"""Environments that one table has beside one another."""


def environments(wholes: Sequence[Results]) -> Iterator[dict[str, Any]]:
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


def failures(wholes: Sequence[Results], titles: Mapping[str, str]) -> Iterator[list[str]]:
    """Study, point, status and reason of each point that failed; studies by their titles."""
    count = 0
    for whole in wholes:
        failed = whole.points[whole.points["status"] != "ok"]
        for _, point in failed[: max(0, MOST_FAILURES - count)].iterrows():
            yield [titles[point["study"]], place(point), point["status"], point["reason"]]
        count += len(failed)
    if count > MOST_FAILURES:
        yield ["", f"and {count - MOST_FAILURES} more", "", "in points.csv and unsupported.csv"]
