"""How a run is executed, and how it reports its progress."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from numdev.errors import BadInput
from numdev.training.snapshots import Kept


class Graphs(Enum):
    """Whether a step is captured as a CUDA graph: where it can be, always, never. The bits are the same."""

    AUTO = "auto"
    ON = "on"
    OFF = "off"


@dataclass(frozen=True)
class Progress:
    """Where a run is.

    Attributes:
        step: how many are done.
        steps: of the task.
        loss: of the last one.
        rate: steps per second.
    """

    step: int
    steps: int
    loss: float
    rate: float


Told = Callable[[Progress], None]


@dataclass(frozen=True)
class Execution:
    """How a run is executed, which changes no bit of it.

    Attributes:
        graphs: see `Graphs`.
        kept: see `Kept`; the weights are among them.
        checkpoint_seconds: between two checkpoints, at least.
    """

    graphs: Graphs = Graphs.AUTO
    kept: tuple[Kept, ...] = (Kept.WEIGHTS,)
    checkpoint_seconds: float = 20.0

    def __post_init__(self) -> None:
        if Kept.WEIGHTS not in self.kept:
            raise BadInput("kept", [each.value for each in self.kept], "the weights are always kept; name them too")
