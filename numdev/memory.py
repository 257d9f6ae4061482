"""How much memory there is, and a cache that keeps within a share of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device; where the system does not say, as much as anyone could want."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # by the allocator, for nobody
        return int(torch.cuda.mem_get_info(device)[0]) + held
    meminfo = Path("/proc/meminfo")
    if meminfo.is_file():
        for line in meminfo.read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return 1 << 62


class LeastRecentlyUsed:
    """Values by key up to a number of bytes of tensors; whoever was asked for longest ago goes first."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._entries: OrderedDict[Hashable, tuple[Any, int]] = OrderedDict()
        self._used = 0

    def get(self, key: Hashable, make: Callable[[], Any]) -> Any:
        """The value of a key, made where it is not kept."""
        if key in self._entries:
            self._entries.move_to_end(key)
            return self._entries[key][0]
        value = make()
        size = _bytes_of(value)
        self._entries[key] = (value, size)
        self._used += size
        while self._used > self._limit and len(self._entries) > 1:
            self._used -= self._entries.popitem(last=False)[1][1]
        return value


def _bytes_of(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_bytes_of(item) for item in value.values())
    if isinstance(value, (tuple, list)):
        return sum(_bytes_of(item) for item in value)
    if hasattr(value, "values"):
        return 4 * _bytes_of(value.values)  # a Sample: its values, the same sorted, their signs, their ulp
    return 64
