"""What the measurements say of each claim in every scenario."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

from numdev.report.claims.claim import Claim
from numdev.report.claims.finding import Finding, Verdict, count, judged
from numdev.report.reading.frames import Results
from numdev.report.reading.scenarios import by_role, is_sources, of, shown_first
from numdev.report.reading.wording import generality
from numdev.results.manifest import Role, Scenario

_REPRODUCED, _BORNE_OUT = "reproduced", "borne out"  # of a source, and by the measurements alone


@dataclass(frozen=True)
class ClaimResult:
    """A claim judged in every scenario of one study.

    Attributes:
        claim: what was judged.
        study: on whose points.
        findings: by scenario, the source's own first.
        questions: how many its table asks, for all of which p-values are adjusted.
    """

    claim: Claim
    study: str
    findings: dict[Scenario, Finding]
    questions: int = 0

    @property
    def main(self) -> Scenario:
        """The scenario that comes first: the source's, where the study has it."""
        return next(iter(self.findings))

    @property
    def chief(self) -> list[Scenario]:
        """The scenarios that stand for the source: as it states them, or as we assume; every one, where none does."""
        return shown_first(self.findings)

    @property
    def word(self) -> str:
        """What the chief scenarios say of the claim: that it is reproduced, partly or not reproduced, undecided or not measured.

        Where it is ours, or no scenario stands for the source, there is nothing to reproduce: it is borne out or not. Scenarios
        in which nothing was measured do not count.
        """
        word = _BORNE_OUT if self.claim.is_ours or not is_sources(self.main) else _REPRODUCED
        found = {self.findings[scenario].verdict for scenario in self.chief} - {Verdict.NOT_MEASURED}
        if found <= {Verdict.UNDECIDED}:
            return (Verdict.UNDECIDED if found else Verdict.NOT_MEASURED).value
        if Verdict.HOLDS in found:
            return word if len(found) == 1 else f"partly {word}"
        return f"not {word}"

    @property
    def where(self) -> str:
        """The circumstances that `word` is about, if the source does not state them."""
        measured = (scenario for scenario in self.chief if self.findings[scenario].verdict is not Verdict.NOT_MEASURED)
        roles = {scenario.role for scenario in measured}
        return " under our assumption about the source's circumstances" if Role.ASSUMED in roles else ""

    @property
    def everywhere(self) -> bool:
        """Whether every scenario says the same."""
        return len({finding.verdict for finding in self.findings.values()}) == 1

    @property
    def overall(self) -> str:
        """`word`, and where scenarios differ, the verdict and figure of each."""
        parts = [self.word + self.where]
        for verdict, scenarios in self._rest().items():
            told = "; ".join(f"{scenario.title} ({self.findings[scenario].figure})" for scenario in scenarios)
            parts.append(f"{verdict.value.capitalize()} with {told}")
        return ". ".join(parts)

    @property
    def brief(self) -> str:
        """`word`, and where scenarios differ, the number of the others with each verdict."""
        counts = [f"{verdict.value} in {len(scenarios)}" for verdict, scenarios in self._rest().items()]
        return self.word + self.where + (f"; other scenarios: {', '.join(counts)}" if counts else "")

    def _rest(self) -> dict[Verdict, list[Scenario]]:
        """The scenarios that `word` does not cover, by verdict; none where all agree."""
        agree = len({self.findings[own].verdict for own in self.chief}) == 1
        told = [] if self.everywhere else [scenario for scenario in self.findings if not agree or scenario not in self.chief]
        found = {verdict: [scenario for scenario in told if self.findings[scenario].verdict is verdict] for verdict in Verdict}
        return {verdict: scenarios for verdict, scenarios in found.items() if scenarios}


def judge(claims: Mapping[str, Claim], results: Results) -> list[ClaimResult]:
    """Every claim that a study serves, in the order of the table, once per scenario of the study's manifest.

    All of them are one table: p-values are adjusted for the number of questions in it.
    """
    weighed = []
    for claim in claims.values():
        for name, manifest in results.manifests.items():
            if claim.name in manifest["claims"]:
                whole = {_whole(results, name): results.study(name, claim.table)}
                scenarios = whole if claim.across else by_scenario(results, name, claim.table)
                for scenario, rows in scenarios.items():
                    weighed.append((claim, name, scenario, claim.weigh(rows), generality(rows, claim.words)))
    findings = judged([evidence for *_, evidence, _ in weighed], [words for *_, words in weighed])
    asked = count(evidence for *_, evidence, _ in weighed)
    of_claim: dict[tuple[str, str], dict[Scenario, Finding]] = {}
    for (claim, study, scenario, *_), finding in zip(weighed, findings, strict=True):
        of_claim.setdefault((claim.name, study), {})[scenario] = finding
    return [ClaimResult(claims[name], study, own, asked) for (name, study), own in of_claim.items()]


def _whole(results: Results, study: str) -> Scenario:
    """All scenarios of a study as one, with the most cautious of their roles."""
    own = list(results.scenarios(study).values())
    role = max((scenario.role for scenario in own), key=list(Role).index, default=Role.BEYOND)
    title = str(results.manifests[study]["title"])
    overrides = results.manifests[study]["overrides"]
    return Scenario(study, f"{title}, with overrides: {' '.join(overrides)}" if overrides else title, role)


def by_scenario(results: Results, study: str, table: str = "") -> dict[Scenario, pd.DataFrame]:
    """A study's rows by scenario, the source's own first; one of which nothing is measured has none."""
    rows = results.study(study, table)
    return {scenario: of(rows, scenario) for scenario in by_role(results.scenarios(study).values())}


def note(claims: Sequence[ClaimResult]) -> str:
    """How to read the intervals and verdicts of some claims."""
    asked = list(dict.fromkeys(result.questions for result in claims)) or [0]
    counts = " and ".join(map(str, asked))
    of = f"all {counts} questions of this table" if len(asked) == 1 else f"all questions of their kind of measurement, {counts}"
    return (
        "Intervals are 95 % confidence intervals of one figure each. Verdicts are decided by p-values, below 0.05, that are "
        f"adjusted for {of} (Holm), so an interval alone may look more certain than its verdict. A claim in one scenario by one "
        "metric is one question. "
        "What the source of a claim leaves open is our assumption, and is marked as that."
    )


def unknown(claims: Mapping[str, Claim], manifests: Mapping[str, dict[str, Any]]) -> list[str]:
    """Notes on claims that studies list and that are not among these."""
    return [
        f"{study}: there is no claim {name}; there are {', '.join(claims)}"
        for study, manifest in manifests.items()
        for name in manifest["claims"]
        if name not in claims
    ]
