"""What the claims of a study may compare, by the kind of measurement that a command makes of its points."""

from __future__ import annotations

from numdev.cli import objective
from numdev.cli.claims import Comparable
from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.operation import Operation
from numdev.measurement.speed.measurement import Speeds
from numdev.results.record import Use


def comparable(program: str, operation: Operation) -> Comparable:
    """What there is to compare in the points of an operation as a command measures them."""
    if operation.golden is None:
        return _of_training()
    if program == "speed":
        return _of_speed(operation)
    return Comparable(objective.names(Deviations(operation)))


def _of_speed(operation: Operation) -> Comparable:
    """Figures of a call, and the deviations of the primary output, by their own names or with that of the output."""
    figures = objective.names(Speeds(operation))
    deviations = [name for name in figures if name in {one.rpartition(".")[2] for one in objective.names(Deviations(operation))}]
    lacks = "numdev speed measures each point by itself, and deviations from golden alone"
    return Comparable([*figures, *(f"{operation.primary}.{name}" for name in deviations)], (), lacks)


def _of_training() -> Comparable:
    """Differences of all weights from those of the reference after the last step, and what both runs have as a whole."""
    from numdev.training.weights import RUN, TABLES, WEIGHTS  # late: it imports every model

    figures = {name: [one.name for one in TABLES[name] if one.use in (Use.CHIEF, Use.FIGURE)] for name in (WEIGHTS, RUN)}
    both = [name for name in figures[RUN] if f"baseline_{name}" in figures[RUN]]
    lacks = "a study of training compares the weights of each run with those of its reference already"
    return Comparable([*figures[WEIGHTS], *both], both, lacks)
