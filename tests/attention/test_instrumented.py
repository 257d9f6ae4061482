"""The instrumented kernels of both passes against the emulation that specifies them."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch
from torch import Tensor

from numdev.attention.base import Gradients, Output, Saved
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented, InstrumentedBackward
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import DeltaForm, Exponential, Maximum, Normalise, OnlineSoftmax, Recompute, ScaleOn
from numdev.attention.steps import LOG2_E
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.errors import Unsupported
from tests.attention.bounds import bound
from tests.attention.gradients import Inputs, draw_all
from tests.cases import POLICIES, Sizes, draw, on

SIZES: Sizes = (1, 2, 1, 20, 37, 24)
NARROW = ["uniform_e5m2", "uniform_fp16", "eager_bf16", "narrow_sum", "fp8", "int8"]  # each with one of LOOPS
Inputs3 = tuple[Tensor, Tensor, Tensor]
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


def whole(sizes: Sizes) -> Inputs3:
    """Inputs whose every product and sum is exact in FP32, in whatever order: scores are whole numbers of at most 4.

    So P are powers of two from 2^-8 to 1, v whole numbers of at most 4, and a sum of 64 of their products needs 8 + 2 + 6 bits.
    """
    q, k, v = draw(sizes)
    q[..., 4:] = 0
    return (3 * q).round().clamp(-1, 1), (3 * k).round().clamp(-1, 1), (2 * v).round().clamp(-4, 4)


def forward_both(
    policy: Precision, loop: tuple[Tiling, OnlineSoftmax], inputs: Inputs3, mask: Mask, device: str, scale: float | None = None
) -> tuple[Output, Output]:
    """Of the kernel and of the emulation."""
    (tiling, softmax), (q, k, v) = loop, on(device, policy.round_inputs(*inputs))
    kernel, emulation = Instrumented(policy, tiling, softmax), Tiled(policy, tiling, softmax, count=False)
    return kernel(q, k, v, mask, scale), emulation(q, k, v, mask, scale)


@pytest.mark.parametrize("name", NARROW)
def test_close_to_the_emulation_elsewhere(name: str, device: str) -> None:
    """A last bit of FP32 can tip a rounding to the step's format, by one ulp of that step; few elements are at such an edge.

    So nearly all elements agree to the bit, and none is further off than 4 ulp of the coarsest step at the size of the
    largest v: a tipped score moves P by u times |S|, at most 4 here, and with it the output.
    """
    policy, loop, inputs = POLICIES[name](), list(LOOPS.values())[NARROW.index(name)], draw(SIZES)
    got, expected = forward_both(policy, loop, inputs, Mask(causal=True), device)
    difference = (got.out - expected.out).abs()
    coarsest = max(cast.to.u for cast in policy.casts())
    assert float(difference.max()) <= 4 * 2 * coarsest * float(inputs[2].abs().max())
    assert float((difference == 0).float().mean()) > 0.9


@pytest.mark.parametrize(
    ("text", "step", "maximum"),
    [
        *(("e4m3fn", step, maximum) for step in ("exponential", "rescale") for maximum in Maximum),
        *(("e5m7finite", "exponential", Maximum.LOCAL), ("bf16:saturate", "rescale", Maximum.RUNNING)),
    ],
)
def test_what_is_not_seen_is_never_rounded(text: str, step: str, maximum: Maximum, device: str) -> None:
    """A format without infinity: masked keys have no part, and no row is NaN."""
    policy = Precision.parse("kernel_bf16").with_step(**{step: text})
    softmax = OnlineSoftmax(exp=Exponential.EXP2, maximum=maximum)
    loop, mask = (Tiling(16, 16), softmax), Mask(causal=True, window=20)
    got, expected = forward_both(policy, loop, whole(SIZES), mask, device, 1.0 / softmax.log_scale)
    assert bool(got.out.isfinite().all())
    assert torch.equal(got.out, expected.out)


@pytest.mark.parametrize(
    ("field", "text"),
    [("accumulator", "bf16"), ("row_sum", "fp16:toward_zero"), ("values", "bf16"), ("scores", "fp16:toward_zero")],
)
def test_sums_of_wide_numbers_are_rounded_once(field: str, text: str, device: str) -> None:
    """One narrow step among FP32 ones: in the kernel and in the emulation an operation rounds once, and the bits are the same.

    Products and exponentials are exact (whole scores, powers of two), so that only the sums and the rescales round.
    """
    policy = Precision.parse("kernel_bf16").with_step(**{field: text if field == "accumulator" else f"{text}@3"})
    loop, mask = (Tiling(16, 16), BINARY), Mask(causal=True)
    got, expected = forward_both(policy, loop, whole(SIZES), mask, device, 1.0 / BINARY.log_scale)
    assert torch.equal(got.out, expected.out)


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


def moved(inputs: Inputs, device: str) -> Inputs:
    q, k, v, do = (x.to(device) for x in inputs)
    return q, k, v, do


def binary_lse(whole: int) -> float:
    """An FP32 number that is `whole` when it is multiplied by log2(e) in FP32."""
    near = torch.tensor(whole / LOG2_E)
    for _ in range(4):
        if float(near * LOG2_E) == whole:
            return float(near)
        near = torch.nextafter(near, torch.tensor(float("inf")))
    raise AssertionError("there is one for every power of two")


def same(got: Gradients, expected: Gradients) -> list[str]:
    """The outputs that differ in a bit, but for the sign of 0; any NaN is as good as any other."""
    pairs = {name: (x.cpu(), got.tensors()[name].cpu()) for name, x in expected.tensors().items()}
    return [name for name, (a, b) in pairs.items() if not bool(((a == b) | (a.isnan() & b.isnan())).all())]


def both(
    precision: BackwardPrecision, tiling: Tiling, recompute: Recompute, problem: tuple[Inputs, Saved], mask: Mask, device: str
) -> tuple[Gradients, Gradients]:
    """Of the kernels and of the emulation, with a scale that log2(e) takes out again."""
    inputs, saved = problem
    q, k, v, do = moved(inputs, device)
    saved = Saved(saved.out.to(device), saved.lse.to(device))
    scale = 1.0 / LOG2_E
    got = InstrumentedBackward(FORWARD, precision, tiling, recompute).backward(q, k, v, do, saved, mask, scale)
    expected = TiledBackward(FORWARD, precision, tiling, recompute, count=False).backward(q, k, v, do, saved, mask, scale)
    return got, expected


@pytest.mark.parametrize("text", ["bf16:toward_zero", "fp16:toward_zero"])
def test_a_running_sum_is_rounded_once(text: str, device: str) -> None:
    """P of the second tile of queries are 2^-28 of the first's: FP32 has no room for both, and would round twice."""
    (inputs, saved), policy = saved_whole((1, 2, 1, 32, 20, 8), Mask(), 1), BackwardPrecision.parse("fp32")
    saved.lse[..., 16:] = binary_lse(32)
    policy = policy.with_step(dk_sum=text, dv_sum=text)
    got, expected = both(policy, Tiling(16, 16), BINARY_RECOMPUTE, (inputs, saved), Mask(), device)
    assert not same(got, expected)


