"""What ran, as results show it."""

from __future__ import annotations

import pytest

from numdev.attention.kernel_launch import KernelLaunch


@pytest.mark.parametrize(
    ("ran", "text"),
    [
        (KernelLaunch(), ""),
        (KernelLaunch("pytorch_flash::flash_fwd_kernel"), "pytorch_flash::flash_fwd_kernel"),
        (KernelLaunch("numdev hopper", 192, 128, stages=2), "numdev hopper br=192 bc=128 stages=2"),
        (KernelLaunch("numdev portable", 16, 64, 4, 3), "numdev portable br=16 bc=64 warps=4 stages=3"),
        (KernelLaunch("numdev portable", 16, 64, 4, 3, 5), "numdev portable br=16 bc=64 warps=4 stages=3 splits=5 combined=lse"),
    ],
)
def test_text(ran: KernelLaunch, text: str) -> None:
    assert str(ran) == text
