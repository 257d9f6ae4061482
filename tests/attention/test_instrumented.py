"""The instrumented kernels of both passes against the emulation that specifies them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from numdev.attention.base import Gradients, Saved
from numdev.attention.instrumented import Instrumented, InstrumentedBackward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import DeltaForm, Exponential, Maximum, Normalise, OnlineSoftmax, Recompute, ScaleOn
from numdev.attention.steps import LOG2_E
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from tests.cases import POLICIES, Inputs, Sizes, draw, draw_all, on, same

SIZES: Sizes = (1, 2, 1, 20, 37, 24)
Inputs3 = tuple[Tensor, Tensor, Tensor]
BINARY = OnlineSoftmax(exp=Exponential.EXP2)

LOOPS = [
    (Tiling(20, 13, Order.REVERSE, splits=2), OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=8.0)),
    (Tiling(16, 32), OnlineSoftmax(exp=Exponential.EXP2, scale_on=ScaleOn.QUERIES, p_scale=256.0)),
    (Tiling(16, 16), OnlineSoftmax(normalise=Normalise.EACH, maximum=Maximum.LOCAL)),  # FlashAttention-1
    (Tiling(16, 16, splits=2), OnlineSoftmax(exp=Exponential.EXP2, maximum=Maximum.LOCAL, p_scale=127.0)),
]


def whole(sizes: Sizes) -> Inputs3:
    """Inputs whose every product and sum is exact in FP32, in whatever order: scores are whole numbers of at most 4.

    So P are powers of two from 2^-8 to 1, v whole numbers of at most 4, and a sum of 64 of their products needs 8 + 2 + 6 bits.
    """
    q, k, v = draw(sizes)
    q[..., 4:] = 0
    return (3 * q).round().clamp(-1, 1), (3 * k).round().clamp(-1, 1), (2 * v).round().clamp(-4, 4)


STEPS = {"scores": "tf32:toward_zero@8", "row_sum": "fp16@8", "values": "bf16@16", "exponential": "bf16:toward_zero"}
STEPS |= {"rescale": "e5m10:flush", "accumulator": "tf32", "inputs": "fp16", "probabilities": "e4m3fn", "output": "bf16"}
EITHER = [*(POLICIES[name] for name in ("uniform_e5m2", "uniform_fp16", "eager_bf16", "narrow_sum", "fp8", "int8"))]
EITHER += [Precision.parse("fp32").with_step(**STEPS)]


@pytest.mark.parametrize("policy", EITHER)
def test_close_to_the_emulation_elsewhere(policy: Precision, device: str) -> None:
    """A last bit of FP32 can tip a rounding to the step's format, by one ulp of that step; few elements are at such an edge.

    So nearly all elements agree to the bit, and none is further off than 4 ulp of the coarsest step at the size of the
    largest v: a tipped score moves P by u times |S|, at most 4 here, and with it the output.
    """
    tiling, softmax = LOOPS[EITHER.index(policy) % len(LOOPS)]
    inputs, mask = on(device, policy.round_inputs(*draw(SIZES))), Mask(causal=True)
    got = Instrumented(policy, tiling, softmax)(*inputs, mask).out
    difference = (got - Tiled(policy, tiling, softmax, count=False)(*inputs, mask).out).abs()
    coarsest = max(cast.to.u for cast in policy.casts())
    assert float(difference.max()) <= 4 * 2 * coarsest * float(inputs[2].abs().max())
    assert float((difference == 0).float().mean()) > 0.9


BACKWARD_SIZES: Sizes = (1, 2, 1, 20, 24, 8)
FORWARD = Tiled(Precision.parse("kernel_fp16"), count=False)
BINARY_RECOMPUTE = Recompute(exponential=Exponential.EXP2)


def saved_whole(sizes: Sizes, mask: Mask, seed: int) -> tuple[Inputs, Saved]:
    """Inputs, O and LSE whose every product and sum is exact in FP32, in whatever order, with a factor of the scores of 1.

    The first four numbers of a row of q and k are -1, 0 or 1, two of v -2 to 2, two of do and O -3 to 3; the rest are 0. So S is
    a whole number of at most 4, and P = 2^(S - LSE) a power of two from 2^-8 to 1, LSE being 4 in binary units; dP and delta are
    whole, at most 12 and 18. A sum over 80 rows of P (dP - delta) q needs 8 + 5 + 7 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, queries, keys, dim = sizes

    def numbers(shape: tuple[int, ...], largest: int, filled: int) -> Tensor:
        drawn = torch.randint(-largest, largest + 1, shape, generator=generator).float()
        drawn[..., filled:] = 0
        return drawn

    of_queries, of_keys = (batch, heads, queries, dim), (batch, kv_heads, keys, dim)
    out = numbers(of_queries, 3, 2)
    lse = torch.full(out.shape[:3], binary_lse(4))
    seeing = mask.seeing_rows(batch, queries, keys)[:, None]
    saved = Saved(out.masked_fill(~seeing[..., None], 0.0), lse.masked_fill(~seeing, float("-inf")))
    return (numbers(of_queries, 1, 4), numbers(of_keys, 1, 4), numbers(of_keys, 2, 2), numbers(of_queries, 3, 2)), saved


