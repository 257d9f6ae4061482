"""The laws of the tiled backward pass: what is exact, what changes no bit, and what every policy does number by number."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, FP16, FP32, Format
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Saved
from numdev.attention.differentiable import saved_by
from numdev.attention.exact import ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import EXPONENTIALS, DeltaForm, Exponential, OutputForDelta, Recompute
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from tests.attention.bounds import fp64_bounds
from tests.cases import BACKWARD_POLICIES as POLICIES
from tests.cases import U64, Inputs, Sizes, draw_all, same
from tests.oracles.double_loop import BackwardDoubleLoop, is_fully_masked

SIZES: Sizes = (2, 4, 2, 19, 27, 8)
SMALLER: Sizes = (2, 2, 1, 5, 9, 4)

tilings = st.builds(
    Tiling,
    br=st.integers(1, 50),
    bc=st.integers(1, 70),
    order=st.sampled_from(Order),
    stride=st.integers(1, 4),
    seed=st.integers(0, 9),
)
recomputations = st.builds(
    Recompute,
    delta=st.sampled_from(DeltaForm),
    output=st.sampled_from(OutputForDelta),
    exponential=st.sampled_from([Exponential.EXP, Exponential.EXP2]),
)
with_polynomials = st.builds(replace, recomputations, exponential=st.sampled_from([Exponential.EXP2, EXPONENTIALS["exp2_poly3"]]))
masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 50)),
    key_lengths=st.one_of(st.none(), st.integers(0, 9).map(lambda n: (n,))),
)
orders = st.one_of(st.none(), st.sampled_from(Order))
GOLDEN = Tiled(Precision.golden())


def check_against_exact(inputs: Inputs, backward: TiledBackward, mask: Mask) -> None:
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
def test_any_tiling_in_double_precision_is_exact(
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
    backward = TiledBackward(GOLDEN, BackwardPrecision.golden(), tiling, recompute, order)
    check_against_exact(draw_all((1, *heads, *sizes), sum(sizes), spread), backward, replace(mask, key_lengths=lengths))


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
    st.one_of(policies, st.sampled_from(sorted(POLICIES)).map(lambda name: POLICIES[name]())),
    st.builds(Tiling, br=st.integers(3, 8), bc=st.integers(3, 12), order=st.sampled_from(Order), seed=st.integers(0, 9)),
    st.one_of(recomputations, with_polynomials),
    orders,
    masks,
)
def test_the_double_loop_gives_the_same_bits_under_any_policy(
    policy: BackwardPrecision, tiling: Tiling, recompute: Recompute, order: Order | None, mask: Mask
) -> None:
    """Batch entries and grouped heads among them."""
    variant = TiledBackward(GOLDEN, policy, tiling, recompute, order)
    both = replace(mask, key_lengths=None if mask.key_lengths is None else (mask.key_lengths[0], 7))
    run_both(policy, Precision.kernel(FP16), draw_all(SMALLER), both, variant, 0.21)


@pytest.mark.parametrize("output", OutputForDelta)
def test_delta_is_of_the_output_that_is_asked_for(output: OutputForDelta) -> None:
    forward = Tiled(Precision.kernel(BF16), Tiling(16, 16))
    variant = TiledBackward(forward, BackwardPrecision.kernel(BF16), Tiling(16, 16), Recompute(output=output))
    q, k, v, do = variant.round_inputs(*draw_all(SIZES))
    rounded = forward(q, k, v, Mask()).out
    whole = Tiled(Precision.kernel(BF16).with_step(output=FP32), Tiling(16, 16))(q, k, v, Mask()).out
    assert not torch.equal(rounded, whole)
    read = rounded if output is OutputForDelta.ROUNDED else whole
    assert torch.equal(variant(q, k, v, do, Mask()).tensors()["delta"], (do * read).sum(-1))


@pytest.mark.parametrize("name", ["kernel_bf16", "golden"])
def test_what_was_saved_is_read_in_the_carrier(name: str) -> None:
    """Of O and LSE in FP64 an FP32 carrier takes the nearest numbers, whatever `inputs` is; an FP64 carrier takes all digits."""
    policy = POLICIES[name]()
    variant = TiledBackward(GOLDEN, policy)
    inputs = variant.round_inputs(*draw_all(SIZES))
    saved = saved_by(GOLDEN, OutputForDelta.ROUNDED, inputs[:3], Mask(), None)
    carried, narrow = (Saved(saved.out.to(to).double(), saved.lse.to(to).double()) for to in (policy.carrier, torch.bfloat16))
    whole = variant.backward(*inputs, saved, Mask())
    same(whole, variant.backward(*inputs, carried, Mask()).tensors())
    assert not torch.equal(whole.dq, variant.backward(*inputs, narrow, Mask()).dq)
    assert torch.equal(saved.lse, carried.lse) == (policy.carrier == torch.float64)


def test_error_halves_with_every_mantissa_bit() -> None:
    """As for the forward pass: the slope of log2(RMS error) against m is -1 within 0.1, of each output."""
    inputs = draw_all((1, 2, 2, 40, 40, 16))
    bits = list(range(6, 31, 4))
    errors: dict[str, list[float]] = {}
    for mantissa in bits:
        fmt = Format(11, mantissa)
        variant = TiledBackward(Tiled(Precision.uniform(fmt), Tiling(16, 16)), BackwardPrecision.uniform(fmt), Tiling(16, 16))
        rounded = variant.round_inputs(*inputs)
        got, want = variant(*rounded, Mask()).tensors(), ExactBackward()(*rounded, Mask()).tensors()
        for name, tensor in got.items():
            errors.setdefault(name, []).append(math.log2(float((tensor - want[name]).square().mean().sqrt())))
    x = torch.tensor(bits, dtype=torch.float64)
    for name, found in errors.items():
        y = torch.tensor(found, dtype=torch.float64)
        slope = float(((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum())
        assert abs(slope + 1) <= 0.1, name


@pytest.mark.parametrize(("name", "poison"), [("golden", math.inf), ("kernel_bf16", math.nan), ("uniform_fp16", -math.inf)])
@pytest.mark.parametrize("delta", DeltaForm)
def test_padding_touches_nothing_whatever_it_holds(name: str, poison: float, delta: DeltaForm) -> None:
    """Keys past `key_lengths`, and rows that see no key: their q and do."""
    policy = POLICIES[name]()
    variant = TiledBackward(Tiled(Precision.kernel(BF16), Tiling(16, 16)), policy, Tiling(16, 16), Recompute(delta))
    mask = Mask(causal=True, key_lengths=(15, 0))  # of 19 queries on 27 keys the first sees 9
    short = Mask(causal=True, key_lengths=(5, 0), window=6)
    for each in (mask, short):
        inputs = variant.round_inputs(*draw_all(SIZES))
        clean = variant(*inputs, each).tensors()
        q, k, v, do = (x.clone() for x in inputs)
        for b, length in enumerate(each.key_lengths or ()):
            k[b, :, length:], v[b, :, length:] = poison, poison
        hidden = is_fully_masked(each, 2, 19, 27)[:, None].expand(2, 4, 19)
        assert bool(hidden.any())
        q[hidden], do[hidden] = poison, poison
        same(variant(q, k, v, do, each), clean)
        assert all(bool(tensor.isfinite().all()) for tensor in clean.values())
        assert bool((clean["dq"][hidden] == 0).all())
        for b, length in enumerate(each.key_lengths or ()):
            assert bool((clean["dk"][b, :, length:] == 0).all())
            assert bool((clean["dv"][b, :, length:] == 0).all())


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
    if where in ("q", "do"):  # row 20 stands at position 36 and sees keys 28 to 36
        touched_keys = torch.zeros(53, dtype=torch.bool)
        touched_keys[28:37] = True
        touched_rows = torch.zeros(37, dtype=torch.bool)
        touched_rows[20] = True
    else:  # key 20 is seen by the rows at positions 20 to 28, rows 4 to 12, and these see keys 12 to 28
        touched_rows = torch.zeros(37, dtype=torch.bool)
        touched_rows[4:13] = True
        touched_keys = torch.zeros(53, dtype=torch.bool)
        touched_keys[12:29] = True
    poisoned[:, :, 20] = 0.0
    bound = fp64_bounds(inputs, 8**-0.5, 7, 5)
    for output, touched in (("dq", touched_rows), ("dk", touched_keys), ("dv", touched_keys)):
        mine, plain = got[output][:, :, ~touched], clean[output][:, :, ~touched]
        assert bool(mine.isfinite().all()), output
        assert float((mine - plain).abs().max()) <= 2 * bound[output] * U64, output
    assert not bool(got["dq"][:, :, touched_rows].isfinite().all())


RANDOM = "bf16:stochastic:seed=2"


def test_stochastic_rounding_repeats_and_differs_between_replicates() -> None:
    cast = Cast.parse(RANDOM)
    variant = TiledBackward(
        Tiled(Precision.kernel(BF16)), BackwardPrecision.throughout(cast), Tiling(16, 16), Recompute(DeltaForm.PROBABILITIES)
    )
    inputs = variant.round_inputs(*draw_all(SIZES))
    first, again = variant(*inputs, Mask()), variant(*inputs, Mask())
    same(first, again.tensors())
    other = variant.replicate(1)(*inputs, Mask()).tensors()
    assert all(not torch.equal(tensor, other[name]) for name, tensor in first.tensors().items())
    plain = TiledBackward(GOLDEN, BackwardPrecision.golden())
    assert plain.replicate(1) is plain


def test_a_run_counts_its_events() -> None:
    inputs = draw_all(SIZES, spread=4.0)
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
