"""The format of each output, in whose ulp and unit roundoff it is measured."""

from __future__ import annotations

import pytest

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Attention
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import KernelLaunch
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Sdpa
from numdev.attention.vendor.vanilla import Vanilla

EXACT = "numdev.attention.exact:rounded_once"
VARIANTS: list[tuple[Attention, Format, Format]] = [
    (Exact(), FP64, FP64),
    (Naive(Precision.uniform(BF16)), BF16, BF16),
    (Naive(Precision.eager(FP16)), FP16, FP32),
    (Tiled(Precision.kernel(BF16)), BF16, FP32),
    (Tiled(Precision.golden()), FP64, FP64),
    (Tiled(Precision.fp8()), FP16, FP32),
    (Tiled(Precision.kernel(BF16).with_step(output=Cast(FP32))), FP32, FP32),
    (Instrumented(Precision.uniform(FP16)), FP16, FP16),
    (Triton(BF16), BF16, FP32),
    (Triton(E4M3FN), FP16, FP32),
    (Vanilla(BF16), BF16, FP32),
    (Sdpa(fmt=FP16), FP16, FP32),
    (Sdpa(fmt=FP64), FP64, FP64),
    (Flex(fmt=FP32), FP32, FP32),
    (Custom(EXACT, FP16), FP16, FP32),
    (Custom(EXACT, FP64), FP64, FP64),
]


@pytest.mark.parametrize(("variant", "out", "lse"), VARIANTS, ids=lambda value: str(value)[:60])
def test_each_output_has_a_format_of_its_own(variant: Attention, out: Format, lse: Format) -> None:
    """`out` that of the last step, `lse` that of the row sum; kernels keep the latter in FP32."""
    assert isinstance(variant, Attention)
    assert variant.formats == {"out": out, "lse": lse}
    assert next(iter(variant.formats)) == "out", "the primary one"
    assert variant.format == out


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
