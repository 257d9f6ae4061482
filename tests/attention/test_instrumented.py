"""The instrumented kernel against the emulation that specifies it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
import torch

from numdev.arithmetic.formats import INT8
from numdev.arithmetic.quantise import Quantised, Smoothing
from numdev.arithmetic.rounding import Cast
from numdev.attention.instrumented import Instrumented
from numdev.attention.mask import Mask
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, Maximum, Normalise, OnlineSoftmax, ScaleOn, SumOver
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from numdev.errors import Unsupported
from tests.cases import MASKS, POLICIES, Sizes, draw, fitted, lse_of, mixed, on
from tests.oracles.table import exactly_scaled

SIZES: Sizes = (2, 2, 1, 37, 53, 24)
NARROW = [
    *("uniform_bf16", "uniform_fp16", "uniform_e5m2", "eager_bf16", "kernel_bf16", "kernel_fp16", "narrow_sum", "fp8", "int8"),
    "toward_zero",
]
BINARY = OnlineSoftmax(exp=Exponential.EXP2)

LOOPS = {
    "plain": (Tiling(16, 16), OnlineSoftmax()),
    "reverse, split, lazy": (
        Tiling(20, 13, Order.REVERSE, splits=2),
        OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0),
    ),
    "each": (Tiling(16, 32), OnlineSoftmax(normalise=Normalise.EACH)),
    "queries, p_scale": (Tiling(16, 32), OnlineSoftmax(exp=Exponential.EXP2, scale_on=ScaleOn.QUERIES, p_scale=256.0)),
    "FlashAttention-1": (Tiling(16, 16), OnlineSoftmax(normalise=Normalise.EACH, maximum=Maximum.LOCAL)),
    "local, scaled": (Tiling(16, 16, splits=2), OnlineSoftmax(exp=Exponential.EXP2, maximum=Maximum.LOCAL, p_scale=127.0)),
}


def every(count: int, first: Iterable[Any], second: Iterable[Any]) -> list[Any]:
    """All pairs. One in `count` is always run, so that each of either occurs; the interpreter needs seconds for one."""
    return [
        pytest.param(one, other, marks=[] if (i + j) % count == 0 else [pytest.mark.exhaustive])
        for i, one in enumerate(first)
        for j, other in enumerate(second)
    ]


def whole(sizes: Sizes) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs whose every product and sum is exact in FP32, in whatever order: scores are whole numbers of at most 4.

    So P are powers of two from 2^-8 to 1, v whole numbers of at most 4, and a sum of 53 of their products needs 8 + 2 + 6 bits.
    """
    q, k, v = draw(sizes)
    q[..., 4:] = 0
    return (3 * q).round().clamp(-1, 1), (3 * k).round().clamp(-1, 1), (2 * v).round().clamp(-4, 4)


@pytest.mark.parametrize(("name", "mask"), every(2, NARROW, MASKS))
def test_the_same_bits_where_everything_is_exact(name: str, mask: str, device: str) -> None:
    """`S - m` is a whole number, so exp2 is exact; P are powers of two, and their sums and products need few bits."""
    policy = POLICIES[name]() if name not in ("fp8", "int8") else Precision.parse("kernel_fp16")
    softmax = OnlineSoftmax(exp=Exponential.EXP2, normalise=Normalise.END)
    tiling, scale = Tiling(16, 16), 1.0 / softmax.log_scale  # the folded factor log2(e) is taken out again
    inputs = on(device, policy.round_inputs(*whole(SIZES)))
    got = Instrumented(policy, tiling, softmax)(*inputs, fitted(MASKS[mask], 53), scale)
    expected = Tiled(policy, tiling, softmax)(*inputs, fitted(MASKS[mask], 53), scale)
    assert torch.equal(got.out, expected.out)
    empty = lse_of(expected) == float("-inf")
    assert torch.equal(lse_of(got) == float("-inf"), empty)


