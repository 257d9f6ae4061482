"""What measures the points of a command: a runner on the operation that the configuration names."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from omegaconf import DictConfig, OmegaConf

from numdev.cli import nodes
from numdev.cli.library import OPERATION
from numdev.errors import BadInput
from numdev.measurement.deviation.measurement import Deviations
from numdev.measurement.operation import Operation
from numdev.measurement.protocol import MeasurementKind
from numdev.measurement.runner import Runner
from numdev.measurement.speed.measurement import Speeds
from numdev.measurement.speed.timing import Budget
from numdev.measurement.speed.traffic import Traffic
from numdev.results.environment import resolve_device


def runner(command: str, cfg: DictConfig, node: Mapping[str, Any] | None = None) -> Runner:
    """What measures for a command, on the device of the configuration.

    Args:
        command: `speed` times, `train` trains; every other one measures deviations.
        cfg: the composed configuration.
        node: that of the operation, where it is another than the configuration's.

    Raises:
        BadInput: for a device that is not there, for an operation that is none, and for one that another command measures.
    """
    if command not in ("speed", "train"):
        return _deviations(json.dumps(_node(cfg) if node is None else node), cfg.device)
    return Runner(kind(command, cfg, node), cfg.device)


def kind(command: str, cfg: DictConfig, node: Mapping[str, Any] | None = None) -> MeasurementKind:
    """The kind of measurement of a command; arguments and errors as those of `runner`."""
    operation = operation_of(_node(cfg) if node is None else node)
    if command == "train":
        return _training(operation)
    _refuse_without_golden(operation)
    if command != "speed":
        return Deviations(operation)
    budget = Budget(cfg.timing.seconds, cfg.timing.least, cfg.timing.most)
    return Speeds(operation, budget, Traffic(operation, resolve_device(cfg.device), _note) if cfg.counters else None)


@lru_cache(maxsize=2)
def _deviations(node: str, device: str) -> Runner:
    """Kept so that golden results serve the next job of a sweep too."""
    operation = operation_of(json.loads(node))
    _refuse_without_golden(operation)
    return Runner(Deviations(operation), device)


def _training(operation: Operation) -> MeasurementKind:
    from numdev.training.weights import WeightsOverTraining  # late: it imports every attention and every model

    if operation.golden is not None:
        mend = f"numdev train compares runs of training; numdev measure measures {operation.name}"
        raise BadInput(OPERATION, operation.name, mend)
    return WeightsOverTraining(operation)


def _refuse_without_golden(operation: Operation) -> None:
    if operation.golden is None:
        mend = "it has no exact result, its runs are compared with one another; use numdev train"
        raise BadInput(OPERATION, operation.name, mend)


def _node(cfg: DictConfig) -> Any:
    return None if cfg.operation is None else OmegaConf.to_container(cfg.operation, resolve=True)


def operation_of(node: Mapping[str, Any] | None) -> Operation:
    """The operation that a node makes.

    Raises:
        BadInput: if it makes none.
    """
    made = nodes.build({OPERATION: node}, OPERATION)
    if isinstance(made, Operation):
        return made
    raise BadInput(OPERATION, node, "it makes no numdev.measurement.operation.Operation; give operation=NAME, an option")


def _note(text: str) -> None:
    from numdev.cli.console import ERRORS

    ERRORS.print(f"note: {text}", markup=False)
