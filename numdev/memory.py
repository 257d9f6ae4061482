"""How much memory a device still has, and sizes of memory as text."""

from __future__ import annotations

import torch


def available_bytes(device: torch.device) -> int:
    """Memory that can still be taken on a device, without swapping on a CPU."""
    if device.type == "cuda":
        held = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)  # what the allocator caches is free
        return int(torch.cuda.mem_get_info(device)[0]) + held
    import psutil  # late: numdev is imported to do many things, and this is asked when a point is measured

    return psutil.virtual_memory().available


def size_text(size: int) -> str:
    """A number of bytes in the unit in which it has one to four digits, such as `37 MiB`."""
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20)):
        if size >= factor:
            return f"{size / factor:.3g} {unit}" if size < 1000 * factor else f"{size / factor:.0f} {unit}"
    return f"{size / 1024:.3g} KiB"