@pytest.mark.parametrize(("name", "loop"), every(3, NARROW, LOOPS))
def test_close_to_the_emulation_elsewhere(name: str, loop: str, device: str) -> None:
    """A last bit of FP32 can tip a rounding to the step's format, by one ulp of that step; few elements are at such an edge.

    So nearly all elements agree to the bit, and none is further off than 4 ulp of the coarsest step at the size of the
    largest v: a tipped score moves P by u times |S|, at most 4 here, and with it the output.
    """
    policy, (tiling, softmax) = POLICIES[name](), LOOPS[loop]
    inputs = on(device, policy.round_inputs(*draw(SIZES)))
    got = Instrumented(policy, tiling, softmax)(*inputs, Mask(causal=True))
    expected = Tiled(policy, tiling, softmax)(*inputs, Mask(causal=True))
    difference = (got.out - expected.out).abs()
    coarsest = max(cast.to.u for cast in policy.casts())
    assert float(difference.max()) <= 4 * 2 * coarsest * float(inputs[2].abs().max())
    assert float((difference == 0).float().mean()) > 0.9


def test_products_between_roundings_of_a_sum(device: str) -> None:
    """`Dot.every`: BF16 running sums after every 4, 5 and 8 products."""
    base = Precision.parse("kernel_bf16")
    steps = {"scores": "bf16@4", "row_sum": "bf16@5", "values": "bf16@8"}
    for field, text in steps.items():
        policy = base.with_step(**{field: text})
        inputs = on(device, policy.round_inputs(*whole(SIZES)))
        scale = 1.0 / BINARY.log_scale
        got = Instrumented(policy, Tiling(16, 16), BINARY)(*inputs, Mask(), scale)
        expected = Tiled(policy, Tiling(16, 16), BINARY)(*inputs, Mask(), scale)
        assert torch.equal(got.out, expected.out), field
        plain = Tiled(base, Tiling(16, 16), BINARY)(*inputs, Mask(), scale)
        if field != "scores":  # small whole scores are exact either way
            assert not torch.equal(got.out, plain.out), f"{field}: rounding must show"


@pytest.mark.parametrize("inputs", ["bf16", "bf16:toward_zero"])
def test_scaled_queries_are_rounded_once(inputs: str, device: str) -> None:
    """`scale_on=queries` equals factor 1 on queries that rational arithmetic scales and rounds."""
    policy = Precision.parse("kernel_bf16").with_step(inputs=inputs)
    q, k, v = policy.round_inputs(*draw((1, 1, 1, 19, 23, 16)))
    scaled = on(device, (exactly_scaled(q, 0.7, Cast.parse(inputs)), k, v))
    tiling = Tiling(16, 16)
    got = Instrumented(policy, tiling, OnlineSoftmax(scale_on=ScaleOn.QUERIES))(*on(device, (q, k, v)), Mask(), 0.7)
    expected = Instrumented(policy, tiling)(*scaled, Mask(), 1.0)
    assert torch.equal(got.out, expected.out)
    assert torch.equal(lse_of(got), lse_of(expected))


@pytest.mark.parametrize("text", ["e4m3fn", "e5m7finite", "bf16:saturate"])
@pytest.mark.parametrize("step", ["exponential", "rescale"])
@pytest.mark.parametrize("maximum", Maximum)
def test_what_is_not_seen_is_never_rounded(maximum: Maximum, step: str, text: str, device: str) -> None:
    """A format without infinity: masked keys have no part, and no row is NaN."""
    policy = Precision.parse("kernel_bf16").with_step(**{step: text})
    softmax = OnlineSoftmax(exp=Exponential.EXP2, maximum=maximum)
    inputs = on(device, policy.round_inputs(*whole(SIZES)))
    mask, scale = Mask(causal=True, window=30), 1.0 / softmax.log_scale
    got = Instrumented(policy, Tiling(16, 16), softmax)(*inputs, mask, scale)
    expected = Tiled(policy, Tiling(16, 16), softmax)(*inputs, mask, scale)
    assert bool(got.out.isfinite().all())
    assert torch.equal(got.out, expected.out)


