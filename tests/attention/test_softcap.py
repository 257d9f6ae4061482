"""Softcaps and dropout with a given mask: every implementation that has them computes what autograd in FP64 and mpmath do."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import mpmath
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

import numdev as nd
from numdev.arithmetic.formats import BF16, FP32, FP64
from numdev.attention.base import Backward, Gradients
from numdev.attention.softmax import DeltaForm, SumOver
from numdev.errors import BadInput, Unsupported

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 9, 11, 4
TILING = nd.Tiling(br=4, bc=3)
RANDOM = torch.Generator().manual_seed(11)


def normal(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=RANDOM)


def tiled(recompute: nd.Recompute | None = None, **softmax: object) -> nd.TiledBackward:
    forward = nd.Tiled(nd.Precision.golden(), TILING, nd.OnlineSoftmax(**softmax))  # type: ignore[arg-type]
    return nd.TiledBackward(forward, nd.BackwardPrecision.golden(), TILING, recompute or nd.Recompute())


def dropout(p: float, *size: int) -> nd.Dropout:
    return nd.Dropout(torch.rand(size, generator=RANDOM) >= p, p)


IMPLEMENTATIONS: dict[str, Backward] = {
    "exact": nd.ExactBackward(),
    "naive": nd.NaiveBackward(nd.BackwardPrecision.golden(), nd.Precision.golden()),
    "tiled": tiled(),
    "tiled, exp2": tiled(nd.Recompute(exponential=nd.Exponential.EXP2), exp=nd.Exponential.EXP2),
    "tiled, divided each": tiled(normalise=nd.Normalise.EACH, maximum=nd.Maximum.LOCAL),
    "tiled, delta of P": tiled(nd.Recompute(delta=DeltaForm.PROBABILITIES), sum_over=SumOver.PROBABILITIES, p_scale=256.0),
    "tiled, scaled queries": tiled(scale_on=nd.ScaleOn.QUERIES),
    "vanilla": nd.VanillaBackward(FP64),
}
BIAS = nd.Bias(normal(1, HEADS, QUERIES, KEYS).masked_fill_(normal(1, HEADS, QUERIES, KEYS) > 1, -math.inf))
DROPPED = dropout(0.3, BATCH, HEADS, QUERIES, KEYS)
MASKS = {
    "softcap": nd.Mask(softcap=1.5),
    "softcap, causal": nd.Mask(causal=True, softcap=0.7),
    "softcap, bias": nd.Mask(bias=BIAS, softcap=1.5),
    "dropout": nd.Mask(dropout=DROPPED),
    "dropout of all heads, window": nd.Mask(causal=True, window=4, dropout=dropout(0.5, BATCH, 1, QUERIES, KEYS)),
    "all": nd.Mask(causal=True, bias=BIAS, softcap=1.5, dropout=DROPPED, key_lengths=(KEYS, 8)),
}


def oracle(q: Tensor, k: Tensor, v: Tensor, mask: nd.Mask, bias: Tensor | None = None) -> Tensor:
    """O by the formula, in operations of torch; rows that see no key are 0."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    s = q @ k.mT * q.shape[-1] ** -0.5
    if mask.softcap is not None:
        s = mask.softcap * torch.tanh(s / mask.softcap)
    if mask.bias is not None or bias is not None:
        s = s + (bias if mask.bias is None else mask.bias.values)
    limits = replace(mask, bias=None).visible(s.shape[-2], s.shape[-1], (0, s.shape[-2]), (0, s.shape[-1]), s.device)
    s = s if limits is None else s.masked_fill(~limits, -math.inf)
    empty = (s == -math.inf).all(-1, keepdim=True)
    p = s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    return (p if mask.dropout is None else p * mask.dropout.kept / (1 - mask.dropout.p)) @ v


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
def test_results_are_those_of_autograd(name: str, mask: nd.Mask) -> None:
    """FP64 throughout, scores below 20, sums of at most 36: a thousand u of 1e-16 stay below 1e-12."""
    q, do, k, v = (normal(BATCH, h, n, DIM) for h, n in [(HEADS, QUERIES)] * 2 + [(KV_HEADS, KEYS)] * 2)
    leaves, variant = [x.clone().requires_grad_() for x in (q, k, v)], IMPLEMENTATIONS[name]
    out = oracle(leaves[0], leaves[1], leaves[2], mask)
    expected = out.detach(), *torch.autograd.grad(out, leaves, do)
    made: Gradients = variant(q, k, v, do, mask)
    for mine, other in zip((variant.primal(q, k, v, mask).out, made.dq, made.dk, made.dv), expected, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-12)
    if made.delta is not None:
        assert torch.allclose(made.delta, (do * out.detach()).sum(-1), rtol=0, atol=1e-12)