BACKWARD_STEPS = [name for name in BackwardPrecision.parse("kernel_bf16").steps() if name not in ("inputs", "output", "scores")]


@cache
def unrounded(lse: float | None, device: str) -> tuple[tuple[Inputs, Saved], Gradients]:
    """A problem, with one LSE for all rows where it is set, and its gradients by the kernels with every step in FP32."""
    inputs, saved = saved_whole(BACKWARD_SIZES, Mask(), 3)
    problem = inputs, saved if lse is None else Saved(saved.out, torch.full_like(saved.lse, lse))
    return problem, both(BackwardPrecision.parse("fp32"), Tiling(16, 16), BINARY_RECOMPUTE, problem, Mask(), device)[0]


@pytest.mark.parametrize("step", BACKWARD_STEPS)
def test_each_step_rounds_where_the_emulation_does(step: str, device: str) -> None:
    """One step in two fraction bits among FP32 ones: the bits are the emulation's, and not those of FP32."""
    policy = BackwardPrecision.parse("fp32").with_step(**{step: "e8m1:toward_zero"})
    of_p = step in ("exponential", "probabilities")
    problem, plain = unrounded(1.3 if of_p else None, device)  # so that P are no powers of two
    got, expected = both(policy, Tiling(16, 16), BINARY_RECOMPUTE, problem, Mask(), device)
    assert of_p or not same(got, expected)
    changed = {"delta": "delta", "dv": "dv", "dv_sum": "dv", "probabilities": "dv", "dk": "dk", "dk_sum": "dk"}.get(step, "dq")
    assert changed in same(got, plain), "rounding must show"


