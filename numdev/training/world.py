"""The processes that share a batch, seen from one of them."""

from __future__ import annotations

from torch import Tensor


class World:
    """One process alone; `numdev.training.ranks.Ranks` is one of several."""

    rank = 0
    size = 1

    @property
    def leads(self) -> bool:
        """Whether this process writes files and reports progress."""
        return self.rank == 0

    def average(self, gradients: list[Tensor], loss: Tensor) -> Tensor:
        """Replace gradients by their mean over the processes; returns the mean of the loss."""
        return loss

    def wait(self) -> None:
        """Return when all processes have come here."""

    def agree(self, checksum: str) -> None:
        """Raise RuntimeError unless all processes have this checksum."""
