"""Three tensor operations of torch: attention within the bound of its formats, and memory as the square of N."""

from __future__ import annotations

import pytest
import torch

from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, FP64, Format
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import OnlineSoftmax
from numdev.attention.vendor.vanilla import Vanilla
from numdev.errors import Unsupported
from tests.budget import kernel_budget
from tests.cases import MASKS, Sizes, draw, on

SIZES: Sizes = (2, 4, 2, 37, 53, 24)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("fmt", [BF16, FP16, FP32], ids=str)
def test_close_to_exact(fmt: Format, mask: str, device: str) -> None:
    """Within the budget of a kernel, and what the rounding of S adds: `u |S|` in the exponent, |S| being 6 at most here."""
    attend, given = Vanilla(fmt), _fitted(MASKS[mask])
    inputs = on(device, attend.round_inputs(*draw(SIZES)))
    got, golden = attend(*inputs, given), Exact()(*inputs, given)
    bound, _ = kernel_budget(Precision.kernel(fmt), OnlineSoftmax(), *inputs, SIZES[-1] ** -0.5, 1)
    scores = 2 * 6 * fmt.u * float(inputs[2].abs().max())
    assert float((got.out.double() - golden.out).abs().max()) <= bound + scores
    assert got.out.dtype == fmt.dtype


def _fitted(mask: Mask) -> Mask:
    lengths = mask.key_lengths
    return Mask(mask.causal, mask.window, lengths and tuple(min(n, SIZES[4]) for n in lengths))


def test_fp64_is_exact_but_for_the_order_of_sums() -> None:
    q, k, v = draw(SIZES)
    difference = (Vanilla(FP64)(q, k, v, Mask()).out - Exact()(q, k, v, Mask()).out).abs().max()
    assert float(difference) < 200 * FP64.u * float(v.abs().max())


def test_a_row_that_sees_nothing_is_zero() -> None:
    q, k, v = Vanilla(FP32).round_inputs(*draw(SIZES))
    out = Vanilla(FP32)(q, k, v, Mask(key_lengths=(0, 53))).out
    assert torch.equal(out[0], torch.zeros_like(out[0]))
    assert bool((out[1] != 0).all())


def test_no_products_in_eight_bits() -> None:
    with pytest.raises(Unsupported, match=r"precision: .*e4m3fn"):
        Vanilla(E4M3FN)(*draw(SIZES), Mask())
