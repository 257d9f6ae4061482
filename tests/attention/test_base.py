"""Facts of every implementation: the format of each output, in whose ulp and unit roundoff it is measured, and its shapes."""

from __future__ import annotations

import pytest
import torch

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.attention.base import Attention
from numdev.attention.differentiable import Backward
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive, NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Sdpa
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import BadInput

EXACT = "numdev.attention.exact:rounded_once"
VARIANTS: list[tuple[Attention, Format, Format]] = [
    (Exact(), FP64, FP64),
    (Naive(Precision.eager(FP16)), FP16, FP32),
    (Tiled(Precision.fp8()), FP16, FP32),
    (Tiled(Precision.kernel(BF16).with_step(output="fp32")), FP32, FP32),
    (Instrumented(Precision.uniform(FP16)), FP16, FP16),
    (Triton(BF16), BF16, FP32),
    (Triton(E4M3FN), FP16, FP32),
    (Vanilla(BF16), BF16, FP32),
    (Sdpa(fmt=FP64), FP64, FP64),
    (Flex(fmt=FP32), FP32, FP32),
    (Custom(EXACT, FP16), FP16, FP32),
]


@pytest.mark.parametrize(("variant", "out", "lse"), VARIANTS, ids=lambda value: str(value)[:60])
def test_each_output_has_a_format_of_its_own(variant: Attention, out: Format, lse: Format) -> None:
    """`out` that of the last step, `lse` that of the row sum; kernels keep the latter in FP32."""
    assert list(variant.formats.items()) == [("out", out), ("lse", lse)]
    assert variant.format == out


GOLDEN = Precision.golden()
BOTH_PASSES: list[Attention | Backward] = [
    *(Exact(), ExactBackward(), Naive(GOLDEN), NaiveBackward(BackwardPrecision.golden(), GOLDEN)),
    *(Tiled(GOLDEN), TiledBackward(Tiled(GOLDEN), BackwardPrecision.golden())),
]


@pytest.mark.parametrize("variant", BOTH_PASSES, ids=lambda variant: type(variant).__name__)
@pytest.mark.parametrize(
    ("q", "k", "v", "do", "lengths", "field"),
    [
        ((1, 2, 5, 4), (1, 2, 7, 3), (1, 2, 7, 3), (1, 2, 5, 3), None, "k"),
        ((2, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4), (2, 2, 5, 4), None, "k"),
        ((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 8, 4), (1, 2, 5, 4), None, "v"),
        ((1, 2, 5, 4), (1, 2, 7, 4), (1, 1, 7, 4), (1, 2, 5, 4), None, "v"),
        ((1, 3, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4), (1, 3, 5, 4), None, "problem.kv_heads"),
        ((1, 2, 0, 4), (1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 0, 4), None, "q"),
        ((2, 5, 4), (2, 7, 4), (2, 7, 4), (2, 5, 4), None, "q"),
        ((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 5, 4), (7, 7), "problem.key_lengths"),
        ((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 5, 4), (8,), "problem.key_lengths"),
        ((1, 2, 5, 4), (1, 2, 7, 4), (1, 2, 7, 6), (1, 2, 5, 4), None, "do"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    variant: Attention | Backward,
    q: tuple[int, ...],
    k: tuple[int, ...],
    v: tuple[int, ...],
    do: tuple[int, ...],
    lengths: tuple[int, ...] | None,
    field: str,
) -> None:
    inputs, mask = (torch.ones(q), torch.ones(k), torch.ones(v)), Mask(key_lengths=lengths)
    if isinstance(variant, Backward):
        with pytest.raises(BadInput, match=f"^{field}: "):
            variant(*inputs, torch.ones(do), mask)
    elif field != "do":
        with pytest.raises(BadInput, match=f"^{field}: "):
            variant(*inputs, mask)
