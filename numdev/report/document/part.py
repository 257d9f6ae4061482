"""What a document has of one kind of measurement."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from numdev.measurement.deviation.measurement import KIND as DEVIATION
from numdev.report.claims.verdicts import ClaimResult
from numdev.report.reading.frames import Results
from numdev.report.reading.kinds import SHIPPED, SPEED
from numdev.report.reading.training import KIND as TRAINING


@dataclass(frozen=True)
class Part:
    """The results of one kind of measurement, what they say of claims, and their figures.

    Attributes:
        results: of one kind.
        claims: judged on them, all in one table: p-values are adjusted within a part.
        figures: the folder of their figures in SVG.
    """

    results: Results
    claims: Sequence[ClaimResult]
    figures: Path

    @property
    def kind(self) -> str:
        """The kind of measurement."""
        return str(next(iter(self.results.manifests.values()))["kind"])

    @property
    def is_of_training(self) -> bool:
        """Whether the rows are differences of weights, which have metrics of their own."""
        return self.kind == TRAINING

    @property
    def is_own(self) -> bool:
        """Whether the kind is one of the user's own, of which only its columns tell."""
        return self.kind not in SHIPPED

    @property
    def deviates(self) -> bool:
        """Whether the rows are deviations of outputs."""
        return self.kind in (DEVIATION, SPEED)

    def drawn(self) -> dict[str, Path]:
        """The figures of the part's own studies, by the names of their files."""
        paths = sorted(self.figures.glob("*.svg"))
        return {path.name: path for path in paths if path.stem.startswith(tuple(self.results.manifests))}


def wholes(parts: Iterable[Part]) -> list[Results]:
    """The results of every part."""
    return [part.results for part in parts]


def all_claims(parts: Iterable[Part]) -> list[ClaimResult]:
    """The claims of every part, in the order of the parts."""
    return [claim for part in parts for claim in part.claims]
