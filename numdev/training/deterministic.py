"""The settings of torch under which the same run has the same bits."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

FIXED = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "float32_matmul": "highest"}
"""What is set, by its name in an environment; a variable that is set already stays."""


@contextmanager
def deterministic() -> Iterator[None]:
    """Deterministic algorithms alone, no TF32, no search for the fastest convolution; the settings before are restored.

    An operation that has no deterministic algorithm raises RuntimeError.
    """
    name = "CUBLAS_WORKSPACE_CONFIG"
    fill: Any = torch.utils.deterministic  # whose one setting its type does not state
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.get_float32_matmul_precision(),
        fill.fill_uninitialized_memory,
        torch.backends.cudnn.allow_tf32,
        torch.backends.cudnn.benchmark,
        os.environ.get(name),
    )
    os.environ.setdefault(name, FIXED[name])
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision(FIXED["float32_matmul"])
    fill.fill_uninitialized_memory = False  # it would write every new tensor once more
    torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = False, False
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.set_float32_matmul_precision(before[2])
        fill.fill_uninitialized_memory = before[3]
        torch.backends.cudnn.allow_tf32, torch.backends.cudnn.benchmark = before[4], before[5]
        if before[6] is None:
            del os.environ[name]
