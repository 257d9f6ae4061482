"""From a configuration to a point: what is measured, on what, and against what, of any operation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, get_type_hints, runtime_checkable

from numdev.cli import honoured, nodes
from numdev.cli.compose import Request
from numdev.errors import BadInput
from numdev.results.study import Refused, StudyPoint


@runtime_checkable
class Rule(Protocol):
    """A baseline that follows from what is measured: a node of `baseline` may make one in place of the baseline itself."""

    def of(self, variant: Any, problem: Any) -> Any:
        """The baseline of a variant on a problem; None for none."""
        ...


@dataclass(frozen=True)
class NoBaseline:
    """The baseline of a node that says there is none: the variant is compared with golden alone."""

    def of(self, variant: Any, problem: Any) -> None:
        """No baseline."""


def point(request: Request, scenario: str = "default", labels: Mapping[str, Any] | None = None) -> StudyPoint:
    """The point of a whole configuration.

    Raises:
        BadInput: naming the setting as the command line does.
        NotHonoured: if a setting is stated that nothing of what would be measured reads.
    """
    honoured.check(request)
    config = request.config
    variant, problem = nodes.build(config, "variant"), nodes.build(config, "problem")
    honoured.check_built(request, variant, problem)
    baseline = nodes.build(config, "baseline")
    if isinstance(baseline, Rule):
        if not isinstance(problem, _problem_of(type(baseline).of)):
            mend = f"it is not a baseline for problems of {type(problem).__module__}; choose one of the operation"
            raise BadInput("baseline", request.options.get("baseline", type(baseline).__name__), mend)
        baseline = baseline.of(variant, problem)
    honoured.check_effective(request, baseline, problem)
    return StudyPoint(problem, variant, baseline, problem.replicates(_seeds(config)), scenario, dict(labels or {}))


@lru_cache(maxsize=64)
def _problem_of(rule: Callable[..., Any]) -> type:
    """The class of the problems that a rule is written for, as it is annotated: options of every operation lie in one group."""
    try:
        kind = get_type_hints(rule).get("problem")
    except NameError:  # the annotation is for a type checker alone
        return object
    return kind if isinstance(kind, type) and kind is not Any else object


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
