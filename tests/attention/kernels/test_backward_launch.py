"""The launches of the backward kernels: what is chosen, and that it fits."""

from __future__ import annotations

import pytest

from numdev.arithmetic.formats import BF16, FP16, FP32, Format
from numdev.attention.kernels.backward_launch import choose, shared_bytes
from numdev.attention.kernels.launch import INTERPRETED, Device, Launch
from numdev.attention.mask import Mask

H100, CPU = Device("sm_90", 232448), Device("interpreter")


@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("shared", [64 * 1024, 101376, 163 * 1024, 227 * 1024])
def test_a_tile_is_chosen_that_fits_the_device(shared: int, fmt: Format) -> None:
    """The least, 64 KB, are those of a T4, which no tile of FP32 at d = 256 fits: 16 x 16 needs 66,560 bytes."""
    device = Device("sm_00", shared)
    for head_dim in (8, 16, 64, 96, 128, *(() if fmt == FP32 and shared == 64 * 1024 else (200, 256))):
        for mask in (Mask(), Mask(causal=True)):
            found = choose(fmt, head_dim, mask, device)
            assert shared_bytes(found.keys, fmt, head_dim, False) <= shared, head_dim
            assert shared_bytes(found.rows, fmt, head_dim, True) <= shared, head_dim


def test_a_mask_takes_registers() -> None:
    assert choose(BF16, 64, Mask(), H100).keys == Launch(64, 128, 8, 2)
    assert choose(BF16, 64, Mask(causal=True), H100).keys == Launch(32, 128, 8, 2)
    assert choose(BF16, 128, Mask(), H100).keys == Launch(32, 128, 8, 2)


def test_sides_that_are_given_are_those_of_both_kernels() -> None:
    found = choose(BF16, 64, Mask(), H100, br=64, bc=32)
    assert (found.keys, found.rows) == (Launch(64, 32, 4, 2), Launch(64, 32, 4, 3))
    found = choose(FP32, 256, Mask(), Device("sm_89", 101376), br=64, bc=64)
    assert [(launch.br, launch.bc, launch.stages) for launch in (found.keys, found.rows)] == [(64, 64, 1)] * 2
    assert choose(FP32, 64, Mask(), CPU).keys == INTERPRETED


def test_a_head_dim_beyond_the_table_is_the_kernels_to_refuse() -> None:
    assert choose(BF16, 300, Mask(), CPU).keys == INTERPRETED
    assert choose(BF16, 300, Mask(), Device("sm_00", None)) == choose(BF16, 256, Mask(), Device("sm_00", None))
