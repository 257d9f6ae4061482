"""A tensor that is added to the scores: every implementation that takes one computes what torch's FP64 does; others refuse it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import numdev as nd
from numdev.arithmetic.formats import BF16, FP64
from numdev.attention.base import Backward, Gradients
from numdev.attention.exact import ExactBackward
from numdev.attention.mask import Bias, Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential, OnlineSoftmax, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.attention.triton import Triton
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import VanillaBackward
from numdev.errors import BadInput, Unsupported

BATCH, HEADS, KV_HEADS, QUERIES, KEYS, DIM = 2, 4, 2, 9, 11, 4
SIZES = BATCH, HEADS, QUERIES, KEYS
HIDDEN = float("-inf")
TILING = Tiling(br=4, bc=3)
BINARY = OnlineSoftmax(exp=Exponential.EXP2)


def tiled(*, binary: bool = False) -> TiledBackward:
    forward = Tiled(Precision.golden(), TILING, BINARY if binary else OnlineSoftmax())
    recompute = Recompute(exponential=Exponential.EXP2 if binary else Exponential.EXP)
    return TiledBackward(forward, BackwardPrecision.golden(), TILING, recompute)


IMPLEMENTATIONS: dict[str, Backward] = {
    "exact": ExactBackward(),
    "naive": NaiveBackward(BackwardPrecision.golden(), Precision.golden()),
    "tiled": tiled(),
    "tiled, exp2": tiled(binary=True),
    "vanilla": VanillaBackward(FP64),
}
RANDOM = torch.Generator().manual_seed(7)


def normal(*size: int) -> Tensor:
    return torch.randn(size, dtype=torch.float64, generator=RANDOM)


LEFT = (torch.arange(KEYS) >= torch.tensor([[0], [4]]))[:, None, None].expand(-1, 1, QUERIES, -1)
PACKED = (torch.arange(QUERIES)[:, None] // 4 == torch.arange(KEYS) // 4)[None, None]
OF_HEADS = normal(1, HEADS, QUERIES, KEYS) > 0
BIASES = {
    "padding before the keys": Bias.hiding(LEFT),
    "packed documents": Bias.hiding(PACKED),
    "a mask of each head": Bias.hiding(OF_HEADS),
    "relative positions": Bias(normal(1, HEADS, QUERIES, KEYS)),
    "positions and padding": Bias(normal(BATCH, 1, QUERIES, KEYS).masked_fill(~LEFT, HIDDEN)),
}


def oracle(inputs: list[Tensor], mask: Mask) -> tuple[Tensor, ...]:
    """O and its gradients by torch's autograd in FP64; rows that see no key are 0."""
    *leaves, do = inputs
    q, k, v = (x.clone().requires_grad_() for x in leaves)
    wide = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k, v))
    k_wide, v_wide = wide
    assert mask.bias is not None
    s = q @ k_wide.mT * DIM**-0.5 + mask.bias.values
    if mask.causal:
        s = s.masked_fill(torch.ones(QUERIES, KEYS).triu(KEYS - QUERIES + 1).bool(), HIDDEN)
    empty = (s == HIDDEN).all(-1, keepdim=True)
    p = s.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)
    out = p @ v_wide
    return out.detach(), *torch.autograd.grad(out, (q, k, v), do)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_results_are_those_of_torch(name: str, bias: str, causal: bool) -> None:
    """FP64 throughout, scores below 20, sums of at most 36: a thousand u of 1e-16 stay below 1e-12."""
    mask, variant = Mask(causal=causal, bias=BIASES[bias]), IMPLEMENTATIONS[name]
    q, do, k, v = (normal(BATCH, h, n, DIM) for h, n in [(HEADS, QUERIES)] * 2 + [(KV_HEADS, KEYS)] * 2)
    out, *gradients = oracle([q, k, v, do], mask)
    own = variant.primal(q, k, v, mask).out
    got: Gradients = variant(q, k, v, do, mask)
    for mine, expected in zip((own, got.dq, got.dk, got.dv), (out, *gradients), strict=True):
        assert torch.allclose(mine, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", [name for name in IMPLEMENTATIONS if name != "vanilla"])  # torch multiplies NaN by 0
def test_a_key_that_is_hidden_touches_no_result(name: str) -> None:
    mask, variant = Mask(bias=BIASES["padding before the keys"]), IMPLEMENTATIONS[name]
    q, k, v, do = (normal(BATCH, KV_HEADS, n, DIM) for n in (QUERIES, KEYS, KEYS, QUERIES))
    clean = variant(q, k, v, do, mask)
    for x in (k, v):
        x[1, :, :4] = torch.nan
    dirty = variant(q, k, v, do, mask)
    for field in ("dq", "dk", "dv"):
        assert torch.equal(getattr(clean, field), getattr(dirty, field))
    assert torch.equal(variant.primal(q, k, v, mask).out.isnan(), torch.zeros_like(q, dtype=torch.bool))


@pytest.mark.parametrize("order", [Order.FORWARD, Order.REVERSE])
def test_a_limit_that_a_tensor_states_gives_the_bits_of_the_limit(order: Order) -> None:
    """A row keeps its state over a tile in which it sees no key, whether the tile is skipped or not."""
    limit = Mask(causal=True, window=5)
    seen = limit.visible(QUERIES, KEYS, (0, QUERIES), (0, KEYS), torch.device("cpu"))
    assert seen is not None
    tiling = Tiling(br=4, bc=3, order=order)
    variant = TiledBackward(Tiled(Precision.parse("bf16"), tiling), BackwardPrecision.parse("bf16"), tiling)
    inputs = variant.round_inputs(*(normal(BATCH, 2, n, DIM) for n in (QUERIES, KEYS, KEYS, QUERIES)))
    ours, theirs = (variant(*inputs, mask) for mask in (limit, Mask(bias=Bias.hiding(seen))))
    for field in ("dq", "dk", "dv"):
        assert torch.equal(getattr(ours, field), getattr(theirs, field))


def test_in_bf16_the_bias_and_the_sum_are_rounded_once() -> None:
    """One key: O is v, and LSE is the score, `round(round(q k) + round(bias))` with every step in BF16."""
    q, k, bias = normal(1, 1, 64, 1), normal(1, 1, 1, 1), normal(1, 1, 64, 1)
    variant = Tiled(Precision.parse("bf16"), TILING)
    q, k, v = variant.round_inputs(q, k, k)
    lse = variant(q, k, v, Mask(bias=Bias(bias)), 1.0).lse
    expected = ((q @ k.mT).bfloat16() + bias.bfloat16()).squeeze(-1)
    assert lse is not None
    assert torch.equal(lse.bfloat16(), expected)


def test_what_adds_nothing_refuses_it_by_name_and_what_does_not_fit_too() -> None:
    q, mask = normal(1, 1, 4, 16).bfloat16(), Mask(bias=Bias(torch.zeros(1, 1, 4, 4)))
    for variant in (Triton(BF16), Sdpa(Backend.FLASH)):
        with pytest.raises(Unsupported, match="^attn_mask: this implementation adds no tensor"):
            variant(q, q, q, mask)
    for size in ((1, 1, 4, 5), (1, 1, 3, 4), (2, 1, 4, 4), (1, 3, 4, 4), (1, 1, 1, 4)):
        with pytest.raises(BadInput, match="^attn_mask: .*must fit the scores"):
            tiled()(q, q, q, q, Mask(bias=Bias(torch.zeros(size))))
    for bad in (torch.zeros(4, 4), torch.full((1, 1, 4, 4), torch.nan), torch.zeros(1, 1, 4, 4, dtype=torch.int64)):
        with pytest.raises(BadInput, match="^attn_mask"):
            Bias(bad)


def test_equal_values_are_equal() -> None:
    one, other = Bias(torch.zeros(1, 1, 4, 4)), Bias.hiding(torch.ones(1, 1, 4, 4, dtype=torch.bool))
    assert one == other
    assert hash(one) == hash(other)
    assert one != Bias(torch.zeros(1, 1, 2, 8))
    assert Mask(bias=one) == Mask(bias=other) != Mask()


@pytest.mark.parametrize("size", [SIZES, (1, HEADS, QUERIES, KEYS), (BATCH, 1, QUERIES, KEYS), (HEADS, 1, KEYS), (QUERIES, KEYS)])
@pytest.mark.parametrize("name", ["exact", "tiled", "tiled, exp2"])
def test_the_gradient_by_a_learned_bias_is_that_of_torch(name: str, size: tuple[int, ...]) -> None:
    """In a model: also of the numbers that queries, heads or entries of the batch share, and under a tensor that hides keys."""
    bias, hides = (
        normal(*size).requires_grad_(),
        torch.zeros(QUERIES, KEYS, dtype=torch.float64).masked_fill(~PACKED[0, 0], HIDDEN),
    )
    q, do, k, v = (normal(BATCH, HEADS, n, DIM) for n in (QUERIES, QUERIES, KEYS, KEYS))
    attention = torch.nn.functional.scaled_dot_product_attention
    (expected,) = torch.autograd.grad(attention(q, k, v, bias + hides), bias, do)
    with nd.attend(IMPLEMENTATIONS[name]):
        (slope,) = torch.autograd.grad(attention(q, k, v, bias + hides), bias, do)
    assert torch.allclose(slope, expected, rtol=0, atol=1e-12)
    for refuses in (nd.attend(IMPLEMENTATIONS["naive"]), nd.shadow({"exact": ExactBackward()}, ExactBackward())):
        with pytest.raises(Unsupported, match="^attn_mask: it is learned"), refuses:
            attention(q, k, v, bias + hides)
