"""What the compiler makes of the portable backward kernels, read without a GPU: shared memory, and registers that ran out."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow


def test_chosen_tiles_fit_and_stay_in_registers() -> None:
    """Under the policy of kernels 16-bit formats spill nothing for compute capability 9.0; up to d = 128 no product waits.

    C75xx is what the assembler says where it makes the products of a warp group wait for each other.
    """
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    command = [sys.executable, "-m", "tests.compiled_backward", "chosen"]
    root = Path(__file__).resolve().parents[3]
    made = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=root)
    assert made.returncode == 0, made.stderr[-2000:]
    for kernel in json.loads(made.stdout.splitlines()[-1]):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90 and kernel["policy"] == "kernel" and kernel["format"] != "fp32":
            assert kernel["stack"] == kernel["spills"] == 0 or kernel["kernel"] == "delta", kernel
            assert kernel["wgmma"] > 0 or kernel["dim"] > 128, kernel
            assert not kernel["warnings"] or kernel["dim"] > 128, kernel