@given(st.floats(0.05, 100), st.floats(0, 0.9), st.integers(0, 2**16))
def test_one_row_is_that_of_multiprecision_arithmetic(cap: float, p: float, seed: int) -> None:
    """Also where the cap saturates: dQ is `scale dS K` with `dS = P (dP - delta) / cosh^2(scale q k / cap)`.

    With `A` the largest `|scale q| |k|`, a score errs by some `A u`, so P by that relative to itself, and `1 / cosh^2` by
    `2 |x| u` of an x that is off by some u. So dS errs by that and a few u more relative to `P (|dP| + |delta|) / cosh^2`.
    """
    draw = torch.Generator().manual_seed(seed)
    q, k, v, do = (torch.randn(1, 1, n, 3, dtype=torch.float64, generator=draw) * 3 for n in (1, 6, 6, 1))
    kept = torch.rand(1, 1, 1, 6, generator=draw) >= p
    mask = nd.Mask(softcap=cap, dropout=nd.Dropout(kept, p))
    output, slopes = nd.Exact()(q, k, v, mask, 0.5), nd.ExactBackward()(q, k, v, do, mask, 0.5)
    with mpmath.workprec(200):
        rows = [[mpmath.mpf(x) for x in row] for row in k[0, 0].tolist()]
        x = [mpmath.mpf(0.5) * mpmath.fdot(q[0, 0, 0].tolist(), row) / cap for row in rows]
        exps = [mpmath.exp(cap * mpmath.tanh(one)) for one in x]
        total = mpmath.fsum(exps)
        z = [mpmath.mpf(one) / (1 - mpmath.mpf(p)) for one in kept.flatten().tolist()]
        weights = [e / total for e in exps]
        out = [
            mpmath.fsum(w * one * value for w, one, value in zip(weights, z, v[0, 0, :, i].tolist(), strict=True))
            for i in range(3)
        ]
        dp = [one * mpmath.fdot(do[0, 0, 0].tolist(), row) for one, row in zip(z, v[0, 0].tolist(), strict=True)]
        delta = mpmath.fdot(weights, dp)
        ds = [w * (each - delta) / mpmath.cosh(one) ** 2 for w, each, one in zip(weights, dp, x, strict=True)]
        a = 0.5 * float(q.abs().sum() * k.abs().max())
        size = [
            (10 + a + abs(one)) * w * (abs(each) + abs(delta)) / mpmath.cosh(one) ** 2
            for w, each, one in zip(weights, dp, x, strict=True)
        ]
        bounds = [20 * 2.0**-53 * mpmath.fdot(size, [abs(row[i]) for row in rows]) + 1e-300 for i in range(3)]
        dq = [mpmath.mpf(0.5) * mpmath.fdot(ds, [row[i] for row in rows]) for i in range(3)]
        assert output.lse is not None
        assert abs(output.lse.item() - mpmath.log(total)) <= 20 * (10 + a) * 2.0**-53
        bound = 20 * (10 + a) * 2.0**-53 * float(v.abs().max()) / (1 - p)
        assert all(abs(mine - other) <= bound for mine, other in zip(output.out.flatten().tolist(), out, strict=True))
        assert all(abs(mine - other) <= own for mine, other, own in zip(slopes.dq.flatten().tolist(), dq, bounds, strict=True))


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_large_cap_is_none_and_dropout_that_keeps_all_too(name: str) -> None:
    """`cap tanh(s / cap)` is off by `s^3 / (3 cap^2)`, below 1e-12 for scores below 20; no p gives the bits of no dropout."""
    q, k, v, do = (normal(1, 2, 8, DIM) for _ in range(4))
    variant = IMPLEMENTATIONS[name]
    plain, capped = variant(q, k, v, do, nd.Mask(causal=True)), variant(q, k, v, do, nd.Mask(causal=True, softcap=1e8))
    kept = nd.Mask(causal=True, dropout=nd.Dropout(torch.ones(1, 1, 8, 8, dtype=torch.bool), 0.0))
    for field in ("dq", "dk", "dv"):
        assert torch.allclose(getattr(plain, field), getattr(capped, field), rtol=0, atol=1e-11)
        assert torch.equal(getattr(plain, field), getattr(variant(q, k, v, do, kept), field))