@pytest.mark.parametrize(
    ("name", "exp", "form"),
    [
        ("bf16", Exponential.EXP, DeltaForm.OUTPUT),
        ("eager_fp16", Exponential.EXP, DeltaForm.PROBABILITIES),
    ],
)
def test_close_to_the_backward_emulation_elsewhere(name: str, exp: Exponential, form: DeltaForm, device: str) -> None:
    """A last bit of FP32 can tip a rounding to a step's format, by one ulp of that step; few elements are at such an edge.

    So nearly all elements agree to the bit, and none is off by more than the tipping of every term of its sum in each of the
    eight steps between inputs and output: `8 * 2 u` of the sum of magnitudes, of which there are at most 40.
    """
    policy, recompute, mask = BackwardPrecision.parse(name), Recompute(form, exponential=exp), Mask(causal=True)
    inputs = moved(policy.round_inputs(*draw_all(BACKWARD_SIZES)), device)
    got = InstrumentedBackward(FORWARD, policy, Tiling(16, 16), recompute)(*inputs, mask)
    expected = TiledBackward(FORWARD, policy, Tiling(16, 16), recompute, count=False)(*inputs, mask)
    coarsest = max(cast.to.u for cast in policy.casts())
    for key, value in expected.tensors().items():
        difference = (got.tensors()[key] - value).abs()
        assert float(difference.max()) <= 8 * 2 * coarsest * 40 * float(value.abs().max()), key
        assert float((difference == 0).float().mean()) > 0.85 or key == "delta", key


def test_after_the_instrumented_forward_pass(device: str) -> None:
    """Any forward pass that saves an LSE serves."""
    inputs = moved(saved_whole((1, 2, 1, 20, 20, 16), Mask(), 0)[0], device)
    forward = Instrumented(Precision.parse("kernel_bf16"), Tiling(16, 16))
    got = InstrumentedBackward(forward, BackwardPrecision.parse("kernel_bf16"), Tiling(16, 32))(*inputs, Mask())
    assert all(bool(x.isfinite().all()) for x in got.tensors().values())
    assert got.kernel.startswith("numdev instrumented backward br=16 bc=32 ")


@pytest.mark.parametrize(
    ("policy", "tiling", "recompute", "field"),
    [
        (BackwardPrecision.golden(), Tiling(), Recompute(), "precision"),
        (BackwardPrecision.parse("bf16").with_step(dq="e8m13"), Tiling(), Recompute(), "precision"),
        (BackwardPrecision.parse("bf16").with_step(ds="bf16:stochastic"), Tiling(), Recompute(), "precision.ds"),
        (BackwardPrecision.parse("bf16"), Tiling(order=Order.STRIDED), Recompute(), "tiling.order"),
        (BackwardPrecision.parse("bf16"), Tiling(bc=300), Recompute(), "tiling.bc"),
        (
            BackwardPrecision.parse("bf16"),
            Tiling(),
            Recompute(exponential=Exponential.parse("exp2_poly4")),
            "recompute.exponential",
        ),
    ],
)
def test_backward_refusals_name_the_field(
    policy: BackwardPrecision, tiling: Tiling, recompute: Recompute, field: str, device: str
) -> None:
    inputs, saved = saved_whole((1, 1, 1, 4, 4, 16), Mask(), 0)
    with pytest.raises(Unsupported) as error:
        InstrumentedBackward(FORWARD, policy, tiling, recompute).backward(
            *moved(inputs, device), Saved(saved.out.to(device), saved.lse.to(device)), Mask()
        )
    assert error.value.field == field


