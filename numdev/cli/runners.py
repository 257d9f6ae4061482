"""The runner that measures the points of a command, on the operation of the configuration, and the figures of its records."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig

from numdev.cli import build
from numdev.cli.compose import OPERATION, plain
from numdev.errors import BadInput, one_of
from numdev.measurement.deviation import KIND, Deviations
from numdev.measurement.operation import Operation
from numdev.measurement.runner import Kind, Runner
from numdev.measurement.speed import FOLLOWING, Budget, Speeds, derived
from numdev.results.record import Record, Status, Use


def runner(command: str, cfg: DictConfig, node: Mapping[str, Any] | None = None) -> Runner:
    """The runner of a command, on the device of the configuration; arguments and errors as those of `kind`.

    It is kept, so that golden results serve the next job of a sweep too.
    """
    of_kind: Any = kind(command, cfg, node)  # a frozen dataclass, which its base does not say
    return _runner(of_kind, cfg.device)


@lru_cache(maxsize=2)
def _runner(of_kind: Any, device: str) -> Runner:
    return Runner(of_kind, device)


def kind(command: str, cfg: DictConfig, node: Mapping[str, Any] | None = None) -> Kind:
    """The kind of measurement of a command.

    Args:
        command: `speed` times, `train` trains; every other one measures deviations.
        cfg: the composed configuration.
        node: that of the operation, where it is another than the configuration's.

    Raises:
        BadInput: for a device that is not there, for an operation that is none, and for one that another command measures.
    """
    operation = operation_of(node if node is not None or cfg.operation is None else plain(cfg.operation, resolve=True))
    if (command == "train") is (operation.golden is not None):
        hint = f"numdev train compares runs of training; numdev measure measures {operation.name}"
        if operation.golden is None:
            hint = "it has no exact result, its runs are compared with one another; use numdev train"
        raise BadInput(OPERATION, operation.name, hint)
    if command == "train":
        from numdev.training.weights import WeightsOverTraining  # late: it imports every attention and every model

        return WeightsOverTraining(operation)
    if command != "speed":
        return Deviations(operation)
    return Speeds(operation, Budget(cfg.timing.seconds, cfg.timing.least, cfg.timing.most))


def operation_of(node: Mapping[str, Any] | None) -> Operation:
    """The operation that a node makes; once for each node.

    Raises:
        BadInput: if it makes none.
    """
    return _operation(json.dumps(node))


@lru_cache(maxsize=4)
def _operation(text: str) -> Operation:
    node = json.loads(text)
    operation = build.node({OPERATION: node}, OPERATION)
    if isinstance(operation, Operation):
        return operation
    raise BadInput(OPERATION, node, "it makes no numdev.measurement.operation.Operation; give operation=NAME, an option")


def figures(kind: Kind) -> list[str]:
    """The figures of a kind of measurement: each as `output.figure` where it compares every output, else by its own name."""
    table = next(iter(kind.columns.values()))
    own = [column.name for column in table if column.use in (Use.CHIEF, Use.FIGURE) and column.unit]
    own += FOLLOWING if any(column.name == "latency" for column in table) else []
    outputs = kind.operation.output_names if kind.name == KIND else ()
    return [f"{output}.{name}" for output in outputs for name in own] if outputs else own


def comparable(program: str, operation: Operation) -> list[str]:
    """The columns that the claims and the plot of a study may name, of points of an operation as a command measures them."""
    if operation.golden is None:
        from numdev.training.weights import RUN, TABLES, WEIGHTS  # late: it imports every model

        of_tables = [[one.name for one in TABLES[name] if one.use in (Use.CHIEF, Use.FIGURE)] for name in (WEIGHTS, RUN)]
        return [*of_tables[0], *(name for name in of_tables[1] if f"baseline_{name}" in of_tables[1])]
    deviations = figures(Deviations(operation))
    if program != "speed":
        return deviations
    of_speed, of_outputs = figures(Speeds(operation)), {name.rpartition(".")[2] for name in deviations}
    return [*of_speed, *(f"{operation.primary}.{name}" for name in of_speed if name in of_outputs)]


def refuse_objective(text: str | None, kind: Kind) -> None:
    """Raise BadInput before anything is measured where there is no such figure to minimise."""
    if text is not None and text not in (known := figures(kind)):
        raise BadInput("objective", text, one_of(text, known, most=12))


def objective(text: str | None, record: Record) -> float | None:
    """The figure of a point from its record, the mean over its seeds; None where there is none, or the output holds NaN or Inf.

    Raises:
        BadInput: for an output that the variant does not have.
    """
    if text is None or not record.rows:
        return None
    output, _, name = text.rpartition(".")
    rows = [row for row in record.rows if (row["subject"], row["reference"]) == ("variant", "golden")]
    own = [row for row in rows if row["output"] == (output or record.outputs[0])]
    if not own:
        known = [f"{one}.{name}" for one in dict.fromkeys(row["output"] for row in rows)]
        raise BadInput("objective", text, f"the variant returns no {output}; {one_of(text, known)}")
    if record.status is not Status.OK and any(row.get(count, 1) for row in own for count in ("nan_count", "inf_count")):
        return None  # a figure of the elements that are left, or the time of a wrong result, would win
    mean = math.fsum((derived(row) if name in FOLLOWING else row)[name] for row in own) / len(own)
    return None if math.isnan(mean) else mean
