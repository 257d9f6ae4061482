"""From a configuration to a point: what is measured, on what, and against what, of any operation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from numdev.cli import honoured, nodes
from numdev.cli.requests import Request
from numdev.errors import BadInput
from numdev.results.study import Refused, StudyPoint


@runtime_checkable
class Rule(Protocol):
    """A baseline that follows from what is measured: a node of `baseline` may make one in place of the baseline itself."""

    def of(self, variant: Any, problem: Any) -> Any:
        """The baseline of a variant on a problem; None for none."""
        ...


class NoBaseline:
    """The baseline of a node that says there is none: the variant is compared with golden alone."""

    def of(self, variant: Any, problem: Any) -> None:
        """No baseline."""


def point(
    request: Request, scenario: str = "default", labels: Mapping[str, Any] | None = None, made: nodes.Made | None = None
) -> StudyPoint:
    """What a whole configuration asks for; points that are built with one `made` share the objects of equal nodes.

    Raises:
        BadInput: naming the setting as the command line does.
        NotHonoured: if a setting is stated that nothing of what would be measured reads.
    """
    honoured.check(request)
    config, made = request.config, nodes.Made() if made is None else made
    variant, problem = nodes.build(config, "variant", made), nodes.build(config, "problem", made)
    honoured.check_built(request, variant)
    baseline = nodes.build(config, "baseline", made)
    against = baseline.of(variant, problem) if nodes.satisfies(baseline, Rule) else baseline
    return StudyPoint(problem, variant, against, problem.replicates(_seeds(config)), scenario, dict(labels or {}))


def refused_point(request: Request, scenario: str, labels: Mapping[str, Any], reason: str) -> StudyPoint:
    """The place of a point that cannot be measured as it is stated."""
    config = request.config
    places = (f"{name}={label}" for name, label in labels.items())
    foreign = (f"{error.field}={error.value}" for error in request.foreign)
    stated = " ".join(dict.fromkeys([*map(str, request.said.values()), *foreign, *places]))
    variant = Refused(honoured.kind_of(request).rpartition("=")[2], stated)
    problem = nodes.build(config, "problem")
    return StudyPoint(problem, variant, None, problem.replicates(_seeds(config)), scenario, dict(labels), reason)


def _seeds(config: Mapping[str, Any]) -> int | None:
    seeds: int | None = config["seeds"]
    if seeds is not None and seeds < 1:
        raise BadInput("seeds", seeds, "give the number of replicates, at least 1")
    return seeds
