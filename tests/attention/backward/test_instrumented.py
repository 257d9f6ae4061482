"""The instrumented backward kernels against the emulation that specifies them."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from numdev.attention.base import Gradients, Saved
from numdev.attention.instrumented import Instrumented, InstrumentedBackward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import DeltaForm, Exponential, Recompute
from numdev.attention.steps import LOG2_E
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.errors import Unsupported
from tests.attention.backward.cases import Inputs, draw_all
from tests.cases import MASKS, Sizes, fitted

SIZES: Sizes = (2, 2, 1, 20, 37, 8)
FORWARD = Tiled(Precision.parse("kernel_fp16"), count=False)
BINARY = Recompute(exponential=Exponential.EXP2)


def whole(sizes: Sizes, mask: Mask, seed: int) -> tuple[Inputs, Saved]:
    """Inputs, O and LSE whose every product and sum is exact in FP32, in whatever order, with a factor of the scores of 1.

    The first four numbers of a row of q and k are -1, 0 or 1, two of v -2 to 2, two of do and O -3 to 3; the rest are 0. So S is
    a whole number of at most 4, and P = 2^(S - LSE) a power of two from 2^-8 to 1, LSE being 4 in binary units; dP and delta are
    whole, at most 12 and 18. A sum over 80 rows of P (dP - delta) q needs 8 + 5 + 7 bits.
    """
    generator = torch.Generator().manual_seed(seed)
    batch, heads, kv_heads, queries, keys, dim = sizes

    def numbers(shape: tuple[int, ...], largest: int, filled: int) -> Tensor:
        found = torch.randint(-largest, largest + 1, shape, generator=generator).float()
        found[..., filled:] = 0
        return found

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
    precision: BackwardPrecision, tiling: Tiling, recompute: Recompute, given: tuple[Inputs, Saved], mask: Mask, device: str
) -> tuple[Gradients, Gradients]:
    """Of the kernels and of the emulation, with a scale that log2(e) takes out again."""
    inputs, saved = given
    q, k, v, do = moved(inputs, device)
    saved = Saved(saved.out.to(device), saved.lse.to(device))
    scale = 1.0 / LOG2_E
    got = InstrumentedBackward(FORWARD, precision, tiling, recompute).backward(q, k, v, do, saved, mask, scale)
    expected = TiledBackward(FORWARD, precision, tiling, recompute, count=False).backward(q, k, v, do, saved, mask, scale)
    return got, expected


CASTS = ("fp32", "fp32", "bf16", "fp16", "e5m2", "tf32", "bf16:toward_zero", "e4m3fn:saturate", "e5m10:toward_zero", "e8m3")


def drawn_policy(chance: random.Random) -> BackwardPrecision:
    """Any step in any format, some sums rounded within a tile; the inputs are exact in all of them."""
    policy = BackwardPrecision.parse("kernel_bf16")
    dots = {"scores", "dp", "delta", "dq", "dk", "dv"}
    steps = {}
    for name in policy.steps():
        text = chance.choice(CASTS)
        if name in dots and chance.random() < 0.4:
            text += f"@{chance.choice((3, 5, 8, 16))}"
        steps[name] = text
    return policy.with_step(**steps | {"inputs": "bf16"})


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=[] if seed < 8 else [pytest.mark.exhaustive]) for seed in range(16)])
def test_the_same_bits_where_everything_is_exact(seed: int, device: str) -> None:
    """Random policies, masks, tiles, orders and shapes."""
    chance = random.Random(seed)
    policy = drawn_policy(chance)
    mask = MASKS[chance.choice(list(MASKS))]
    batch, (heads, kv_heads) = 1 if mask.key_lengths is None else 2, chance.choice([(2, 1), (1, 1), (4, 2)])
    sizes = batch, heads, kv_heads, chance.randint(1, 36), chance.randint(1, 40), chance.choice((8, 20))
    mask = fitted(mask, sizes[4])
    tiling = Tiling(chance.choice((7, 16, 20, 32)), chance.choice((11, 16, 32)), chance.choice((Order.FORWARD, Order.REVERSE)))
    recompute = Recompute(chance.choice(list(DeltaForm)), exponential=Exponential.EXP2)
    got, expected = both(policy, tiling, recompute, whole(sizes, mask, seed), mask, device)
    assert not same(got, expected), (policy, sizes, mask, tiling, recompute)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["bf16", "kernel_fp16", "e5m2"])
def test_the_same_bits_of_every_preset_under_every_mask(name: str, mask: str, device: str) -> None:
    fit = fitted(MASKS[mask], 37)
    got, expected = both(BackwardPrecision.parse(name), Tiling(16, 16), BINARY, whole(SIZES, fit, 7), fit, device)
    assert not same(got, expected)
    assert bool((expected.dq != 0).any())


@pytest.mark.parametrize("text", ["bf16:toward_zero", "fp16:toward_zero"])
def test_a_running_sum_is_rounded_once(text: str, device: str) -> None:
    """P of the second tile of queries are 2^-28 of the first's: FP32 has no room for both, and would round twice."""
    (inputs, saved), policy = whole((1, 2, 1, 32, 20, 8), Mask(), 1), BackwardPrecision.parse("fp32")
    saved.lse[..., 16:] = binary_lse(32)
    policy = policy.with_step(dk_sum=text, dv_sum=text)
    got, expected = both(policy, Tiling(16, 16), BINARY, (inputs, saved), Mask(), device)
    assert not same(got, expected)


