"""Compiled passes give the bits of the backward pass by tensor operations: gradients and counters."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16
from numdev.attention.base import Gradients
from numdev.attention.differentiable import saved_by
from numdev.attention.fused.backward_rule import backward_obstacle
from numdev.attention.fused.rule import FUSED
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.recurrence import BackwardRun
from numdev.attention.softmax import Recompute
from numdev.attention.tile_schedule import Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from tests.attention.backward.cases import Inputs, draw_all
from tests.attention.fused.test_fused import CASTS, DOTS, assert_bits, exponentials
from tests.attention.test_tiled_backward import masks, orders, recomputations, tilings
from tests.cases import MASKS

pytestmark = pytest.mark.xdist_group("fused")  # compiled once, by one worker

pytest.importorskip("numba")

_DOTS = ("scores", "dp", "delta", "dq", "dk", "dv")
_STEPS = BackwardPrecision.golden().steps()
anything = st.fixed_dictionaries({name: DOTS if name in _DOTS else CASTS for name in _STEPS}).map(
    lambda steps: BackwardPrecision(**steps)  # type: ignore[arg-type]
)
usual = st.builds(BackwardPrecision.parse, st.sampled_from(["bf16", "fp16", "e4m3fn", "e5m2", "kernel_bf16", "eager_fp16"]))
FORWARD = Tiled(Precision.parse("kernel_bf16"))


def both(variant: TiledBackward, inputs: Inputs, mask: Mask, scale: float = 0.3) -> tuple[Gradients, Gradients]:
    """By tensor operations and by compiled passes, from what one forward pass saved."""
    with by(Path.TENSORS):
        saved = saved_by(variant.forward, variant.reads, inputs[:3], mask, scale)
        tensors = variant.backward(*inputs, saved, mask, scale)
    with by(Path.COMPILED):
        return tensors, variant.backward(*inputs, saved, mask, scale)


@settings(max_examples=60)
@given(
    st.one_of(usual, anything),
    tilings,
    recomputations,
    exponentials,
    st.tuples(orders, masks, st.booleans()),
    st.tuples(st.sampled_from([(1, 1), (2, 1), (4, 2)]), st.integers(1, 40), st.integers(1, 70), st.integers(1, 20)),
    st.sampled_from([1.0, 0.1, 4.0, 1e4]),
)
def test_any_policy_order_and_mask(precision, tiling, recompute, exp, run, sizes, spread) -> None:  # type: ignore[no-untyped-def]
    (heads, queries, keys, dim), (order, mask, count) = sizes, run
    if mask.key_lengths is not None:
        mask = replace(mask, key_lengths=(min(mask.key_lengths[0], keys),))
    inputs = precision.round_inputs(*draw_all((1, *heads, queries, keys, dim), queries, spread=spread))
    if not all(bool(x.isfinite().all()) for x in inputs):
        mask = Mask()
    variant = TiledBackward(FORWARD, precision, tiling, replace(recompute, exponential=exp), order, count)
    assert_bits(*both(variant, inputs, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["bf16", "kernel_fp16", "e4m3fn"])
def test_batch_entries_of_different_lengths(name: str, mask: str) -> None:
    precision = BackwardPrecision.parse(name)
    inputs = precision.round_inputs(*draw_all((2, 4, 2, 37, 53, 24)))
    for tiling in (Tiling(16, 16), Tiling(20, 12, Order.RANDOM)):
        assert_bits(*both(TiledBackward(FORWARD, precision, tiling), inputs, MASKS[mask]))


@pytest.mark.parametrize("turns", [Turns(None, True), Turns(2, True), Turns(None, False), Turns(3, False)], ids=str)
def test_the_walks_of_kernels(turns: Turns) -> None:
    """Heads apart, and meetings of a few tiles of queries."""
    precision = BackwardPrecision.parse("kernel_bf16")
    inputs = precision.round_inputs(*draw_all((1, 4, 2, 300, 260, 16)))
    for mask in (Mask(), Mask(causal=True)):
        assert_bits(*both(TiledBackward(FORWARD, precision, Tiling(64, 32), turns=turns), inputs, mask))


@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "kernel_bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("which", range(4))
def test_what_is_not_finite_stays_where_it_was(name: str, value: float, which: int) -> None:
    precision = BackwardPrecision.parse(name)
    inputs = precision.round_inputs(*draw_all((1, 2, 1, 40, 40, 8)))
    inputs[which][0, 0, 7, 3] = value
    variant = TiledBackward(FORWARD, precision, Tiling(16, 16))
    assert_bits(*both(variant, inputs, Mask()))
    with by(Path.COMPILED):
        masked = variant(*inputs, Mask(causal=True), 0.3)
    assert masked.kernel == (FUSED if which == 2 else ""), "V alone meets only what is set to 0 where it is not seen"


@pytest.mark.parametrize("name", ["bf16", "kernel_bf16"])
def test_threads_change_no_bit_and_arguments_are_left_alone(name: str) -> None:
    precision, threads = BackwardPrecision.parse(name), torch.get_num_threads()
    inputs = precision.round_inputs(*draw_all((2, 4, 2, 150, 70, 16)))
    kept = [x.clone() for x in inputs]
    variant = TiledBackward(FORWARD, precision, Tiling(16, 16))
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_bits(*both(variant, inputs, Mask(causal=True)))
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))


REFUSED = [
    (BackwardPrecision.golden(), "FP64"),
    (BackwardPrecision.uniform(BF16).with_step(ds="bf16:stochastic"), "precision.ds: bf16:stochastic (rounding"),
    (BackwardPrecision.uniform(BF16).with_step(difference="posit8"), "posit8 (listing"),
]


@pytest.mark.parametrize(("precision", "reason"), REFUSED)
def test_what_it_does_not_take_goes_by_tensor_operations(
    precision: BackwardPrecision, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found: list[str | None] = []

    def noted(run: BackwardRun) -> str | None:
        found.append(backward_obstacle(run))
        return found[-1]

    monkeypatch.setattr("numdev.attention.tiled.backward_obstacle", noted)
    inputs = precision.round_inputs(*draw_all((1, 1, 1, 20, 20, 8)))
    with by(Path.COMPILED):
        assert TiledBackward(FORWARD, precision)(*inputs, Mask()).kernel == ""
    assert reason in str(found[0])


def test_a_short_run_does_not_load_compiled_code() -> None:
    precision = BackwardPrecision.parse("bf16")
    inputs = precision.round_inputs(*draw_all((1, 1, 1, 20, 20, 8)))
    assert TiledBackward(FORWARD, precision, Tiling(), Recompute())(*inputs, Mask()).kernel == ""
