"""Compiled passes give the bits of the tensor path, both passes of attention: outputs, LSE, gradients, counters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.dot import Dot
from numdev.arithmetic.rounding import Cast
from numdev.attention.base import Gradients, Output
from numdev.attention.compiled.rules import COMPILED
from numdev.attention.differentiable import saved_by
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import EXPONENTIALS, Exponential, Normalise, OnlineSoftmax, ScaleOn
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from tests.attention.gradients import Inputs, draw_all
from tests.attention.test_tiled import masks, tilings
from tests.attention.test_tiled_backward import orders, recomputations
from tests.cases import MASKS, draw

pytestmark = pytest.mark.xdist_group("compiled")  # compiled once, by one worker

pytest.importorskip("numba")

CASTS = st.sampled_from(
    ["fp32", "bf16", "fp16", "e5m2", "e4m3fn", "e4m3fn:saturate", "tf32", "e3m4", "bf16:saturate", "int8", "e2m1finite"]
).map(Cast.parse)
DOTS = st.builds(Dot, CASTS, st.sampled_from([None, None, None, 1, 3, 8, 20]))
USUAL = st.sampled_from(["bf16", "fp16", "e4m3fn", "e5m2", "kernel_bf16", "eager_fp16"])


def policies(kind: type, dots: set[str]) -> st.SearchStrategy[object]:
    """Usual policies, and any cast in any step."""
    names = kind.golden().steps()  # type: ignore[attr-defined]
    anything = st.fixed_dictionaries({name: DOTS if name in dots else CASTS for name in names}).map(lambda own: kind(**own))
    return st.one_of(USUAL.map(kind.parse), anything)  # type: ignore[attr-defined]


FORWARD_POLICIES = policies(Precision, {"scores", "row_sum", "values"})
BACKWARD_POLICIES = policies(BackwardPrecision, {"scores", "dp", "delta", "dq", "dk", "dv"})
EXPONENTIALS_OF_ALL_KINDS = st.sampled_from(
    [Exponential.EXP, Exponential.EXP2, EXPONENTIALS["exp2_poly3"], EXPONENTIALS["exp2_fa4"]]
)
SOFTMAXES = st.builds(OnlineSoftmax, st.sampled_from(Normalise), exp=EXPONENTIALS_OF_ALL_KINDS, scale_on=st.sampled_from(ScaleOn))
SIZES = st.tuples(st.sampled_from([(1, 1), (2, 1), (4, 2)]), st.integers(1, 40), st.integers(1, 70), st.integers(1, 20))
SPREADS = st.sampled_from([1.0, 0.1, 4.0, 1e4])
FORWARD = Tiled(Precision.parse("kernel_bf16"))


def both(variant: Tiled, inputs: tuple[torch.Tensor, ...], mask: Mask) -> tuple[Output, Output]:
    q, k, v = inputs
    with by(Path.TENSORS):
        tensors = variant(q, k, v, mask, 0.3)
    with by(Path.COMPILED):
        return tensors, variant(q, k, v, mask, 0.3)


def both_backward(variant: TiledBackward, inputs: Inputs, mask: Mask) -> tuple[Gradients, Gradients]:
    """From what one forward pass saved."""
    with by(Path.TENSORS):
        saved = saved_by(variant.forward, variant.reads, inputs[:3], mask, 0.3)
        tensors = variant.backward(*inputs, saved, mask, 0.3)
    with by(Path.COMPILED):
        return tensors, variant.backward(*inputs, saved, mask, 0.3)


def assert_bits(tensors: Output | Gradients, compiled: Output | Gradients) -> None:
    assert (tensors.kernel, compiled.kernel) == ("", COMPILED)
    for name, a in tensors.tensors().items():
        b = compiled.tensors()[name]
        same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} of {name} differ"
    assert compiled.counters == tensors.counters


def fitting(mask: Mask, keys: int, inputs: tuple[torch.Tensor, ...]) -> Mask:
    """The mask for so many keys; none where an unseen number might not be finite."""
    if mask.key_lengths is not None:
        mask = replace(mask, key_lengths=(min(mask.key_lengths[0], keys),))
    return mask if all(bool(x.isfinite().all()) for x in inputs) else Mask()


@settings(max_examples=25)
@given(FORWARD_POLICIES, tilings, SOFTMAXES, masks, SIZES, SPREADS, st.booleans())
def test_any_policy_and_recurrence(precision, tiling, soft, mask, sizes, spread, count) -> None:  # type: ignore[no-untyped-def]
    heads, queries, keys, dim = sizes
    inputs = precision.round_inputs(*draw((1, *heads, queries, keys, dim), queries, spread=spread))
    assert_bits(*both(Tiled(precision, tiling, soft, count), inputs, fitting(mask, keys, inputs)))


@settings(max_examples=15)
@given(
    BACKWARD_POLICIES, tilings, recomputations, EXPONENTIALS_OF_ALL_KINDS, orders, masks, SIZES, st.tuples(SPREADS, st.booleans())
)
def test_any_policy_order_and_mask(precision, tiling, recompute, exp, order, mask, sizes, rest) -> None:  # type: ignore[no-untyped-def]
    (heads, queries, keys, dim), (spread, count) = sizes, rest
    inputs = precision.round_inputs(*draw_all((1, *heads, queries, keys, dim), queries, spread=spread))
    variant = TiledBackward(FORWARD, precision, replace(tiling, splits=1), replace(recompute, exponential=exp), order, count)
    assert_bits(*both_backward(variant, inputs, fitting(mask, keys, inputs)))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize(
    ("name", "tiling"), [("bf16", Tiling(16, 16)), ("kernel_fp16", Tiling(20, 12, Order.RANDOM)), ("e4m3fn", Tiling(8, 32))]
)
def test_batch_entries_of_different_lengths(name: str, tiling: Tiling, mask: str) -> None:
    forward, backward = Precision.parse(name), BackwardPrecision.parse(name)
    inputs = draw_all((2, 4, 2, 37, 53, 24))
    assert_bits(*both(Tiled(forward, tiling), forward.round_inputs(*inputs[:3]), MASKS[mask]))
    assert_bits(*both_backward(TiledBackward(FORWARD, backward, tiling), backward.round_inputs(*inputs), MASKS[mask]))


@pytest.mark.parametrize("turns", [Turns(None), Turns(2), Turns(3)], ids=str)
def test_the_walks_of_kernels(turns: Turns) -> None:
    """Heads apart, and meetings of a few tiles of queries."""
    precision = BackwardPrecision.parse("kernel_bf16")
    inputs = precision.round_inputs(*draw_all((1, 4, 2, 300, 260, 16)))
    for mask in (Mask(), Mask(causal=True)):
        assert_bits(*both_backward(TiledBackward(FORWARD, precision, Tiling(64, 32), turns=turns), inputs, mask))


@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "kernel_bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_stay_where_they_were(name: str, value: float) -> None:
    backward = BackwardPrecision.parse(name)
    for which in range(4):
        inputs = backward.round_inputs(*draw_all((1, 2, 1, 20, 20, 8)))
        inputs[which][0, 0, 7, 3] = value
        assert_bits(*both_backward(TiledBackward(FORWARD, backward, Tiling(16, 16)), inputs, Mask()))
        for normalise in Normalise:
            variant, mask = Tiled(Precision.parse(name), Tiling(16, 16), OnlineSoftmax(normalise)), Mask(causal=which != 2)
            assert_bits(*both(variant, inputs[:3], mask))


@pytest.mark.parametrize("name", ["bf16", "kernel_bf16"])
def test_blocks_and_threads_change_no_bit_and_arguments_are_left_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from numdev.attention.compiled import run

    threads, mask = torch.get_num_threads(), Mask(causal=True)
    inputs = BackwardPrecision.parse(name).round_inputs(*draw_all((2, 4, 2, 150, 70, 16)))
    kept = [x.clone() for x in inputs]
    forward = Tiled(Precision.parse(name), Tiling(16, 16))
    backward = TiledBackward(FORWARD, BackwardPrecision.parse(name), Tiling(16, 16))
    assert_bits(*both(forward, inputs[:3], mask))
    monkeypatch.setattr(run, "_WORKSPACE", 1)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_bits(*both(forward, inputs[:3], mask))
            assert_bits(*both_backward(backward, inputs, mask))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
