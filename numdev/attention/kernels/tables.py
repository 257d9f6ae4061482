"""Small tables on the GPU for launches to read, kept for as long as a launch may read them."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch
from torch import Tensor

from numdev.errors import Unsupported


class Tables:
    """Returns the same tensor for the same key, so that neither a launch nor the capture of a CUDA graph copies to the GPU.

    A captured graph reads its tables at every replay, and does not signal its end: tables used by a capture are never evicted. Of
    the others, the least recently used is evicted beyond `capacity`, after the device has finished every launch.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self._kept: OrderedDict[tuple[Hashable, torch.device], Tensor] = OrderedDict()
        self._captured: set[tuple[Hashable, torch.device]] = set()
        self._lock = threading.Lock()

    def get(self, key: Hashable, device: torch.device, make: Callable[[], Tensor]) -> Tensor:
        """The table of a key on a device; `make` creates it on the CPU.

        Raises:
            Unsupported: for a table that is not on the GPU yet while a CUDA graph is captured.
        """
        place = key, device
        capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        with self._lock:
            if place not in self._kept:
                if capturing:
                    mend = "call it once with these shapes before the capture"
                    why = f"a CUDA graph cannot capture the copy of its tables to the GPU; {mend}"
                    raise Unsupported("attention", why)
                self._kept[place] = make().to(device)
                self._evict()
            self._kept.move_to_end(place)
            if capturing:
                self._captured.add(place)
            return self._kept[place]

    def _evict(self) -> None:
        free = [place for place in self._kept if place not in self._captured]
        surplus = free[: max(0, len(free) - self.capacity)]
        for _, device in surplus:
            if device.type == "cuda":
                torch.cuda.synchronize(device)
        for place in surplus:
            del self._kept[place]