@pytest.mark.parametrize("field", ["accumulator", "row_sum", "values", "scores"])
@pytest.mark.parametrize("text", ["bf16:toward_zero", "fp16:toward_zero", "bf16"])
def test_sums_of_wide_numbers_are_rounded_once(text: str, field: str, device: str) -> None:
    """One narrow step among FP32 ones: in the kernel and in the emulation an operation rounds once, and the bits are the same.

    Products and exponentials are exact (whole scores, powers of two), so that only the sums and the rescales round.
    """
    base = Precision.parse("kernel_bf16")
    policy = base.with_step(**{field: text if field == "accumulator" else f"{text}@3"})
    inputs = on(device, policy.round_inputs(*whole(SIZES)))
    scale = 1.0 / BINARY.log_scale
    got = Instrumented(policy, Tiling(16, 16), BINARY)(*inputs, Mask(causal=True), scale)
    expected = Tiled(policy, Tiling(16, 16), BINARY)(*inputs, Mask(causal=True), scale)
    assert torch.equal(got.out, expected.out)


def test_one_step_toward_zero(device: str) -> None:
    policy = Precision.parse("kernel_bf16").with_step(probabilities="e4m3fn:toward_zero:saturate")
    inputs = on(device, policy.round_inputs(*draw(SIZES)))
    got = Instrumented(policy, Tiling(16, 16))(*inputs, Mask())
    expected = Tiled(policy, Tiling(16, 16))(*inputs, Mask())
    assert float((got.out != expected.out).float().mean()) < 0.02


def test_the_kernel_is_named(device: str) -> None:
    policy = Precision.parse("bf16")
    inputs = on(device, policy.round_inputs(*draw(SIZES)))
    assert Instrumented(policy, Tiling(16, 32))(*inputs, Mask()).kernel == "numdev instrumented br=16 bc=32 warps=4 stages=2"


@pytest.mark.parametrize(
    ("policy", "tiling", "softmax", "field"),
    [
        (mixed(), Tiling(), OnlineSoftmax(), "precision"),
        (Precision.golden(), Tiling(), OnlineSoftmax(), "precision"),
        (Precision.parse("bf16"), Tiling(order=Order.STRIDED), OnlineSoftmax(), "tiling.order"),
        (Precision.parse("bf16"), Tiling(bc=300), OnlineSoftmax(), "tiling.bc"),
        (Precision.parse("bf16"), Tiling(), OnlineSoftmax(tie_shift=2.0), "softmax.tie_shift"),
        (Precision.parse("bf16"), Tiling(), OnlineSoftmax(exp=Exponential.parse("exp2_poly4")), "softmax.exp"),
        (Precision.parse("bf16"), Tiling(), OnlineSoftmax(exp=Exponential.parse("exp2_fa4")), "softmax.exp"),
        (Precision.parse("bf16"), Tiling(), OnlineSoftmax(sum_over=SumOver.PROBABILITIES), "softmax.sum_over"),
        (Precision.parse("sage3"), Tiling(), OnlineSoftmax(), "precision.quantise.smoothing"),
        (Precision.parse("sage3").with_step(inputs="bf16"), Tiling(), OnlineSoftmax(), "precision.probabilities"),
        (
            Precision.int8().with_step(inputs=Quantised(Cast(INT8), smoothing=Smoothing.Q)),
            Tiling(),
            OnlineSoftmax(),
            "precision.quantise.smoothing",
        ),
    ],
)
def test_refusals_name_the_field(policy: Precision, tiling: Tiling, softmax: OnlineSoftmax, field: str, device: str) -> None:
    with pytest.raises(Unsupported) as error:
        Instrumented(policy, tiling, softmax)(*on(device, draw(SIZES)), Mask())
    assert error.value.field == field
