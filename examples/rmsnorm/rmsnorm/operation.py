"""What a measurement must know of RMSNorm."""

from __future__ import annotations

from dataclasses import fields

from numdev.measurement.operation import Inputs, Operation, Output
from rmsnorm.policy import Policy
from rmsnorm.variants import Golden

RMSNORM = Operation(
    name="rmsnorm",
    golden=Golden(),
    inputs=(Inputs(("x", "w")),),
    outputs=(Output("y", "the normalised row, weighed"), Output("rms", "root of the mean of the squares of a row")),
    steps=tuple(field.name for field in fields(Policy)),
    smaller="fewer rows or hidden entries",
)