@pytest.mark.parametrize("text", ["bf16", "kernel_bf16", "e5m6"])
def test_one_tile_has_the_bits_of_naive_and_br_changes_none(text: str) -> None:
    mask, precision = nd.Mask(causal=True, softcap=1.5, dropout=DROPPED), nd.Precision.parse(text)
    q, k, v = precision.round_inputs(normal(BATCH, HEADS, QUERIES, 8), *(normal(BATCH, KV_HEADS, KEYS, 8) for _ in range(2)))
    naive = nd.Naive(precision, nd.Normalise.END)(q, k, v, mask)
    one, few, many = (nd.Tiled(precision, nd.Tiling(br=br, bc=bc))(q, k, v, mask) for br, bc in ((16, 16), (2, 4), (8, 4)))
    for field in ("out", "lse"):
        assert torch.equal(getattr(naive, field), getattr(one, field))
        assert torch.equal(getattr(few, field), getattr(many, field))


def test_in_bf16_the_tanh_its_product_and_kept_probabilities_are_rounded_once() -> None:
    """One key: P is 1, the LSE the score `round(cap round(tanh(round(q k / cap))))`, and O `round(1 / (1 - p)) v`, rounded."""
    variant, cap, p = nd.Tiled(nd.Precision.parse("bf16"), TILING), 3.0, 0.3
    q, k, v = variant.round_inputs(normal(1, 1, 64, 1) * 4, normal(1, 1, 1, 1), normal(1, 1, 1, 1))
    kept = torch.arange(64)[None, None, :, None] % 2 == 0
    output = variant(q, k, v, nd.Mask(softcap=cap, dropout=nd.Dropout(kept, p)), 1.0)
    s = ((q @ k.mT).bfloat16().double() * (1 / cap)).bfloat16()
    s = (s.double().tanh().bfloat16().double() * cap).bfloat16()
    assert output.lse is not None
    assert torch.equal(output.lse.bfloat16(), s.squeeze(-1))
    weight = torch.tensor(1 / (1 - p), dtype=torch.float64).bfloat16()
    assert torch.equal(output.out.bfloat16(), (weight.double() * v.double() * kept).bfloat16())


def test_dropped_entries_are_counted_apart_from_flushed_ones() -> None:
    q, mask = normal(1, 1, 16, 4), nd.Mask(dropout=dropout(0.5, 1, 1, 16, 16))
    variant = nd.Tiled(nd.Precision.golden(), nd.Tiling(br=8, bc=8))
    assert variant(q, q, q, mask).counters == variant(q, q, q, nd.Mask()).counters
    back = nd.TiledBackward(variant, nd.BackwardPrecision.golden(), nd.Tiling(br=8, bc=8))
    assert back(q, q, q, q, mask).counters == back(q, q, q, q, nd.Mask()).counters


@pytest.mark.parametrize("name", ["exact", "tiled", "tiled, exp2"])
def test_a_learned_bias_is_added_after_the_cap(name: str) -> None:
    bias = normal(HEADS, QUERIES, KEYS).requires_grad_()
    q, do, k, v = (normal(BATCH, HEADS, n, DIM) for n in (QUERIES, QUERIES, KEYS, KEYS))
    leaves = [q.requires_grad_(), bias]
    expected = torch.autograd.grad(oracle(q, k, v, nd.Mask(softcap=1.5), bias), leaves, do)
    with nd.attend(IMPLEMENTATIONS[name]):
        own = torch.autograd.grad(nd.softcapped_attention(q, k, v, bias, softcap=1.5), leaves, do)
    for mine, other in zip(own, expected, strict=True):
        assert torch.allclose(mine, other, rtol=0, atol=1e-12)


def test_what_has_neither_refuses_it_by_name_and_bad_values_too() -> None:
    q = normal(1, 1, 4, 16).bfloat16()
    refused = {"problem.softcap": nd.Mask(softcap=5.0), "dropout": nd.Mask(dropout=dropout(0.5, 1, 1, 4, 4))}
    flash, flex = nd.Sdpa(nd.Backend.FLASH), nd.Flex()
    for name, mask in refused.items():
        for variant in (nd.Triton(BF16), flash, flex, nd.Instrumented(nd.Precision.kernel(BF16), TILING, nd.OnlineSoftmax())):
            with pytest.raises(Unsupported, match=f"^{name}: this implementation"):
                variant(q, q, q, mask)
    for cap in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(BadInput, match=r"^problem\.softcap"):
            nd.Problem(nd.Normal(), nd.Shape(queries=4, keys=4, head_dim=16), softcap=cap)
    with pytest.raises(BadInput, match="^dropout: .*must fit the scores"):
        nd.Exact()(q, q, q, nd.Mask(dropout=dropout(0.5, 1, 1, 4, 5)))
    for kept, p in ((torch.ones(1, 1, 4, 4), 0.5), (torch.ones(4, 4) > 0, 0.5), (torch.ones(1, 1, 4, 4) > 0, 1.0)):
        with pytest.raises(BadInput, match="^dropout"):
            nd.Dropout(kept, p)


