"""Compiled passes give the bits of the tensor path: outputs, LSE, counters."""

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
from numdev.attention.fused.rule import FUSED
from numdev.attention.mask import Mask
from numdev.attention.path import Path, by
from numdev.attention.precision import Precision
from numdev.attention.softmax import EXPONENTIALS, Exponential, Maximum, Normalise, OnlineSoftmax, ScaleOn, SumOver
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Order, Tiling
from tests.attention.test_tiled import FA1, masks, recurrences, tilings
from tests.cases import MASKS, POLICIES, draw

pytestmark = pytest.mark.xdist_group("fused")  # compiled once, by one worker

pytest.importorskip("numba")

Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

CASTS = st.sampled_from(
    [
        *("fp32", "bf16", "fp16", "e5m2", "e4m3fn", "e4m3fn:saturate", "tf32", "e3m4", "bf16:saturate", "int8", "e2m1finite"),
        *("bf16:toward_zero", "fp16:up", "e5m2:down", "bf16:odd", "fp16:nearest_away", "bf16:flush", "e4m3fn:toward_zero:flush"),
    ]
).map(Cast.parse)
DOTS = st.builds(Dot, CASTS, st.sampled_from([None, None, None, 1, 3, 8, 20]))
anything = st.builds(
    Precision,
    inputs=CASTS,
    scores=DOTS,
    exponential=CASTS,
    rescale=CASTS,
    row_sum=DOTS,
    probabilities=CASTS,
    values=DOTS,
    accumulator=CASTS,
    output=CASTS,
)
usual = st.builds(
    Precision.parse, st.sampled_from(["bf16", "fp16", "e4m3fn", "e5m2", "kernel_bf16", "eager_fp16", "kernel_e4m3fn"])
)
exponentials = st.sampled_from([Exponential.EXP, Exponential.EXP2, EXPONENTIALS["exp2_poly3"], EXPONENTIALS["exp2_fa4"]])

LOOPS = [
    (Tiling(16, 16), OnlineSoftmax(), "none", False),
    (Tiling(16, 16, Order.REVERSE), OnlineSoftmax(Normalise.EACH, exp=Exponential.EXP2), "causal", True),
    (
        Tiling(32, 16, Order.RANDOM, splits=2),
        OnlineSoftmax(exp=EXPONENTIALS["exp2_poly3"], scale_on=ScaleOn.QUERIES),
        "window",
        False,
    ),
    (Tiling(20, 17, Order.OUTSIDE_IN, splits=3), OnlineSoftmax(Normalise.EACH, rescale_threshold=1.0), "all", True),
    (Tiling(64, 64, Order.STRIDED), OnlineSoftmax(p_scale=256.0, scale_on=ScaleOn.QUERIES), "causal window", False),
    (Tiling(16, 32, Order.STRIDED), OnlineSoftmax(Normalise.EACH, tie_shift=2.0, p_scale=127.0), "lengths", True),
    (Tiling(16, 16), FA1, "none", True),
    (Tiling(16, 16, splits=2), replace(FA1, exp=Exponential.EXP2, p_scale=256.0, tie_shift=3.0), "all", True),
    (Tiling(16, 24), OnlineSoftmax(maximum=Maximum.LOCAL, rescale_threshold=2.0), "causal", False),
]
SHIPPED_LOOPS = [
    (Tiling(16, 16), OnlineSoftmax(exp=EXPONENTIALS["exp2_fa4"], rescale_threshold=8.0, p_scale=256.0)),
    (Tiling(16, 20, Order.REVERSE), OnlineSoftmax(exp=Exponential.EXP2, p_scale=2688.0, sum_over=SumOver.PROBABILITIES)),
    (Tiling(32, 40), OnlineSoftmax(exp=Exponential.polynomial((1.0, 0.65, 0.35), 0.3), sum_over=SumOver.PROBABILITIES)),
]


def both(variant: Tiled, inputs: Inputs, mask: Mask, scale: float = 0.3) -> tuple[Output, Output]:
    with by(Path.TENSORS):
        tensors = variant(*inputs, mask, scale)
    with by(Path.COMPILED):
        return tensors, variant(*inputs, mask, scale)


