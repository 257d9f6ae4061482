"""What ran, as results show it."""

from __future__ import annotations

import pytest

from numdev.attention.ran import Ran


@pytest.mark.parametrize(
    ("ran", "text"),
    [
        (Ran(), ""),
        (Ran("pytorch_flash::flash_fwd_kernel"), "pytorch_flash::flash_fwd_kernel"),
        (Ran("numdev hopper", 192, 128, stages=2), "numdev hopper br=192 bc=128 stages=2"),
        (Ran("numdev portable", 16, 64, 4, 3), "numdev portable br=16 bc=64 warps=4 stages=3"),
        (Ran("numdev portable", 16, 64, 4, 3, 5), "numdev portable br=16 bc=64 warps=4 stages=3 splits=5 combined=lse"),
    ],
)
def test_text(ran: Ran, text: str) -> None:
    assert str(ran) == text
