"""What the compiler makes of the portable backward kernels, read without a GPU: shared memory, and registers that ran out."""

from __future__ import annotations

import pytest

from tests.compiled import in_a_process

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("count", ["3", pytest.param("99", marks=pytest.mark.exhaustive)])
def test_chosen_tiles_fit_and_stay_in_registers(count: str) -> None:
    """Under the policy of kernels 16-bit formats spill nothing for compute capability 9.0; up to d = 128 no product waits.

    C75xx is what the assembler says where it makes the products of a warp group wait for each other.
    """
    for kernel in in_a_process("tests.compiled_backward", "chosen", count):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90 and kernel["policy"] == "kernel" and kernel["format"] != "fp32":
            assert kernel["stack"] == kernel["spills"] == 0 or kernel["kernel"] == "delta", kernel
            assert kernel["wgmma"] > 0 or kernel["dim"] > 128, kernel
            assert not kernel["warnings"] or kernel["dim"] > 128, kernel
