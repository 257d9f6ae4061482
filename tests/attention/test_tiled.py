"""The laws of tiled attention and its gradients: what changes no bit, what is exact, and what every policy does."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from numdev import Cast, Dot, Exponential, Mask, Maximum, Normalise, OnlineSoftmax, Order, ScaleOn, SumOver, Tiling
from numdev.arithmetic.formats import BF16, E4M3FN, FP16, FP32, Format
from numdev.arithmetic.products import row_sums
from numdev.arithmetic.quantise import Quantised, Scale
from numdev.attention import exact, naive, tiled
from numdev.attention.base import Attention, Backward, Output, saved_by
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.naive import Naive, NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import EXPONENTIALS, DeltaForm, OutputForDelta, Recompute, exp2
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.errors import BadInput
from tests.attention.bounds import fp64_bounds
from tests.cases import (
    BACKWARD_POLICIES,
    MASKS,
    POLICIES,
    U64,
    Inputs,
    Sizes,
    draw,
    draw_all,
    fitted,
    lse_of,
    reach,
    same,
    tiled_error,
)
from tests.oracles.double_loop import BackwardDoubleLoop, DoubleLoop, is_fully_masked, visibility

SIZES: Sizes = (2, 4, 2, 37, 53, 24)
SMALL: Sizes = (2, 2, 1, 9, 23, 8)
BACKWARD_SIZES: Sizes = (2, 4, 2, 19, 27, 8)
BACKWARD_SMALL: Sizes = (2, 2, 1, 5, 9, 4)
RANDOM = "bf16:stochastic:seed=2"
BATCH_ONE: Sizes = (1, 2, 1, 21, 37, 12)

EXACT_KINDS = [Exponential.EXP, Exponential.EXP2]

tilings = st.builds(
    Tiling,
    br=st.integers(1, 70),
    bc=st.integers(1, 70),
    order=st.sampled_from(Order),
    splits=st.integers(1, 4),
    stride=st.integers(1, 4),
    seed=st.integers(0, 9),
)
joined = tilings.map(lambda tiling: replace(tiling, splits=1, split_size=tiling.splits * tiling.bc))
recurrences = st.builds(
    OnlineSoftmax,
    normalise=st.sampled_from(Normalise),
    maximum=st.sampled_from(Maximum),
    exp=st.sampled_from(EXACT_KINDS),
    sum_over=st.sampled_from(SumOver),
    scale_on=st.sampled_from(ScaleOn),
    rescale_threshold=st.sampled_from([0.0, 1.0, 8.0]),
    p_scale=st.sampled_from([1.0, 256.0, 127.0]),
    tie_shift=st.sampled_from([None, 2.0]),
)
masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 50)),
    key_lengths=st.one_of(st.none(), st.integers(0, 40).map(lambda n: (n,))),
)


def assert_same(a: Output, b: Output) -> None:
    assert torch.equal(a.out.nan_to_num(7e7), b.out.nan_to_num(7e7))
    assert torch.equal(lse_of(a).nan_to_num(7e7), lse_of(b).nan_to_num(7e7))
    assert torch.equal(a.out.isnan(), b.out.isnan())
    assert torch.equal(lse_of(a).isnan(), lse_of(b).isnan())


def check_against_exact(inputs: tuple[Tensor, Tensor, Tensor], tiling: Tiling, soft: OnlineSoftmax, mask: Mask) -> None:
    """Within `tiled_error` of Exact, whose own error is no larger: `c N u max |v|` with `c = 2 tiled_error / N`."""
    q, k, v = inputs
    scale = 1 / math.sqrt(q.shape[3])
    got, want = Tiled(Precision.golden(), tiling, soft)(q, k, v, mask), Exact()(q, k, v, mask)
    keys, tiles = k.shape[2], math.ceil(k.shape[2] / tiling.bc) * (1 if tiling.split_size is None else 2)  # a join is as a tile
    beta = soft.tie_shift or 1.0
    bound = 2 * tiled_error(q.shape[3], keys, reach(q, k, scale), tiles, tiling.splits, beta) * U64
    assert float((got.out - want.out).abs().max()) <= bound * float(v.abs().max())
    empty = is_fully_masked(mask, q.shape[0], q.shape[2], keys)[:, None].expand(lse_of(want).shape)
    assert torch.equal(lse_of(got).isneginf(), empty)
    assert bool((got.out[empty] == 0).all())
    assert bool(((lse_of(got) - lse_of(want))[~empty].abs() <= bound).all())


@settings(max_examples=100)
@given(
    st.sampled_from([(2, 1), (2, 2), (4, 2)]),
    st.tuples(st.integers(1, 67), st.integers(1, 67), st.integers(1, 19)),
    st.one_of(tilings, joined),
    recurrences,
    masks,
    st.integers(0, 99),
    st.sampled_from([1.0, 3.0, 60.0]),
)
def test_any_tiling_in_double_precision_is_exact(
    heads: tuple[int, int], sizes: tuple[int, int, int], tiling: Tiling, soft: OnlineSoftmax, mask: Mask, seed: int, spread: float
) -> None:
    """Ragged ends, more queries than keys, more splits than tiles, and large scores among them."""
    lengths = None if mask.key_lengths is None else (min(mask.key_lengths[0], sizes[1]),)
    check_against_exact(draw((1, *heads, *sizes), seed, spread), tiling, soft, replace(mask, key_lengths=lengths))


@settings(max_examples=40)
@given(st.sampled_from(list(POLICIES)), tilings, recurrences, masks, st.integers(1, 40), st.integers(40, 70), st.booleans())
def test_one_tile_is_naive(
    name: str, tiling: Tiling, soft: OnlineSoftmax, mask: Mask, queries: int, keys: int, large: bool
) -> None:
    """Bit for bit, with the division at the end; also where scores overflow."""
    precision = POLICIES[name]
    q, k, v = precision.round_inputs(*draw((1, 4, 2, queries, keys, 16), queries, spread=1e4 if large else 1.0))
    one = Tiled(precision, replace(tiling, bc=keys, splits=1), OnlineSoftmax(rescale_threshold=soft.rescale_threshold))
    assert_same(one(q, k, v, mask, 0.3), Naive(precision, Normalise.END)(q, k, v, mask, 0.3))


def random_policy() -> Precision:
    step = Cast.parse(RANDOM)
    return Precision.throughout(step).with_step(row_sum=Dot(step, 4), values=Dot(step, 8))


@settings(max_examples=25)
@given(st.sampled_from(list(POLICIES)), st.one_of(tilings, joined), recurrences, masks, st.integers(1, 70), st.data())
def test_a_row_depends_on_no_other(
    name: str, tiling: Tiling, soft: OnlineSoftmax, mask: Mask, br: int, data: st.DataObject
) -> None:
    """Any slice of the queries in tiles of any size gives the same bits; where its place matters, a slice up to the last."""
    precision, mask = POLICIES[name], fitted(mask, 37)
    q, k, v = precision.round_inputs(*draw(BATCH_ONE))
    first = data.draw(st.integers(0, 20))
    last = 21 if mask.causal or mask.window is not None else data.draw(st.integers(first + 1, 21))
    whole = Tiled(precision, tiling, soft)(q, k, v, mask)
    part = Tiled(precision, replace(tiling, br=br), soft)(q[:, :, first:last], k, v, mask)
    assert_same(part, Output(whole.out[:, :, first:last], lse_of(whole)[:, :, first:last]))


STREAMED: list[tuple[ModuleType, Attention]] = [
    (exact, Exact()),
    *((naive, Naive(POLICIES[name], normalise)) for name in ("kernel_bf16", "mixed") for normalise in Normalise),
    *(
        (tiled, Tiled(policy, Tiling(16, 16, splits=2), soft))
        for policy in (POLICIES["kernel_bf16"], POLICIES["mixed"], random_policy())
        for soft in (OnlineSoftmax(), OnlineSoftmax(Normalise.EACH, exp=Exponential.EXP2))
    ),
]


@pytest.mark.parametrize("mask", ["none", "all"])
@pytest.mark.parametrize(("module", "variant"), STREAMED)
def test_blocks_of_rows_and_counting_change_no_bit(
    module: ModuleType, variant: Attention, mask: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = variant.round_inputs(*draw(SIZES))
    whole = variant(*inputs, MASKS[mask])
    if isinstance(variant, Tiled):
        quiet = replace(variant, count=False)(*inputs, MASKS[mask])
        assert_same(quiet, whole)
        assert quiet.counters == {}
    monkeypatch.setitem(module._WORKSPACE, "cpu", 1)
    blocks = variant(*inputs, MASKS[mask])
    assert_same(blocks, whole)
    assert blocks.counters == whole.counters


FA1 = OnlineSoftmax(Normalise.EACH, maximum=Maximum.LOCAL)
PRECISIONS = POLICIES | {name: Precision.parse(name) for name in Precision.SHIPPED}
POLYNOMIALS = [EXPONENTIALS["exp2_poly3"], EXPONENTIALS["exp2_fa4"], Exponential.polynomial((1.0, 0.65, 0.35), 0.3)]


two_lengths = st.one_of(st.none(), st.tuples(st.integers(0, 23), st.integers(0, 23)))


@settings(max_examples=40)
@given(
    st.sampled_from(sorted(PRECISIONS)),
    st.one_of(
        loops := st.builds(Tiling, st.integers(2, 12), st.integers(3, 24), st.sampled_from(Order), splits=st.integers(1, 3)),
        loops.map(lambda tiling: replace(tiling, splits=1, split_size=tiling.splits * tiling.bc)),
    ),
    recurrences,
    st.sampled_from([*EXACT_KINDS, *POLYNOMIALS]),
    st.builds(Mask, causal=st.booleans(), window=st.one_of(st.none(), st.integers(1, 20)), key_lengths=two_lengths),
    st.booleans(),
)
def test_the_double_loop_gives_the_same_bits(
    name: str, tiling: Tiling, soft: OnlineSoftmax, exp: Exponential, mask: Mask, keys_outside: bool
) -> None:
    """Batch entries and grouped heads among them."""
    precision, soft = PRECISIONS[name], replace(soft, exp=exp)
    inputs = precision.round_inputs(*draw(SMALL))
    out, lse = DoubleLoop(precision, tiling, soft, keys_outside)(*inputs, mask, 0.21)
    assert_same(Tiled(precision, tiling, soft)(*inputs, mask, 0.21), Output(out, lse))


def slopes(of: Callable[[Format], dict[str, tuple[Tensor, Tensor]]]) -> list[float]:
    """Slopes of log2(RMS error) against mantissa bits, of each output of a run and the exact one."""
    bits, errors = list(range(6, 31, 4)), dict[str, list[float]]()
    for mantissa in bits:
        for name, (got, golden) in of(Format(11, mantissa)).items():
            errors.setdefault(name, []).append(math.log2(float((got - golden).square().mean().sqrt())))
    return [float(np.polyfit(bits, each, 1)[0]) for each in errors.values()]


@pytest.mark.parametrize("normalise", Normalise)
@pytest.mark.parametrize("splits", [1, 3])
def test_error_halves_with_every_mantissa_bit(normalise: Normalise, splits: int) -> None:
    """The slope of log2(RMS error) against m is -1: every rounding is proportional to 2^-m, and nothing else errs.

    An RMS over 2 * 64 * 16 elements has a relative standard error near 1 / sqrt(2 * 64 * 16) = 2 %, more as errors within a
    row share l; even at 20 % an end point of a span of 24 bits moves the slope by log2(1.2) / 24 = 0.01.
    """

    def forward(fmt: Format) -> dict[str, tuple[Tensor, Tensor]]:
        variant = Tiled(Precision.uniform(fmt), Tiling(16, 16, splits=splits), OnlineSoftmax(normalise))
        inputs = variant.round_inputs(*draw((1, 2, 2, 64, 64, 16)))
        return {"out": (variant(*inputs, Mask()).out, Exact()(*inputs, Mask()).out)}

    def backward(fmt: Format) -> dict[str, tuple[Tensor, Tensor]]:
        own = Tiled(Precision.uniform(fmt), Tiling(16, 16), OnlineSoftmax(normalise))
        variant = TiledBackward(own, BackwardPrecision.uniform(fmt), Tiling(16, 16))
        inputs = variant.round_inputs(*draw_all((1, 2, 2, 40, 40, 16)))
        got, exact = variant(*inputs, Mask()).tensors(), ExactBackward()(*inputs, Mask()).tensors()
        return {name: (tensor, exact[name]) for name, tensor in got.items()}

    assert all(abs(slope + 1) <= 0.1 for slope in slopes(forward) + (slopes(backward) if splits == 1 else []))


def test_stochastic_rounding_draws_anew_at_every_tile() -> None:
    """1 + 1 + ... over 512 tiles of one key: each sum rounds by itself, so that the mean of many rows is 1.

    From 256 on the sum moves in steps of 2, each with a variance of at most 1, so that the deviation of a row is at most
    sqrt(256) / 512 = 0.0313, its own estimate of 256 rows off by 1 / sqrt(512) of that at five deviations by 0.007, and that of
    the mean of n rows over sqrt(n). Equal draws at every tile would give 0.5 or a sum that never stops growing too fast.
    """
    rows = 256
    q, k = torch.zeros(1, 1, rows, 1), torch.ones(1, 1, 512, 1)
    policy = Precision.parse("kernel_fp32").with_step(accumulator=Cast.parse(RANDOM))
    got = Tiled(policy, Tiling(16, 1), count=False)(q, k, k, Mask()).out.flatten()
    assert abs(float(got.mean()) - 1) <= 5 * 0.0313 / math.sqrt(rows)
    assert 0.02 < float(got.std()) < 0.0313 + 0.007
    assert len(set(got.tolist())) > 10


NO_INFINITY = ["e4m3fn", "e2m14finite", "e4m3fn:saturate", "bf16:saturate", "int8"]


@settings(max_examples=12)
@given(
    st.sampled_from([mask for mask in MASKS if mask != "lengths"]),
    st.sampled_from(["exponential", "rescale", "scores", "row_sum"]),
    st.sampled_from(NO_INFINITY),
)
def test_what_is_not_seen_is_never_rounded(mask: str, step: str, text: str) -> None:
    """A format without infinity changes nothing about masked keys: the same as leaving them out, and no NaN."""
    cast = Cast.parse(text)
    policy = Precision.kernel(BF16).with_step(**{step: cast})
    q, k, v = policy.round_inputs(*draw(SIZES, spread=0.3))
    single = replace(MASKS[mask], key_lengths=None)
    for soft in (OnlineSoftmax(), FA1, OnlineSoftmax(exp=Exponential.EXP2, rescale_threshold=1.0)):
        for variant in (Tiled(policy, Tiling(16, 16), soft), Naive(policy)):
            got = variant(q, k, v, single)
            assert bool(got.out.isfinite().all())
            if single.causal:  # the first rows see the first keys alone
                seen = 53 - 37 + 1
                first = variant(q[:, :, :1], k[:, :, :seen], v[:, :, :seen], replace(single, causal=False))
                assert torch.equal(got.out[:, :, :1], first.out)
            assert got.counters.get("p_flushed", 0.0) >= 0


@pytest.mark.parametrize(("name", "poison"), [("golden", math.inf), ("kernel_bf16", math.nan), ("uniform_fp16", -math.inf)])
def test_padding_touches_nothing_whatever_it_holds(name: str, poison: float) -> None:
    """Keys past `key_lengths`, and keys that a causal limit or a window hides from a row."""
    precision = POLICIES[name]
    q, k, v = precision.round_inputs(*draw(SIZES))
    mask = Mask(causal=True, key_lengths=(40, 0))
    variants = (Exact(), Naive(precision), Naive(precision, Normalise.END), Tiled(precision, Tiling(16, 16)))
    for variant in variants:
        clean = variant(q, k, v, mask)
        bad_k, bad_v = k.clone(), v.clone()
        bad_k[0, :, 40:], bad_v[0, :, 40:], bad_k[1], bad_v[1] = poison, poison, poison, poison
        assert_same(variant(q, bad_k, bad_v, mask), clean)
        seen = variant(q, k, v, Mask(causal=True))
        bad_v = v.clone()
        bad_v[:, :, 45] = poison  # the last 8 queries see it
        got = variant(q, k, bad_v, Mask(causal=True))
        assert torch.equal(got.out[:, :, :29].isfinite(), seen.out[:, :, :29].isfinite())
        assert torch.allclose(got.out[:, :, :29], seen.out[:, :, :29], rtol=1e-2, atol=1e-2)
        assert not bool(got.out[:, :, 29:].isfinite().any())


recomputations = st.builds(
    Recompute,
    delta=st.sampled_from(DeltaForm),
    output=st.sampled_from(OutputForDelta),
    exponential=st.sampled_from([Exponential.EXP, Exponential.EXP2]),
)
with_polynomials = st.builds(replace, recomputations, exponential=st.sampled_from([Exponential.EXP2, EXPONENTIALS["exp2_poly3"]]))
orders = st.one_of(st.none(), st.sampled_from(Order))
GOLDEN = Tiled(Precision.golden())


def check_gradients(inputs: Inputs, backward: TiledBackward, mask: Mask) -> None:
    """Within twice `bounds` of the exact gradients, whose own error is no larger."""
    q, k = inputs[0], inputs[1]
    scale = 1 / math.sqrt(q.shape[3])
    got, want = backward(*inputs, mask), ExactBackward()(*inputs, mask)
    tiles = math.ceil(k.shape[2] / min(backward.tiling.bc, 64))  # those of the forward pass are 64
    bound = fp64_bounds(inputs, scale, tiles, math.ceil(q.shape[2] / backward.tiling.br))
    for name, tensor in got.tensors().items():
        assert float((tensor - want.tensors()[name]).abs().max()) <= 2 * bound[name] * U64, name
    empty = is_fully_masked(mask, q.shape[0], q.shape[2], k.shape[2])[:, None].expand(q.shape[:3])
    assert bool((got.dq[empty] == 0).all())
    assert got.delta is not None
    assert bool((got.delta[empty] == 0).all())


@settings(max_examples=30)
@given(
    st.sampled_from([(2, 1), (2, 2), (4, 2)]),
    st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(1, 19)),
    tilings,
    recomputations,
    orders,
    masks,
    st.sampled_from([1.0, 3.0, 60.0]),
)
def test_gradients_of_any_tiling_in_double_precision_are_exact(
    heads: tuple[int, int],
    sizes: tuple[int, int, int],
    tiling: Tiling,
    recompute: Recompute,
    order: Order | None,
    mask: Mask,
    spread: float,
) -> None:
    """Ragged ends, more queries than keys, and large scores among them."""
    lengths = None if mask.key_lengths is None else (min(mask.key_lengths[0], sizes[1]),)
    backward = TiledBackward(GOLDEN, BackwardPrecision.golden(), replace(tiling, splits=1), recompute, order)
    check_gradients(draw_all((1, *heads, *sizes), sum(sizes), spread), backward, replace(mask, key_lengths=lengths))


def run_both(
    policy: BackwardPrecision, forward: Precision, inputs: Inputs, mask: Mask, variant: TiledBackward, scale: float
) -> None:
    """The implementation and the oracle on what one forward pass saved."""
    rounded = policy.round_inputs(*inputs)
    saved = saved_by(Tiled(forward), variant.reads, rounded[:3], mask, scale)
    oracle = BackwardDoubleLoop(policy, variant.tiling, variant.recompute, variant.query_order)
    out, lse = saved.out.to(policy.carrier), saved.lse.to(policy.carrier)
    same(variant.backward(*rounded, saved, mask, scale), oracle(rounded, out, lse, mask, scale))


ROUNDINGS = ["", ":toward_zero", ":up", ":nearest_away", ":odd"]
FORMATS = ["bf16", "fp16", "tf32", "e8m9", "e5m2", "e8m13", "fp32", "e4m3fn:saturate", "bf16:down"]
casts = st.one_of(
    st.sampled_from(FORMATS), st.builds(lambda f, r: f + r, st.sampled_from(FORMATS[:6]), st.sampled_from(ROUNDINGS))
)
dots = st.builds(lambda cast, every: cast + every, casts, st.sampled_from(["", "", "@4", "@16"]))
DOTS = ("scores", "dp", "delta", "dq", "dk", "dv")
policies = st.fixed_dictionaries({name: dots if name in DOTS else casts for name in BackwardPrecision.golden().steps()}).map(
    lambda steps: BackwardPrecision.golden().with_step(**steps)
)


@settings(max_examples=25)
@given(
    st.one_of(policies, st.sampled_from(sorted(BACKWARD_POLICIES)).map(lambda name: BACKWARD_POLICIES[name])),
    st.builds(Tiling, br=st.integers(1, 6), bc=st.integers(3, 12), order=st.sampled_from(Order), seed=st.integers(0, 9)),
    st.one_of(recomputations, with_polynomials),
    orders,
    masks,
)
def test_the_double_loop_gives_the_same_gradients_under_any_policy(
    policy: BackwardPrecision, tiling: Tiling, recompute: Recompute, order: Order | None, mask: Mask
) -> None:
    """Batch entries and grouped heads among them."""
    variant = TiledBackward(GOLDEN, policy, tiling, recompute, order)
    both = replace(mask, key_lengths=None if mask.key_lengths is None else (min(mask.key_lengths[0], 9), 7))
    run_both(policy, Precision.kernel(FP16), draw_all(BACKWARD_SMALL), both, variant, 0.21)


@pytest.mark.parametrize("output", OutputForDelta)
def test_delta_is_of_the_output_that_is_asked_for(output: OutputForDelta) -> None:
    forward = Tiled(Precision.kernel(BF16), Tiling(16, 16))
    variant = TiledBackward(forward, BackwardPrecision.kernel(BF16), Tiling(16, 16), Recompute(output=output))
    q, k, v, do = variant.round_inputs(*draw_all(BACKWARD_SIZES))
    rounded = forward(q, k, v, Mask()).out
    whole = Tiled(Precision.kernel(BF16).with_step(output=FP32), Tiling(16, 16))(q, k, v, Mask()).out
    assert not torch.equal(rounded, whole)
    read = rounded if output is OutputForDelta.ROUNDED else whole
    assert torch.equal(variant(q, k, v, do, Mask()).tensors()["delta"], (do * read).sum(-1))


PADDED: list[Backward] = [
    *(
        TiledBackward(Tiled(Precision.kernel(BF16), Tiling(16, 16)), BACKWARD_POLICIES[name], Tiling(16, 16), Recompute(delta))
        for name, delta in zip(("golden", "kernel_bf16", "uniform_fp16", "golden"), [*DeltaForm] * 2, strict=True)
    ),
    *(ExactBackward(), NaiveBackward.eager(BF16)),
]


@pytest.mark.parametrize("variant", PADDED, ids=lambda variant: type(variant).__name__)
@pytest.mark.parametrize("poison", [math.inf, math.nan])
@pytest.mark.parametrize("mask", [Mask(causal=True, key_lengths=(15, 0)), Mask(True, 6, (5, 0))], ids=str)
def test_padding_touches_no_gradient(variant: Backward, poison: float, mask: Mask) -> None:
    """Keys past `key_lengths`, and rows that see no key: their q and do. Of 19 queries on 27 keys the first sees 9."""
    inputs = variant.round_inputs(*draw_all(BACKWARD_SIZES))
    clean = variant(*inputs, mask).tensors()
    q, k, v, do = (x.clone() for x in inputs)
    hidden = is_fully_masked(mask, 2, 19, 27)[:, None].expand(2, 4, 19)
    assert bool(hidden.any())
    q[hidden], do[hidden] = poison, poison
    for b, length in enumerate(mask.key_lengths or ()):
        k[b, :, length:], v[b, :, length:] = poison, poison
        assert bool((clean["dk"][b, :, length:] == 0).all())
        assert bool((clean["dv"][b, :, length:] == 0).all())
    same(variant(q, k, v, do, mask), clean)
    assert all(bool(tensor.isfinite().all()) for tensor in clean.values())
    assert bool((clean["dq"][hidden] == 0).all())


@pytest.mark.parametrize(("where", "poison"), [("q", math.nan), ("v", math.inf), ("do", -math.inf), ("k", math.nan)])
def test_what_a_row_does_not_see_never_reaches_its_gradient(poison: float, where: str) -> None:
    """One row of q or do reaches the keys that it sees and no other; one key the rows that see it and no other.

    dK and dV of other keys, and dQ of other rows, are those without the poison but for the order of sums.
    """
    mask = Mask(causal=True, window=9)
    variant = TiledBackward(GOLDEN, BackwardPrecision.golden(), Tiling(8, 8))
    inputs = draw_all((1, 2, 1, 37, 53, 8))
    clean = variant(*inputs, mask).tensors()
    poisoned = inputs[("q", "k", "v", "do").index(where)]
    poisoned[:, :, 20] = poison
    got = variant(*inputs, mask).tensors()
    seen = visibility(mask, 0, 37, 53)
    touched_rows = torch.arange(37) == 20 if where in ("q", "do") else seen[:, 20]
    touched_keys = seen[touched_rows].any(0)
    poisoned[:, :, 20] = 0.0
    bound = fp64_bounds(inputs, 8**-0.5, 7, 5)
    for output, touched in (("dq", touched_rows), ("dk", touched_keys), ("dv", touched_keys)):
        mine, plain = got[output][:, :, ~touched], clean[output][:, :, ~touched]
        assert bool(mine.isfinite().all()), output
        assert float((mine - plain).abs().max()) <= 2 * bound[output] * U64, output
    assert not bool(got["dq"][:, :, touched_rows].isfinite().all())


def test_stochastic_rounding_repeats_and_differs_between_replicates() -> None:
    cast = Cast.parse(RANDOM)
    variant = TiledBackward(
        Tiled(Precision.kernel(BF16)), BackwardPrecision.throughout(cast), Tiling(16, 16), Recompute(DeltaForm.PROBABILITIES)
    )
    inputs = variant.round_inputs(*draw_all(BACKWARD_SIZES))
    first, again = variant(*inputs, Mask()), variant(*inputs, Mask())
    same(first, again.tensors())
    other = variant.replicate(1)(*inputs, Mask()).tensors()
    assert all(not torch.equal(tensor, other[name]) for name, tensor in first.tensors().items())
    plain = TiledBackward(GOLDEN, BackwardPrecision.golden())
    assert plain.replicate(1) is plain


def test_a_backward_run_counts_its_events() -> None:
    inputs = draw_all(BACKWARD_SIZES, spread=4.0)
    variant = TiledBackward(Tiled(Precision.kernel(FP16)), BackwardPrecision.kernel(FP16), Tiling(16, 16))
    rounded = variant.round_inputs(*inputs)
    counted = variant(*rounded, Mask(causal=True))
    quiet = replace(variant, count=False)(*rounded, Mask(causal=True))
    same(counted, quiet.tensors())
    assert quiet.counters == {}
    assert 0 < counted.counters["p_flushed"] < 1
    assert counted.counters["ds_flushed"] >= counted.counters["p_flushed"] / 2
    coarse = replace(variant, precision=variant.precision.with_step(scores="e5m2"))(*rounded, Mask(causal=True))
    assert coarse.counters["p_above_one"] > 0


IN_TENSOR_CORES = Precision.kernel(E4M3FN).with_step(values="hopper@32", output="fp32")


@pytest.mark.parametrize("every", [32, 64, 128, 4096])
def test_p_v_stays_in_the_tensor_cores_over_tiles(every: int) -> None:
    """One row after another, `O~ <- alpha O~ + P V` on the unit, and `O <- alpha O + O~` after the tiles that make `every`."""
    policy, bc, scale = IN_TENSOR_CORES.with_step(values=f"hopper@{every}"), 32, 4.0
    q, k, v = policy.round_inputs(*draw((1, 1, 1, 9, 300, 16), 5, spread=3.0))
    soft = OnlineSoftmax(exp=EXPONENTIALS["exp2"], p_scale=scale)
    got = Tiled(policy, Tiling(8, bc), soft)(q, k, v, Mask(), 0.5 / math.log2(math.e))
    s, rows = (q[0, 0] @ k[0, 0].mT) * 0.5, torch.zeros(9, 1)
    m, row_sum, o, pending = rows - float("inf"), rows.clone(), torch.zeros(9, 16), torch.zeros(9, 16)
    for tile, first in enumerate(range(0, 300, bc)):
        here = slice(first, first + bc)
        m_new = torch.maximum(m, s[:, here].amax(1, keepdim=True))
        p, alpha = exp2(s[:, here] - m_new), exp2(m - m_new)
        m, row_sum, o = m_new, row_sum * alpha + row_sums(p), o * alpha
        entering = (p * scale).to(torch.float8_e4m3fn).float()
        pending = policy.units["values"](entering, v[0, 0, here], pending * alpha)
        if (tile + 1) % (every // bc) == 0:
            o, pending = o + pending / scale, torch.zeros_like(pending)
    assert torch.equal(got.out[0, 0], (o + pending / scale) / row_sum)


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("scale", [Scale.TENSOR, Scale.HEAD, Scale.BLOCK])
@pytest.mark.parametrize("every", [32, 128, 4096])
def test_codes_are_multiplied_before_their_scales(every: int, scale: Scale, hadamard: bool) -> None:
    """As a kernel does: O is in units of the scale of V that was met last, and leaves as `O s / l`."""
    bc, low = 32, Cast.parse("e4m3fn:saturate")
    inputs = Quantised(low, scale, 64, 16, hadamard=hadamard)
    policy = IN_TENSOR_CORES.with_step(values=f"hopper@{every}", scores="hopper", inputs=inputs)
    q, k, v = draw((1, 1, 1, 33, 300, 64), 5)
    v[:, :, 64:128] *= 100.0
    q, k, v = policy.round_inputs(q, k, v)
    mask, soft = Mask(key_lengths=(290,)), OnlineSoftmax(exp=EXPONENTIALS["exp2"])
    got = Tiled(policy, Tiling(8, bc), soft)(q, k, v, mask, 0.5 / math.log2(math.e))
    k, v = mask.without_padding(k), mask.without_padding(v)
    (q_codes, q_scale), (k_codes, k_scale), (v_codes, v_scale) = (
        (codes[0, 0], each[0, 0]) for codes, each in (inputs.codes(x, name) for name, x in zip("qkv", (q, k, v), strict=True))
    )
    rows = torch.zeros(33, 1)
    m, row_sum, o, pending, unit = rows - float("inf"), rows.clone(), torch.zeros(33, 64), torch.zeros(33, 64), v_scale[0]
    for tile, first in enumerate(range(0, 290, bc)):
        here = slice(first, min(first + bc, 290))
        s = policy.units["scores"](q_codes, k_codes[here].mT) * (0.5 * q_scale * k_scale[here].mT)
        m_new = torch.maximum(m, s.amax(1, keepdim=True))
        p, alpha = exp2(s - m_new), exp2(m - m_new)
        m, row_sum, ratio, unit = m_new, row_sum * alpha + row_sums(p), unit / v_scale[first], v_scale[first]
        o, pending = o * (alpha * ratio), pending * alpha * ratio
        pending = policy.units["values"](p.to(torch.float8_e4m3fn).float(), v_codes[here], pending)
        if (tile + 1) % (every // bc) == 0:
            o, pending = o + pending, torch.zeros_like(pending)
    torch.testing.assert_close(got.out[0, 0], (o + pending) * unit / row_sum, rtol=2e-5, atol=1e-6 * float(v.abs().max()))
    near = Exact()(q, k, v, mask, 0.5 / math.log2(math.e)).out
    assert float((got.out - near).square().mean().sqrt()) < 0.1 * float(near.square().mean().sqrt())


def test_codes_are_refused_where_a_kernel_has_none() -> None:
    inputs = Quantised(Cast.parse("e4m3fn"), Scale.BLOCK, 48)
    policy = Precision.kernel(E4M3FN).with_step(inputs=inputs, values="hopper", scores="hopper")
    with pytest.raises(BadInput, match=r"^precision\.quantise\.block: .*multiple of tiling\.bc=32"):
        Tiled(policy, Tiling(bc=32))
    with pytest.raises(BadInput, match=r"^softmax\.scale_on: "):
        Tiled(policy, Tiling(bc=48), OnlineSoftmax(scale_on=ScaleOn.QUERIES))
    with pytest.raises(BadInput, match=r"^precision\.inputs: "):
        Naive(policy)


@settings(max_examples=20)
@given(tilings, masks, st.integers(1, 70), st.booleans())
def test_rows_of_tensor_cores_depend_on_no_other(tiling: Tiling, mask: Mask, br: int, wild: bool) -> None:
    """Also where tiles hold no key of a row, whose sum then stays as it is, and where V holds what no row sees."""
    q, k, v = IN_TENSOR_CORES.round_inputs(*draw(BATCH_ONE))
    soft = OnlineSoftmax(rescale_threshold=2.0)
    whole = Tiled(IN_TENSOR_CORES, tiling, soft)(q, k, v, mask)
    assert_same(Tiled(IN_TENSOR_CORES, replace(tiling, br=br), soft)(q, k, v, mask), whole)
    ends = replace(mask, key_lengths=(11,))
    hidden = v.index_fill(2, torch.arange(11, v.shape[2]), float("nan" if wild else "inf"))
    both = (Tiled(IN_TENSOR_CORES, tiling, soft)(q, k, values, ends) for values in (v, hidden))
    assert_same(*both)
    backwards, short = Tiling(bc=8, order=Order.REVERSE), (k[:, :, :11], v[:, :, :11])
    assert_same(
        Tiled(IN_TENSOR_CORES, backwards)(q, k, hidden, Mask(key_lengths=(11,))),
        Tiled(IN_TENSOR_CORES, backwards)(q, *short, Mask()),
    )


def test_p_v_leaves_the_tensor_cores_where_o_is_divided_or_weighed_each_time() -> None:
    for soft in (OnlineSoftmax(Normalise.EACH), OnlineSoftmax(maximum=Maximum.LOCAL)):
        with pytest.raises(BadInput, match=r"^precision\.values: "):
            Tiled(IN_TENSOR_CORES, Tiling(bc=16), soft)
        Tiled(IN_TENSOR_CORES, Tiling(bc=32), soft)
