"""The table of claims, and what the measurements say of each in every setting."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pandas as pd

from numdev.report import evidence, evidence_fa3, evidence_kernels
from numdev.report.finding import Finding, Undecidable, Verdict
from numdev.report.frames import Results
from numdev.report.settings import is_papers, ordered

GOLDEN = "Golden et al. 2024"
FA3 = "Shah et al. 2024 (FlashAttention-3)"


@dataclass(frozen=True)
class Claim:
    """One sentence of a paper that measurements can bear out or not.

    Attributes:
        name: as a study's manifest lists it.
        figure: the figure that shows it.
        text: the claim.
        source: where it is made.
        test: judges it on the rows of one setting.
        across: whether the settings are the methods that the claim compares, so that it is judged once, on all of them.
    """

    name: str
    figure: str
    text: str
    source: str
    test: Callable[[pd.DataFrame], Finding]
    across: bool = False

    def find(self, rows: pd.DataFrame) -> Finding:
        """The finding on the rows of one setting; undecided, with the reason, if they cannot answer."""
        try:
            return self.test(rows)
        except Undecidable as reason:
            return Finding(Verdict.UNDECIDED, "unknown", f"{str(reason)[:1].upper()}{str(reason)[1:]}.")


_CLAIMS = (
    Claim(
        "fig3",
        "fig3",
        "The deviation between tiled attention and the baseline falls from BF16 over FP16 and FP32 to FP64",
        f"{GOLDEN}, section IV.A, Figure 3",
        evidence.fig3,
    ),
    Claim(
        "fig4",
        "fig4",
        "At BF16 tiled attention deviates about 10 times as much from golden as the baseline",
        f"{GOLDEN}, section IV.A, Figure 4",
        evidence.fig4,
    ),
    Claim(
        "fig5a",
        "fig5a",
        "The max difference grows with the sequence length N at a fixed tile",
        f"{GOLDEN}, section IV.A, Figure 5a",
        evidence.fig5a,
    ),
    Claim(
        "fig5b",
        "fig5b",
        "Mean and standard deviation of the difference grow with N at a fixed tile",
        f"{GOLDEN}, section IV.A, Figure 5b",
        evidence.fig5b,
    ),
    Claim(
        "long",
        "parting",
        "The max difference from golden is larger the larger N, beyond the lengths of Figure 5a",
        f"{GOLDEN}, section IV.A, Figure 5a, carried on",
        evidence.long,
    ),
    Claim(
        "fig6a",
        "fig6a",
        "Swapping Br and Bc makes the difference larger",
        f"{GOLDEN}, section IV.B, Figure 6a",
        evidence.fig6a,
    ),
    Claim(
        "fig6b",
        "fig6b",
        "Square tiles make no significant difference",
        f"{GOLDEN}, section IV.B, Figure 6b",
        evidence.fig6b,
    ),
    Claim(
        "fig6c",
        "fig6c",
        "Larger tiles make the difference smaller",
        f"{GOLDEN}, section IV.B, Figure 6c",
        evidence.fig6c,
    ),
    Claim(
        "fa3_table3",
        "fa3_table3",
        "RMSE of FlashAttention-2 and -3 and of their baselines, in size and order",
        f"{FA3}, Table 3",
        evidence_fa3.fa3_table3,
        across=True,
    ),
    Claim(
        "sign",
        "sign",
        "Tiled attention is worse than the baseline with every step in the format, and better with FP32 inside",
        f"{GOLDEN}, Figure 4, against {FA3}, section 4.3",
        evidence_fa3.sign,
    ),
    Claim(
        "validate",
        "validate",
        "The microbenchmark, a tiled emulation in pure tensors, agrees with the original kernel",
        f"{GOLDEN}, section III",
        evidence_kernels.validate,
    ),
    Claim(
        "kernels",
        "kernels",
        "Production kernels deviate as FP32 inside does, kernel(F), not as every step in the format, uniform(F)",
        f"{FA3}, section 4.3",
        evidence_kernels.inside,
    ),
)
_WORDS = {Verdict.HOLDS: "reproduced", Verdict.FAILS: "not reproduced", Verdict.UNDECIDED: "undecided"}
CLAIMS: dict[str, Claim] = {claim.name: claim for claim in _CLAIMS}


@dataclass(frozen=True)
class ClaimResult:
    """A claim judged in every setting of one study.

    Attributes:
        claim: what was judged.
        study: on whose points.
        findings: by setting, the paper's own first.
    """

    claim: Claim
    study: str
    findings: dict[str, Finding]

    @property
    def main(self) -> str:
        """The setting that comes first: the paper's, where the study has it."""
        return next(iter(self.findings))

    @property
    def papers(self) -> list[str]:
        """The settings that are the paper's own; every one, in a study that has none such."""
        return [name for name in self.findings if is_papers(name)] or list(self.findings)

    @property
    def word(self) -> str:
        """What is said of the claim by the paper's own settings: reproduced, partly or not reproduced, or undecided."""
        found = {self.findings[name].verdict for name in self.papers}
        if len(found) == 1:
            return _WORDS[found.pop()]
        return "partly reproduced" if Verdict.HOLDS in found else "not reproduced"

    @property
    def everywhere(self) -> bool:
        """Whether every setting says the same."""
        return len({finding.verdict for finding in self.findings.values()}) == 1

    @property
    def overall(self) -> str:
        """`word`, and where the settings differ, what each of them says, with the figures."""
        return self._overall(lambda setting: f"{setting} ({self.findings[setting].figure})")

    @property
    def brief(self) -> str:
        """`overall` without the figures."""
        return self._overall(str)

    def _overall(self, name: Callable[[str], str]) -> str:
        if self.everywhere:
            return self.word
        agree = len({self.findings[own].verdict for own in self.papers}) == 1
        told = [setting for setting in self.findings if not agree or setting not in self.papers]
        rest = []
        for verdict in Verdict:
            if names := [name(setting) for setting in self._with(verdict) if setting in told]:
                rest.append(f"{verdict.value} when {', '.join(names)}")
        where = " in the paper's settings" if agree else ""
        return "; ".join([self.word + where, *rest])

    def _with(self, verdict: Verdict) -> list[str]:
        return [name for name, finding in self.findings.items() if finding.verdict is verdict]


def judge(results: Results) -> list[ClaimResult]:
    """Every claim that a study serves, in the order of the table, once per setting of the study's manifest."""
    found = []
    for claim in CLAIMS.values():
        for name, manifest in results.manifests.items():
            if claim.name in manifest["claims"]:
                settings = {name: results.study(name)} if claim.across else by_setting(results, name)
                findings = {setting: claim.find(rows) for setting, rows in settings.items()}
                if findings:
                    found.append(ClaimResult(claim, name, findings))
    return found


def by_setting(results: Results, study: str) -> dict[str, pd.DataFrame]:
    """A study's rows by setting, the paper's own first; a setting of which nothing is measured has none."""
    rows = results.study(study)
    settings = ordered(point["setting"] for point in results.manifests[study]["points"])
    return {setting: rows[rows["setting"] == setting] for setting in settings}


def unknown(manifests: dict[str, dict[str, Any]]) -> list[str]:
    """Notes on claims that studies list and this table does not have."""
    return [
        f"{study}: there is no claim {name}; there are {', '.join(CLAIMS)}"
        for study, manifest in manifests.items()
        for name in manifest["claims"]
        if name not in CLAIMS
    ]
