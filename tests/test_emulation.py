"""The emulation of a kernel: what it takes from the kernel, what must be said, and that it predicts."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from numdev.attention.base import Attention
from numdev.attention.custom import Custom
from numdev.attention.exact import Exact, rounded_once
from numdev.attention.flex import Flex
from numdev.attention.instrumented import Instrumented
from numdev.attention.sdpa import Backend, Sdpa
from numdev.attention.tiled import Tiled
from numdev.attention.triton import Kernel, Triton
from numdev.emulation import emulation_of
from numdev.errors import BadInput
from numdev.formats import BF16, E4M3FN, FP16
from numdev.mask import Mask
from numdev.precision import Precision
from numdev.softmax import Exponential, OnlineSoftmax
from numdev.tiling import Order, Tiling
from tests.cases import draw

FORWARD, REVERSE = Order.FORWARD, Order.REVERSE
OURS = "numdev.attention.exact:rounded_once"


@pytest.mark.parametrize(
    ("variant", "dim", "stated", "expected"),
    [
        (Triton(kernel=Kernel.HOPPER), 64, {}, (128, REVERSE)),
        (Triton(bc=32, kernel=Kernel.PORTABLE), 64, {}, (32, FORWARD)),
        (Triton(bc=32, order=REVERSE, kernel=Kernel.PORTABLE), 64, {}, (32, REVERSE)),
        (Sdpa(Backend.FLASH), 64, {}, (128, REVERSE)),
        (Sdpa(Backend.FLASH), 128, {}, (64, REVERSE)),
        (Sdpa(Backend.FLASH), 96, {"bc": 64}, (64, REVERSE)),
        (Sdpa(Backend.EFFICIENT), 64, {}, (64, FORWARD)),
        (Sdpa(Backend.EFFICIENT), 128, {}, (128, FORWARD)),
        (Sdpa(Backend.EFFICIENT), 128, {"bc": 32, "order": REVERSE}, (32, REVERSE)),
        (Sdpa(Backend.CUDNN), 128, {"bc": 128, "order": FORWARD}, (128, FORWARD)),
        (Flex(bc=32), 64, {}, (32, FORWARD)),
        (Custom(OURS), 64, {"bc": 16, "order": FORWARD}, (16, FORWARD)),
    ],
)
def test_order_and_tile(variant: Attention, dim: int, stated: dict[str, Any], expected: tuple[int, Order]) -> None:
    found = emulation_of(variant, dim, **stated)
    assert (found.tiling.bc, found.tiling.order) == expected


@pytest.mark.parametrize(
    ("variant", "dim", "field"),
    [
        (Triton(bc=64), 64, "attention.kernel"),
        (Triton(kernel=Kernel.PORTABLE), 64, "tiling.bc"),
        (Sdpa(Backend.FLASH), 96, "tiling.bc"),
        (Sdpa(Backend.CUDNN), 64, "tiling.bc"),
        (Sdpa(Backend.MATH), 64, "tiling.bc"),
        (Flex(), 64, "tiling.bc"),
        (Custom(OURS), 64, "tiling.bc"),
    ],
)
def test_what_is_not_known_must_be_said(variant: Attention, dim: int, field: str) -> None:
    with pytest.raises(BadInput, match=f"^{field}: .*(say what|give)"):
        emulation_of(variant, dim)


def test_an_order_that_is_not_known() -> None:
    with pytest.raises(BadInput, match=r"^tiling.order"):
        emulation_of(Sdpa(Backend.CUDNN), 64, bc=128)


def test_formats_and_recurrence_are_the_kernels() -> None:
    lazy = OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)
    found = emulation_of(Triton(E4M3FN, bc=64, softmax=lazy, splits=3, kernel=Kernel.PORTABLE), 64)
    assert found == Tiled(Triton(E4M3FN).precision, Tiling(64, 64, splits=3), lazy, count=False)
    assert emulation_of(Sdpa(Backend.EFFICIENT, FP16), 64).precision == Precision.kernel(FP16)
    policy, tiling = Precision.parse("bf16"), Tiling(16, 32, REVERSE)
    assert emulation_of(Instrumented(policy, tiling), 64).tiling == tiling


@pytest.mark.parametrize("causal", [False, True])
def test_exact_attention_rounded_once(causal: bool) -> None:
    q, k, v = (t.bfloat16() for t in draw((1, 2, 1, 16, 24, 8)))
    found = rounded_once(q, k, v, mask=Mask(causal=causal))
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, Exact()(q, k, v, Mask(causal=causal)).out.bfloat16())
    assert Custom(OURS, BF16)(q, k, v, Mask(causal=causal)).out.equal(found)
