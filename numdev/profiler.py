"""torch's profiler, which says which kernels ran and how much memory they took."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def profiler(device: torch.device, **options: Any) -> profile:
    """torch's profiler of a device, without the lines that some versions of its library write to the terminal."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if device.type == "cuda" else [])
    return profile(activities=activities, **options)
