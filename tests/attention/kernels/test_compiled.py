"""What the compiler makes of our kernels, read without a GPU: shared memory, and registers that ran out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.slow


def compiled(what: str) -> list[dict[str, Any]]:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compiled", what]
    root = Path(__file__).resolve().parents[3]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert made.returncode == 0, made.stderr[-2000:]
    found: list[dict[str, Any]] = json.loads(made.stdout.splitlines()[-1])
    return found


def test_the_chosen_tile_fits_the_gpu() -> None:
    """FP32 at d = 256 on a GPU of 99 KB, where 64 x 32 needs 139,520 bytes; and without spills on an H100, where 128 x 64 in 4
    warps had 14 KB of them at d = 256.
    """
    for kernel in compiled("portable"):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90:
            assert kernel["stack"] == 0, kernel


def test_the_hopper_kernel_keeps_its_values_in_registers_and_its_products_in_flight() -> None:
    """An unaligned causal limit at d = 256 has two loops, and a few scalars of the tile in memory: none of S, P or O."""
    for kernel in compiled("hopper"):
        assert kernel["stack"] <= (32 if kernel["dim"] == 256 else 0), kernel
        assert not kernel["warnings"], kernel
        assert kernel["shared"] <= 227 * 1024, kernel
