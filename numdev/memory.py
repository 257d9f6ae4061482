"""How much memory a device still has."""

from __future__ import annotations

import psutil
import torch


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, without swapping on a CPU."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # what the allocator caches is free
        return int(torch.cuda.mem_get_info(device)[0]) + held
    return psutil.virtual_memory().available
