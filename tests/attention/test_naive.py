"""Naive attention against its three lines written head by head, against torch's own operations, and against Exact."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev.arithmetic.formats import BF16, FP16, Format
from numdev.attention import naive
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.softmax import Exponential, Normalise
from tests.cases import MASKS, POLICIES, U64, draw, lse_error, lse_of, output_error, reach
from tests.oracles.double_loop import NEVER, add, decayed, is_fully_masked, over, times, visibility

SIZES = (2, 4, 2, 37, 53, 24)
SCALE = 0.21


def head_by_head(
    q: Tensor, k: Tensor, v: Tensor, step: Precision, mask: Mask, scale: float, normalise: Normalise
) -> tuple[Tensor, Tensor]:
    """`S = scale Q K^T; P = exp(S - rowmax S); O = (P / l) V` for one head at a time, a cast after every operation."""
    out, lse = torch.zeros(*q.shape[:-1], v.shape[-1], dtype=q.dtype), torch.zeros(q.shape[:-1], dtype=q.dtype)
    sums = step.row_sum.accumulate
    for b in range(q.shape[0]):
        seen = visibility(mask, b, q.shape[2], k.shape[2])
        for h in range(q.shape[1]):
            g = h // (q.shape[1] // k.shape[1])
            s = times(step.scores.accumulate, step.scores(q[b, h], k[b, g].T), scale)
            s = torch.where(seen, s, NEVER)
            m = s.amax(1, keepdim=True)
            p = decayed(step.exponential, s, m, Exponential.EXP)
            row_sum = step.row_sum.sum(p)
            empty = row_sum == 0
            divisor = torch.where(empty, 1.0, row_sum)
            lse[b, h] = torch.where(empty, NEVER, add(sums, sums(torch.log(divisor)), torch.where(empty, 0.0, m)))[:, 0]
            if normalise is Normalise.EACH:
                product = step.values(step.probabilities(over(step.exponential, p, divisor)), v[b, g])
            else:
                product = step.accumulator(step.values(step.probabilities(p), v[b, g]))
                product = over(step.accumulator, product, divisor)
            out[b, h] = step.output(product)
    return out, lse


@settings(max_examples=25)
@given(st.sampled_from(sorted(POLICIES)), st.sampled_from(sorted(MASKS)), st.sampled_from(Normalise))
def test_every_policy_is_its_three_lines(name: str, mask: str, normalise: Normalise) -> None:
    precision = POLICIES[name]()
    q, k, v = precision.round_inputs(*draw(SIZES))
    got = Naive(precision, normalise)(q, k, v, MASKS[mask], SCALE)
    out, lse = head_by_head(q, k, v, precision, MASKS[mask], SCALE, normalise)
    assert got.out.dtype is lse_of(got).dtype is precision.carrier
    assert torch.equal(got.out, out)
    assert torch.equal(lse_of(got), lse)


@pytest.mark.parametrize("normalise", Normalise)
@pytest.mark.parametrize("mask", MASKS)
def test_in_double_precision_it_is_exact(mask: str, normalise: Normalise) -> None:
    """Both are within their bound of the truth, so within twice of each other; dividing P first adds one rounding."""
    q, k, v = draw(SIZES)
    got, want = Naive(Precision.golden(), normalise)(q, k, v, MASKS[mask]), Exact()(q, k, v, MASKS[mask])
    a = reach(q, k, 24**-0.5)
    assert float((got.out - want.out).abs().max()) <= 2 * (output_error(24, 53, a) + 1) * U64 * float(v.abs().max())
    empty = is_fully_masked(MASKS[mask], 2, 37, 53)[:, None].expand(2, 4, 37)
    assert torch.equal(lse_of(got).isneginf(), empty)
    assert bool((got.out[empty] == 0).all())
    assert float((lse_of(got) - lse_of(want))[~empty].abs().max()) <= 2 * lse_error(24, 53, a) * U64


@pytest.mark.parametrize("normalise", Normalise)
@pytest.mark.parametrize("name", ["kernel_bf16", "uniform_fp16", "golden", "mixed"])
def test_blocks_of_rows_change_no_bit(name: str, normalise: Normalise, monkeypatch: pytest.MonkeyPatch) -> None:
    precision = POLICIES[name]()
    inputs = precision.round_inputs(*draw(SIZES))
    whole = Naive(precision, normalise)(*inputs, Mask(causal=True))
    monkeypatch.setitem(naive._WORKSPACE, "cpu", 1)
    blocks = Naive(precision, normalise)(*inputs, Mask(causal=True))
    assert torch.equal(blocks.out, whole.out)
    assert torch.equal(lse_of(blocks), lse_of(whole))


def flips(terms: Tensor, magnitude: Tensor, count: int, fmt: Format) -> Tensor:
    """Chance that two FP32 sums in different orders round to different numbers of `fmt`.

    n roundoffs of either sign make `sqrt(n) 2^-24 sum |terms|` (Higham & Mary 2019, Theorem 2.4; the worst case is n). Two
    numbers a distance apart fall on two sides of a breakpoint with the chance `distance / spacing`.
    """
    return (2 * math.sqrt(count) * 2.0**-24 * terms / fmt.ulp(magnitude)).clamp(max=1)


@pytest.mark.parametrize(("fmt", "dtype"), [(BF16, torch.bfloat16), (FP16, torch.float16)], ids=str)
@pytest.mark.parametrize(("tokens", "dim", "seed"), [(64, 64, 0), (200, 32, 1), (100, 24, 2)])
def test_eager_is_what_torch_does(fmt: Format, dtype: torch.dtype, tokens: int, dim: int, seed: int) -> None:
    """Equal but for elements where another order of an FP32 sum crosses a breakpoint, and those differ by one ulp.

    The share: where S flips (chance `flips`), it moves by an ulp, so p_j moves by p_j ulp(S) relative and an element of
    its row by `p_j ulp(S) |v_j|`, which flips it with the chance of that over ulp(O). P itself is FP32 inside, off by
    some `8 + |S|` roundoffs of 2^-24, and flips alike. The size: in ulp of the row's largest element, since an element
    near zero is the difference of large ones.
    """
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(2, 2, tokens, dim, generator=generator).to(dtype) for _ in range(3))
    scale = 1 / math.sqrt(dim)
    native = (torch.softmax((q @ k.mT) * scale, -1) @ v).double()
    q, k, v = q.float(), k.float(), v.float()
    ours = Naive(Precision.eager(fmt))(q, k, v, Mask(), scale).out.double()
    q, k, v = q.double(), k.double(), v.double()
    s = q @ k.mT
    p = torch.softmax(s * scale, -1)
    s_flips = flips(q.abs() @ k.abs().mT, s, dim, fmt)
    p_flips = flips((8 + s.abs() * scale) * p, p, 1, fmt)
    moved = (s_flips * p * scale * fmt.ulp(s) + p_flips * fmt.ulp(p)) @ v.abs()
    share = (moved / fmt.ulp(ours) + flips(p @ v.abs(), ours, tokens, fmt)).clamp(max=1).mean()
    different = native != ours
    assert float(share) < 0.25, "or the bound says nothing"
    assert float(different.double().mean()) <= float(share)
    assert bool(((native - ours).abs() <= fmt.ulp(ours.abs().amax(-1, keepdim=True))).all())


def test_overflow_of_fp16_scores_is_seen() -> None:
    """Scores beyond 65504 become infinite, and `inf - inf` NaN, as in a half-precision matmul; -inf is a masked key."""
    huge = torch.full((1, 1, 16, 16), 200.0)
    precision = Precision.uniform(FP16)
    assert bool(Naive(precision)(huge, huge, huge, Mask(), 1.0).out.isnan().all())
    negative = Naive(precision)(huge, -huge, huge, Mask(), 1.0)
    assert bool(lse_of(negative).isneginf().all())
    assert bool((negative.out == 0).all())
