"""Events that a tiled backward run counts."""

from __future__ import annotations

import torch
from torch import Tensor

from numdev.attention.backward.events import BACKWARD_COUNTERS


class BackwardCounters:
    """Events of one run, summed over tiles on the device; only `summary` waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._events = torch.zeros(len(BACKWARD_COUNTERS), dtype=torch.float64, device=device)
        self._entries = torch.zeros((), dtype=torch.float64, device=device)

    def tile(self, p: Tensor, entering: Tensor, ds: Tensor, visible: Tensor | None) -> None:
        """Count one tile: P as recomputed and as it enters its product, and dS as it enters its products; 0 where masked."""
        seen = p.numel() if visible is None else visible.sum() * (p.numel() // visible.numel())
        self._entries += seen
        self._events[0] += torch.count_nonzero(p > 1)
        self._events[1] += seen - torch.count_nonzero(entering)
        self._events[2] += seen - torch.count_nonzero(ds)

    def add(self, events: Tensor, entries: float) -> None:
        """The three events of a run, entries that are 0 for the latter two, and how many entries are visible."""
        self._events += events.to(self._events)
        self._entries += entries

    def summary(self) -> dict[str, float]:
        """The columns of `numdev.attention.backward.events.BACKWARD_COUNTERS`."""
        entries = max(self._entries.item(), 1.0)
        return {name: count / entries for name, count in zip(BACKWARD_COUNTERS, self._events.tolist(), strict=True)}
