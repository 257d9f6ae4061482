"""Exact attention and its gradients against multiprecision arithmetic, within bounds derived from d, N and the scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError

from numdev.arithmetic.formats import FP64
from numdev.attention import exact
from numdev.attention.base import Backward, Output, saved_by
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import OutputForDelta
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.errors import BadInput
from tests.attention.bounds import element_bounds, fp64_bounds
from tests.cases import MASKS, U64, Inputs, draw, draw_all, lse_error, lse_of, output_error, reach
from tests.oracles.multiprecision import attention

EVERYTHING = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 8)),
    key_lengths=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3))),
)


def check(inputs: Inputs, mask: Mask, scale: float) -> None:
    """Both passes against 2000 bits: each number within its own bound, in u; the oracle's own last rounding is 1 u of it.

    `out` within `output_error` of `max |v|`, LSE within `lse_error`; dQ, dK and dV within `element_bounds`, which shrink with the
    weights: where P saturates the gradient is a small part of what cancels in `dP - delta`.
    """
    q, k, v, do = inputs
    got, gradients = Exact()(q, k, v, mask, scale), ExactBackward()(*inputs, mask, scale).tensors()
    exact = attention(q, k, v, mask, scale, do)
    a, keys, dim = reach(q, k, scale), k.shape[2], q.shape[3]
    assert {tensor.dtype for tensor in (got.out, lse_of(got), *gradients.values())} == {torch.float64}
    assert float((got.out - exact["out"]).abs().max()) <= (output_error(dim, keys, a) + 1) * U64 * float(v.abs().max())
    finite = exact["lse"].isfinite()
    assert torch.equal(lse_of(got).isneginf(), ~finite)
    assert bool(((lse_of(got) - exact["lse"])[finite].abs() <= (lse_error(dim, keys, a) + 1) * U64).all())
    delta = torch.tensor(fp64_bounds(inputs, scale)["delta"], dtype=torch.float64)
    for name, bound in (element_bounds(inputs, exact["p"], scale) | {"delta": delta}).items():
        assert bool(((gradients[name] - exact[name]).abs() <= (bound + exact[name].abs()) * U64).all()), name


@settings(max_examples=60)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    st.tuples(st.integers(1, 9), st.integers(1, 9), st.integers(1, 4)),
    EVERYTHING,
    st.sampled_from([1e-300, 0.25, 1 / math.sqrt(3), 8.0, 30.0, 1e4]),
    st.booleans(),
    st.integers(0, 99),
)
def test_any_small_problem(
    batch: int, heads: tuple[int, int], sizes: tuple[int, int, int], mask: Mask, scale: float, tied: bool, seed: int
) -> None:
    """One key, one query, grouped heads, more queries than keys, every mask, ties; scores from tiny to where P saturates."""
    if mask.key_lengths is not None:
        mask = Mask(mask.causal, mask.window, tuple(min(length, sizes[1]) for length in mask.key_lengths[:batch]))
    inputs = draw_all((batch, *heads, *sizes), seed)
    if tied:  # the two largest weights of each row are 1/2
        half = sizes[1] // 2
        inputs[1][:, :, half : 2 * half] = inputs[1][:, :, :half]
    check(inputs, mask, scale)


def test_default_scale_and_formats() -> None:
    q, k, v = draw((1, 1, 1, 5, 9, 16))
    assert torch.equal(Exact()(q, k, v, Mask()).out, Exact()(q, k, v, Mask(), 0.25).out)
    assert Exact().format == FP64
    low_q, low_k, low_v = (t.to(torch.bfloat16) for t in (q, k, v))
    widened = Exact()(low_q.double(), low_k.double(), low_v.double(), Mask())
    assert torch.equal(Exact()(low_q, low_k, low_v, Mask()).out, widened.out)
    assert ExactBackward().formats == dict.fromkeys(("dq", "dk", "dv", "delta"), FP64)
    for rounded in (Exact().round_inputs(low_q, low_k, low_v), ExactBackward().round_inputs(low_q, low_k, low_v, low_q)):
        assert {tensor.dtype for tensor in rounded} == {torch.float64}


def test_annotated_shapes_are_enforced(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--shapes"):
        pytest.skip("`make shapes` checks them")
    with pytest.raises(TypeCheckError):
        Output(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5))


@pytest.mark.parametrize(("mask", "workspace"), [("none", 1), ("all", 50000)])
def test_streaming_over_queries_stays_within_the_bound(mask: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 48 rows and of 96 rows. dQ and delta, whose rows are independent, do not change at all."""
    inputs = draw_all((2, 4, 2, 130, 60, 24))
    whole = ExactBackward()(*inputs, MASKS[mask]).tensors()
    monkeypatch.setitem(exact._BACKWARD_WORKSPACE, "cpu", workspace)
    parts, bound = ExactBackward()(*inputs, MASKS[mask]).tensors(), fp64_bounds(inputs, 24**-0.5)
    for name, tensor in parts.items():
        assert name in ("dk", "dv") or torch.equal(tensor, whole[name]), name
        assert float((tensor - whole[name]).abs().max()) <= 2 * bound[name] * U64, name


def test_values_of_another_width_than_the_keys() -> None:
    q, k, _, _ = draw_all((1, 2, 1, 5, 9, 4))
    v, do = draw_all((1, 2, 1, 5, 9, 6))[2:]
    for variant in IMPLEMENTATIONS:
        found = variant(q, k, v, do, Mask())
        assert found.dv.shape == v.shape
        assert float((found.dq - ExactBackward()(q, k, v, do, Mask(), 0.5).dq).abs().max()) < 1e-13


IMPLEMENTATIONS: list[Backward] = [
    ExactBackward(),
    NaiveBackward(BackwardPrecision.golden(), Precision.golden()),
    TiledBackward(Tiled(Precision.golden()), BackwardPrecision.golden()),
]


def test_what_was_saved_must_fit() -> None:
    inputs = draw_all((1, 2, 1, 5, 9, 4))
    saved = saved_by(Exact(), OutputForDelta.ROUNDED, inputs[:3], Mask(), None)
    other = draw_all((1, 2, 1, 6, 9, 4))
    for variant in (ExactBackward(), TiledBackward(Exact(), BackwardPrecision.golden())):
        with pytest.raises(BadInput, match=r"^saved\.out: "):
            variant.backward(*other, saved, Mask())
