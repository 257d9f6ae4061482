"""Checkpoints: everything that a killed run needs to go on with the same bits."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from numdev.errors import BadInput
from numdev.training.sealed import Damaged, Sealed

KIND = "checkpoint"
_KEPT = 2
_HISTORY = "history/"


@dataclass(frozen=True)
class Position:
    """Where a run is.

    Attributes:
        done: steps that have been done.
        restarted: whether the restart after half of the steps has been done.
        seconds: spent on steps.
        seconds_per_step: the median over the stretches of the last process.
    """

    done: int = 0
    restarted: bool = False
    seconds: float = 0.0
    seconds_per_step: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A position, with the tensors of `State` and the loss and gradient norm of each step that was done."""

    key: str
    position: Position
    state: dict[str, Tensor] = field(repr=False)
    history: dict[str, Tensor] = field(repr=False)

    def write(self, folder: Path) -> None:
        """Write it, and remove all but the last two.

        Raises:
            StoreError: if it cannot be written.
        """
        tensors = self.state | {_HISTORY + name: x for name, x in self.history.items()}
        Sealed.write(folder, KIND, self.position.done, tensors, {"key": self.key} | asdict(self.position))
        for old in Sealed.all(folder, KIND)[:-_KEPT]:
            old.path.unlink(missing_ok=True)

    @staticmethod
    def latest(folder: Path, key: str) -> tuple[Checkpoint | None, tuple[str, ...]]:
        """The last whole checkpoint of a folder, or None, and a sentence on each damaged one that was passed over.

        Raises:
            BadInput: if it is of another configuration, of other sources or of another environment.
        """
        notes: list[str] = []
        for found in reversed(Sealed.all(folder, KIND)):
            try:
                tensors, facts = found.read()
            except Damaged as error:
                notes.append(f"{error}; the run goes on from the one before it")
                continue
            if facts.pop("key") != key:
                mend = "it holds a checkpoint of another configuration, version or machine; give another folder, or delete it"
                raise BadInput("folder", str(folder), mend)
            history = {name.removeprefix(_HISTORY): x for name, x in tensors.items() if name.startswith(_HISTORY)}
            state = {name: x for name, x in tensors.items() if not name.startswith(_HISTORY)}
            return Checkpoint(key, Position(**facts), state, history), tuple(notes)
        return None, tuple(notes)

    @staticmethod
    def remove(folder: Path) -> None:
        """Remove the checkpoints of a finished run."""
        for found in Sealed.all(folder, KIND):
            found.path.unlink(missing_ok=True)


def rounded(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state whose weights and moments went through BF16."""
    lossy = ("weight/", "mean/", "square/")
    return {name: x.to(torch.bfloat16).to(x.dtype) if name.startswith(lossy) else x for name, x in state.items()}


def without_moments(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """A state whose optimizer starts anew."""
    lost = ("mean/", "square/", "updates/")
    return {name: torch.zeros_like(x) if name.startswith(lost) else x for name, x in state.items()}