STEPS = [name for name in BackwardPrecision.parse("kernel_bf16").steps() if name not in ("inputs", "output", "scores")]


@pytest.mark.parametrize("step", STEPS)
def test_each_step_rounds_where_the_emulation_does(step: str, device: str) -> None:
    """One step in two fraction bits among FP32 ones: the bits are the emulation's, and not those of FP32."""
    base = BackwardPrecision.parse("fp32")
    policy = base.with_step(**{step: "e8m1:toward_zero"})
    given = whole(SIZES, Mask(), 3)
    if step in ("exponential", "probabilities"):
        lse = torch.full_like(given[1].lse, 1.3)  # P are no powers of two
        given = given[0], Saved(given[1].out, lse)
    got, expected = both(policy, Tiling(16, 16), BINARY, given, Mask(), device)
    plain, _ = both(base, Tiling(16, 16), BINARY, given, Mask(), device)
    if step not in ("exponential", "probabilities"):
        assert not same(got, expected)
    changed = {"delta": "delta", "dv": "dv", "dv_sum": "dv", "probabilities": "dv", "dk": "dk", "dk_sum": "dk"}.get(step, "dq")
    assert changed in same(got, plain), "rounding must show"


@pytest.mark.parametrize(
    ("name", "exp", "form"),
    [
        ("bf16", Exponential.EXP, DeltaForm.OUTPUT),
        ("kernel_bf16", Exponential.EXP2, DeltaForm.OUTPUT),
        ("eager_fp16", Exponential.EXP, DeltaForm.PROBABILITIES),
    ],
)
def test_close_to_the_emulation_elsewhere(name: str, exp: Exponential, form: DeltaForm, device: str) -> None:
    """A last bit of FP32 can tip a rounding to a step's format, by one ulp of that step; few elements are at such an edge.

    So nearly all elements agree to the bit, and none is off by more than the tipping of every term of its sum in each of the
    eight steps between inputs and output: `8 * 2 u` of the sum of magnitudes, of which there are at most 40.
    """
    policy, recompute, mask = BackwardPrecision.parse(name), Recompute(form, exponential=exp), Mask(causal=True)
    given = moved(policy.round_inputs(*draw_all(SIZES)), device)
    got = InstrumentedBackward(FORWARD, policy, Tiling(16, 16), recompute)(*given, mask)
    expected = TiledBackward(FORWARD, policy, Tiling(16, 16), recompute, count=False)(*given, mask)
    coarsest = max(cast.to.u for cast in policy.casts())
    for key, value in expected.tensors().items():
        difference = (got.tensors()[key] - value).abs()
        assert float(difference.max()) <= 8 * 2 * coarsest * 40 * float(value.abs().max()), key
        assert float((difference == 0).float().mean()) > 0.85 or key == "delta", key


def test_the_kernel_is_named(device: str) -> None:
    given = whole(SIZES, Mask(), 0)
    got, _ = both(BackwardPrecision.parse("bf16"), Tiling(16, 32), BINARY, given, Mask(), device)
    assert got.kernel.startswith("numdev instrumented backward br=16 bc=32 ")


def test_after_the_instrumented_forward_pass(device: str) -> None:
    """Any forward pass that saves an LSE serves."""
    given = moved(whole((1, 2, 1, 20, 20, 16), Mask(), 0)[0], device)
    forward = Instrumented(Precision.parse("kernel_bf16"), Tiling(16, 16))
    found = InstrumentedBackward(forward, BackwardPrecision.parse("kernel_bf16"), Tiling(16, 16))(*given, Mask())
    assert all(bool(x.isfinite().all()) for x in found.tensors().values())


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
def test_refusals_name_the_field(
    policy: BackwardPrecision, tiling: Tiling, recompute: Recompute, field: str, device: str
) -> None:
    inputs, saved = whole((1, 1, 1, 4, 4, 16), Mask(), 0)
    with pytest.raises(Unsupported) as error:
        InstrumentedBackward(FORWARD, policy, tiling, recompute).backward(
            *moved(inputs, device), Saved(saved.out.to(device), saved.lse.to(device)), Mask()
        )
    assert error.value.field == field


def test_one_split(device: str) -> None:
    with pytest.raises(Unsupported, match=r"tiling\.splits"):
        InstrumentedBackward(FORWARD, BackwardPrecision.parse("bf16"), Tiling(splits=2))