def assert_bits(tensors: Output | Gradients, compiled: Output | Gradients) -> None:
    assert (tensors.kernel, compiled.kernel) == ("", FUSED)
    for name, a in tensors.tensors().items():
        b = compiled.tensors()[name]
        same = (a.view(torch.int32) == b.view(torch.int32)) | (a.isnan() & b.isnan())
        assert bool(same.all()), f"{int((~same).sum())} of {same.numel()} of {name} differ"
    assert compiled.counters == tensors.counters


@settings(max_examples=80)
@given(
    st.one_of(usual, anything),
    tilings,
    recurrences,
    exponentials,
    masks,
    st.tuples(st.sampled_from([(1, 1), (2, 1), (4, 2)]), st.integers(1, 40), st.integers(1, 70), st.integers(1, 20)),
    st.sampled_from([1.0, 0.1, 4.0, 1e4]),
    st.booleans(),
)
def test_any_policy_and_recurrence(precision, tiling, soft, exp, mask, sizes, spread, count) -> None:  # type: ignore[no-untyped-def]
    heads, queries, keys, dim = sizes
    if mask.key_lengths is not None:
        mask = replace(mask, key_lengths=(min(mask.key_lengths[0], keys),))
    inputs = precision.round_inputs(*draw((1, *heads, queries, keys, dim), queries, spread=spread))
    variant = Tiled(precision, tiling, replace(soft, exp=exp), count)
    if not bool(inputs[2].isfinite().all()) and not mask.is_none:
        mask = Mask()
    assert_bits(*both(variant, inputs, mask))


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("name", ["uniform_bf16", "kernel_fp16", "fp8"])
def test_batch_entries_of_different_lengths(name: str, mask: str) -> None:
    precision = POLICIES[name]()
    inputs = precision.round_inputs(*draw((2, 4, 2, 37, 53, 24)))
    for side in (16, 20):
        assert_bits(*both(Tiled(precision, replace(LOOPS[0][0], bc=side)), inputs, MASKS[mask]))


@pytest.mark.parametrize(("tiling", "soft"), SHIPPED_LOOPS)
@pytest.mark.parametrize("name", [name for name in Precision.SHIPPED if name != "sage3"])
def test_shipped_policies(name: str, tiling, soft: OnlineSoftmax) -> None:  # type: ignore[no-untyped-def]
    precision = Precision.parse(name)
    inputs = precision.round_inputs(*draw((1, 2, 1, 37, 53, 24)))
    assert_bits(*both(Tiled(precision, tiling, soft), inputs, Mask(causal=True), 0.21))


@pytest.mark.parametrize("name", ["bf16", "e4m3fn", "kernel_bf16"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("normalise", range(3))
def test_what_is_not_finite_stays_where_it_was(name: str, value: float, normalise: int) -> None:
    """In one query, and in one key that half of the rows do not see."""
    precision, soft = Precision.parse(name), [LOOPS[0][1], LOOPS[1][1], LOOPS[7][1]][normalise]
    variant = Tiled(precision, LOOPS[0][0], soft)
    q, k, v = precision.round_inputs(*draw((1, 2, 1, 40, 40, 8)))
    q[0, 0, 7, 3] = value
    k[0, 0, 20, 2] = value
    for mask in (Mask(), Mask(causal=True)):
        assert_bits(*both(variant, (q, k, v), mask))
    v[0, 0, 11, 1] = value
    assert_bits(*both(variant, (q, k, v), Mask()))


@pytest.mark.parametrize("name", ["bf16", "kernel_bf16"])
def test_blocks_and_threads_change_no_bit(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from numdev.attention.fused import walk

    precision, threads = Precision.parse(name), torch.get_num_threads()
    variant = Tiled(precision, LOOPS[0][0])
    inputs = precision.round_inputs(*draw((2, 4, 2, 150, 70, 16)))
    tensors, compiled = both(variant, inputs, Mask(causal=True))
    assert_bits(tensors, compiled)
    monkeypatch.setattr(walk, "_WORKSPACE", 1)
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            assert_bits(tensors, both(variant, inputs, Mask(causal=True))[1])
            assert torch.get_num_threads() == count
    finally:
        torch.set_num_threads(threads)


def test_arguments_are_left_alone() -> None:
    precision = Precision.parse("bf16")
    inputs = precision.round_inputs(*draw((1, 2, 1, 40, 64, 16)))
    kept = [x.clone() for x in inputs]
    both(Tiled(precision), inputs, Mask())
    assert all(torch.equal(a, b) for a, b in zip(inputs, kept, strict=True))
