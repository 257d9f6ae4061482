"""Needs of our kernels as the compiler makes them, read without a GPU: shared memory, and registers that ran out."""

from __future__ import annotations

import pytest

from tests.compiled import in_a_process

pytestmark = [
    pytest.mark.slow,
    # The most demanding requests; `-m exhaustive` compiles all of them, which takes minutes.
    pytest.mark.parametrize("count", ["3", pytest.param("99", marks=pytest.mark.exhaustive)]),
]


def test_the_chosen_tile_fits_the_gpu(count: str) -> None:
    """FP32 at d = 256 on a GPU of 99 KB, where 64 x 32 needs 139,520 bytes; and without spills on an H100, where 128 x 64 in 4
    warps had 14 KB of them at d = 256.
    """
    for kernel in in_a_process("portable", count):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90:
            assert kernel["stack"] == 0, kernel


def test_the_chosen_backward_tiles_fit_and_stay_in_registers(count: str) -> None:
    """Under the policy of kernels 16-bit formats spill nothing for compute capability 9.0; up to d = 128 no product waits.

    C75xx is what the assembler says where it makes the products of a warp group wait for each other.
    """
    for kernel in in_a_process("backward", count):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90 and kernel["policy"] == "kernel" and kernel["format"] != "fp32":
            assert kernel["stack"] == kernel["spills"] == 0 or kernel["kernel"] == "delta", kernel
            assert kernel["wgmma"] > 0 or kernel["dim"] > 128, kernel
            assert not kernel["warnings"] or kernel["dim"] > 128, kernel


@pytest.mark.parametrize("kind", ["hopper", "hopper_backward"])
def test_the_hopper_kernels_keep_their_matrices_in_registers_and_their_products_in_flight(kind: str, count: str) -> None:
    """Forward, an unaligned causal limit at d = 256 has two loops, and a few scalars of the tile in memory: none of S, P or O.

    Backward, a few addresses and counts of the walk are in memory: the least of the matrices are 64 numbers of a thread.
    """
    for kernel in in_a_process(kind, count):
        most = 4 * 64 - 1 if kind == "hopper_backward" else 32 if kernel["dim"] == 256 else 0
        assert kernel["stack"] <= most, kernel
        assert not kernel["warnings"], kernel
        assert kernel["shared"] <= 227 * 1024, kernel