def test_a_softcap_is_a_setting_of_a_problem_and_dropout_enters_its_configuration() -> None:
    problem = nd.Problem(nd.Normal(), nd.Shape(queries=16, keys=16, head_dim=8), softcap=2.0)
    assert problem.mask == nd.Mask(softcap=2.0)
    record = nd.measure(problem, nd.Tiled(nd.Precision.golden(), TILING), seeds=1)
    assert record.config["problem"]["mask"]["softcap"] == 2.0
    assert max(row["max_difference"] for row in record.rows if row["subject"] == "variant") < 1e-14
    one, other = dropout(0.5, 1, 1, 16, 16), dropout(0.5, 1, 1, 16, 16)
    assert one.describe() == nd.Dropout(one.kept.clone(), 0.5).describe() != other.describe()


class Layer(torch.nn.Module):
    """Attention with dropout as models call it."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=causal)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ["exact", "naive", "tiled"])
def test_under_a_model_dropout_of_a_seed_is_that_of_torch_on_a_cpu(name: str, causal: bool) -> None:
    q, k, v = (normal(2, 3, n, DIM).requires_grad_() for n in (5, 7, 7))

    def differentiated(*, again: bool = False) -> list[Tensor]:
        torch.manual_seed(3)
        layer = Layer()
        out = checkpoint(layer, q, k, v, causal=causal, use_reentrant=False) if again else layer(q, k, v, causal=causal)
        return [out, *torch.autograd.grad(out.square().sum(), (q, k, v))]

    expected = differentiated()
    for again in (False, True):  # a checkpointed layer draws the same again
        with nd.attend(IMPLEMENTATIONS[name], dropout=True):
            own = differentiated(again=again)
        for mine, other in zip(own, expected, strict=True):
            assert torch.allclose(mine, other, rtol=0, atol=1e-12)


def test_a_shadow_drops_the_same_of_all_and_without_asking_dropout_is_refused() -> None:
    q, k, v = (normal(1, 2, 6, DIM).requires_grad_() for _ in range(3))
    with nd.shadow({"tiled": IMPLEMENTATIONS["tiled"]}, nd.ExactBackward(), dropout=True) as log:
        Layer()(q, k, v).square().sum().backward()
    assert {row["output"] for row in log.rows} == {"out", "dq", "dk", "dv"}
    assert max(row["max_difference"] for row in log.rows) < 1e-12
    for context in (nd.attend(nd.ExactBackward()), nd.shadow({"exact": nd.ExactBackward()}, nd.ExactBackward())):
        with pytest.raises(Unsupported, match="^dropout_p: 0.4: give dropout=True"), context:
            Layer()(q, k, v)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_softcapped_attention_is_the_formula_without_a_context_and_is_kept(dtype: torch.dtype, tmp_path: Path) -> None:
    """In BF16 each of six operations rounds by 2^-9 of scores and values below 4, whose exponentials they enter."""
    q, k, v = normal(2, 4, 6, DIM), normal(2, 2, 6, DIM), normal(2, 2, 6, DIM)
    seen = torch.ones(6, 6).tril().bool()
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    mask = nd.Mask(causal=True, softcap=1.5)
    expected = oracle(q.detach().double(), k.detach().double(), v.detach().double(), mask)
    with nd.capture(torch.nn.Identity(), tmp_path) as captured:
        out = nd.softcapped_attention(q, k, v, seen, enable_gqa=True, softcap=1.5)
    assert out.dtype == dtype
    assert torch.allclose(out.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 0.1)
    out.sum().backward()
    assert all(x.grad is not None for x in (q, k, v))
    problem = nd.Problem(nd.Captured(str(captured.paths[0])), nd.Shape(2, 4, 2, 6, 6, DIM))
    assert problem.mask == mask
    with pytest.raises(Unsupported, match=r"^problem\.softcap"), nd.attend(nd.Triton(FP32)), torch.no_grad():
        nd.softcapped_attention(q.float(), k.float(), v.float(), is_causal=True, enable_gqa=True, softcap=1.5)
