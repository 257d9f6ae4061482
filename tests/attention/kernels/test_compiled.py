"""What the compiler makes of our kernels, read without a GPU: shared memory, and registers that ran out."""

from __future__ import annotations

import pytest

from tests.compiled import in_a_process

pytestmark = pytest.mark.slow

# The most demanding requests; `-m exhaustive` compiles all of them, which takes minutes.
of_how_many = pytest.mark.parametrize("count", ["3", pytest.param("99", marks=pytest.mark.exhaustive)])


@of_how_many
def test_the_chosen_tile_fits_the_gpu(count: str) -> None:
    """FP32 at d = 256 on a GPU of 99 KB, where 64 x 32 needs 139,520 bytes; and without spills on an H100, where 128 x 64 in 4
    warps had 14 KB of them at d = 256.
    """
    for kernel in in_a_process("tests.compiled", "portable", count):
        assert kernel["shared"] <= kernel["bound"] <= kernel["limit"], kernel
        if kernel["capability"] == 90:
            assert kernel["stack"] == 0, kernel


@of_how_many
def test_the_hopper_kernel_keeps_its_values_in_registers_and_its_products_in_flight(count: str) -> None:
    """An unaligned causal limit at d = 256 has two loops, and a few scalars of the tile in memory: none of S, P or O."""
    for kernel in in_a_process("tests.compiled", "hopper", count):
        assert kernel["stack"] <= (32 if kernel["dim"] == 256 else 0), kernel
        assert not kernel["warnings"], kernel
        assert kernel["shared"] <= 227 * 1024, kernel


@of_how_many
def test_the_hopper_backward_kernels_keep_their_matrices_in_registers_and_their_products_in_flight(count: str) -> None:
    """The one kernel has a few addresses and counts of its walk in memory: the least of its matrices are 64 numbers of a thread.

    The assembler of triton 3.7 makes the products of the split design's dK and dV wait at d = 128 where there is a mask.
    """
    for kernel in in_a_process("tests.compiled_hopper_backward", count):
        assert kernel["stack"] < (4 * 64 if kernel["kernel"] == "fused" else 64), kernel
        assert not kernel["warnings"] or (kernel["kernel"], kernel["dim"]) == ("keys", 128), kernel
        assert kernel["shared"] <= 227 * 1024, kernel
