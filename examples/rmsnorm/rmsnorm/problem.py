"""What RMSNorm is measured on."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from numdev import BadInput


class Kind(Enum):
    """How the entries of x are distributed."""

    NORMAL = "normal"
    OUTLIERS = "outliers"


@dataclass(frozen=True)
class Problem:
    """x `[rows, hidden]` and w `[hidden]` from a seed.

    Attributes:
        rows: tokens.
        hidden: entries of a token.
        eps: what is added to the mean of the squares.
        kind: normal entries, or those with one in a thousand enlarged a hundred times, as activations have them.
    """

    rows: int = 256
    hidden: int = 1024
    eps: float = 1e-6
    kind: Kind = Kind.NORMAL

    def __post_init__(self) -> None:
        for name in ("rows", "hidden"):
            if getattr(self, name) < 1:
                raise BadInput(f"problem.{name}", getattr(self, name), "give a whole number of at least 1")

    @staticmethod
    def compose(rows: int, hidden: int, eps: float, kind: str) -> Problem:
        """From settings.

        Raises:
            BadInput: naming the setting.
        """
        known = [each.value for each in Kind]
        if kind not in known:
            raise BadInput("problem.kind", kind, f"give one of {', '.join(known)}")
        return Problem(rows, hidden, eps, Kind(kind))

    def inputs(self, seed: int, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """`x` and `w` in FP64, drawn on the CPU: the same on every device."""
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(self.rows, self.hidden, generator=generator, dtype=torch.float64)
        if self.kind is Kind.OUTLIERS:
            chosen = torch.rand(self.rows, self.hidden, generator=generator, dtype=torch.float64) < 1e-3
            x = torch.where(chosen, 100 * x, x)
        w = 0.5 + torch.rand(self.hidden, generator=generator, dtype=torch.float64)
        return {"x": x.to(device), "w": w.to(device)}

    def arguments(self) -> dict[str, float]:
        """What an RMSNorm takes besides the tensors."""
        return {"eps": self.eps}

    def replicates(self, seeds: int | None = None) -> int:
        """Ten draws unless told otherwise."""
        return 10 if seeds is None else seeds

    def cluster(self, seed: int) -> str:
        """All draws are independent."""
        return ""

    @property
    def bytes(self) -> int:
        """About what a measurement holds at once, in FP64."""
        return 8 * 12 * self.rows * self.hidden