def binary_lse(whole: int) -> float:
    """An FP32 number that is `whole` when it is multiplied by log2(e) in FP32."""
    near = torch.tensor(whole / LOG2_E)
    for _ in range(4):
        if float(near * LOG2_E) == whole:
            return float(near)
        near = torch.nextafter(near, torch.tensor(float("inf")))
    raise AssertionError("there is one for every power of two")


def both(
    precision: BackwardPrecision, tiling: Tiling, recompute: Recompute, problem: tuple[Inputs, Saved], mask: Mask, device: str
) -> tuple[Gradients, Gradients]:
    """Of the kernels and of the emulation, with a scale that log2(e) takes out again."""
    inputs, (out, lse) = on(device, problem[0]), on(device, (problem[1].out, problem[1].lse))
    scale, kernel = 1.0 / LOG2_E, InstrumentedBackward(FORWARD, precision, tiling, recompute)
    emulation = TiledBackward(FORWARD, precision, tiling, recompute, count=False)
    return kernel.backward(*inputs, Saved(out, lse), mask, scale), emulation.backward(*inputs, Saved(out, lse), mask, scale)


@pytest.mark.parametrize("text", ["bf16:toward_zero", "fp16:toward_zero"])
def test_a_running_sum_is_rounded_once(text: str, device: str) -> None:
    """P of the second tile of queries are 2^-28 of the first's: FP32 has no room for both, and would round twice."""
    (inputs, saved), policy = saved_whole((1, 2, 1, 32, 20, 8), Mask(), 1), BackwardPrecision.parse("fp32")
    saved.lse[..., 16:] = binary_lse(32)
    policy = policy.with_step(dk_sum=text, dv_sum=text)
    got, expected = both(policy, Tiling(16, 16), BINARY_RECOMPUTE, (inputs, saved), Mask(), device)
    same(got, expected.tensors())


@pytest.mark.parametrize(("name", "form"), [("bf16", DeltaForm.OUTPUT), ("eager_fp16", DeltaForm.PROBABILITIES)])
def test_close_to_the_backward_emulation_elsewhere(name: str, form: DeltaForm, device: str) -> None:
    """After the instrumented forward pass. None is off by more than the tipping of every term of its sum in each step.

    There are eight steps between inputs and output: `8 * 2 u` of the sum of magnitudes, of which there are at most 40.
    """
    policy, recompute, mask = BackwardPrecision.parse(name), Recompute(form), Mask(causal=True)
    forward, inputs = Instrumented(FORWARD.precision, Tiling(16, 16)), on(device, policy.round_inputs(*draw_all(BACKWARD_SIZES)))
    got = InstrumentedBackward(forward, policy, Tiling(16, 32), recompute)(*inputs, mask)
    expected = TiledBackward(forward, policy, Tiling(16, 32), recompute, count=False)(*inputs, mask)
    assert got.kernel.startswith("numdev instrumented backward br=16 bc=32 ")
    coarsest = max(cast.to.u for cast in policy.casts())
    for key, value in expected.tensors().items():
        difference = (got.tensors()[key] - value).abs()
        assert float(difference.max()) <= 8 * 2 * coarsest * 40 * float(value.abs().max()), key
        assert float((difference == 0).float().mean()) > 0.85 or key == "delta", key