DOTS = ("fp32", "fp16", "bf16", "tf32", "fp16@8", "bf16@16", "tf32:toward_zero@8")
NARROWER = ("fp32", "fp32", "fp16", "bf16", "tf32", "bf16:toward_zero", "e5m10:flush")
STEPS = {
    "scores": DOTS,
    "row_sum": DOTS,
    "values": DOTS,
    "exponential": NARROWER,
    "rescale": NARROWER,
    "accumulator": NARROWER,
}


def policy_of(seed: int) -> Precision:
    """Steps drawn one by one; inputs, P and output in a narrow format."""
    drawn = random.Random(seed)
    steps = {name: drawn.choice(formats) for name, formats in STEPS.items()}
    steps |= {name: drawn.choice(("fp16", "bf16", "tf32", "e4m3fn")) for name in ("inputs", "probabilities", "output")}
    return Precision.parse("fp32").with_step(**steps)


def case(seed: int) -> tuple[Precision, Tiling, OnlineSoftmax, Mask]:
    drawn = random.Random(-1 - seed)
    tiling = Tiling(16, drawn.choice((16, 20, 32)), drawn.choice((Order.FORWARD, Order.REVERSE)))
    softmax = OnlineSoftmax(exp=drawn.choice((Exponential.EXP, Exponential.EXP2)))
    return policy_of(seed), tiling, softmax, drawn.choice((Mask(), Mask(causal=True), Mask(causal=True, window=19)))


def kernel_and_tensors(seed: int, sizes: Sizes, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor, float]:
    """The outputs of the kernel and of tensor operations, the exact one, the bound, and the largest |v|."""
    policy, tiling, softmax, mask = case(seed)
    q, k, v = on(device, policy.round_inputs(*draw(sizes, seed, 0.5)))
    scale = q.shape[-1] ** -0.5
    kernel = Instrumented(policy, tiling, softmax)(q, k, v, mask, scale).out
    with by(Path.TENSORS):
        tensors = Tiled(policy, tiling, softmax, count=False)(q, k, v, mask, scale).out
    exact, e = bound(policy, tiling, softmax, (q, k, v), mask, scale)
    assert torch.allclose(exact, Exact()(q, k, v, mask, scale).out, rtol=0, atol=1e-12)
    return kernel.double(), tensors.double(), exact, e, float(v.abs().max())


def check_bound(seed: int, sizes: Sizes, device: str) -> bool:
    """Both within the bound; whether the bound of some element says something."""
    kernel, tensors, exact, e, largest = kernel_and_tensors(seed, sizes, device)
    for out in (kernel, tensors):
        assert bool(((out - exact).abs() <= e).all())
    assert bool(((kernel - tensors).abs() <= 2 * e).all())
    return float(e.min()) < largest


@pytest.mark.parametrize("seed", range(4))
def test_both_are_within_the_bound(seed: int, device: str) -> None:
    assert check_bound(seed, (1, 1, 1, 30, 48, 16), device)


def test_a_step_that_rounds_more_is_beyond_the_bound() -> None:
    """The bound of FP16's steps does not hold for a run whose accumulator, row sum or P is coarser."""
    policy, tiling, softmax, mask = Precision.parse("kernel_fp16"), Tiling(16, 16), OnlineSoftmax(), Mask()
    q, k, v = policy.round_inputs(*draw((1, 2, 2, 40, 48, 16), 0, 0.5))
    exact, e = bound(policy, tiling, softmax, (q, k, v), mask, 0.25)
    for step in ("scores", "exponential", "row_sum", "probabilities", "values", "accumulator", "output"):
        coarse = Tiled(policy.with_step(**{step: "e5m2"}), tiling, softmax, count=False)(q, k, v, mask, 0.25).out
        assert bool(((coarse - exact).abs() > e).any()), step
