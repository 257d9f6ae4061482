"""Exact attention and its gradients against multiprecision arithmetic, within bounds derived from d, N and the scores."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from torch import Tensor

from numdev.arithmetic.formats import FP64
from numdev.attention import exact
from numdev.attention.base import Output
from numdev.attention.differentiable import Backward, saved_by
from numdev.attention.exact import Exact, ExactBackward
from numdev.attention.mask import Mask
from numdev.attention.naive import NaiveBackward
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import OutputForDelta
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.errors import BadInput
from tests.attention.gradients import Inputs, bounds, draw_all, element_bounds
from tests.cases import MASKS, U64, Sizes, draw, lse_error, lse_of, output_error, reach
from tests.oracles.double_loop import is_fully_masked
from tests.oracles.multiprecision import attention, gradients, gradients_by_formula

EVERYTHING = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 8)),
    key_lengths=st.one_of(st.none(), st.tuples(st.integers(0, 3), st.integers(0, 3))),
)


def check_against_200_bits(q: Tensor, k: Tensor, v: Tensor, mask: Mask, scale: float) -> None:
    """`out` within `output_error` of `max |v|`, LSE within `lse_error`, both in u; no more than the oracle's own u."""
    got, (out, lse) = Exact()(q, k, v, mask, scale), attention(q, k, v, mask, scale)
    a, keys, dim = reach(q, k, scale), k.shape[2], q.shape[3]
    assert got.out.dtype == lse_of(got).dtype == torch.float64
    assert float((got.out - out).abs().max()) <= (output_error(dim, keys, a) + 1) * U64 * float(v.abs().max())
    finite = lse.isfinite()
    assert torch.equal(lse_of(got).isneginf(), ~finite)
    off = (lse_of(got) - lse)[finite].abs()
    assert bool((off <= (lse_error(dim, keys, a) + 1) * U64).all())


@settings(max_examples=60)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1), (2, 2), (4, 2)]),
    st.integers(1, 9),
    st.integers(1, 9),
    st.integers(1, 5),
    EVERYTHING,
    st.sampled_from([1e-300, 0.25, 1 / math.sqrt(3), 30.0, 1e4]),
    st.integers(0, 99),
)
def test_any_small_problem(
    batch: int, heads: tuple[int, int], queries: int, keys: int, dim: int, mask: Mask, scale: float, seed: int
) -> None:
    """One key, one query, grouped heads, more queries than keys, every mask, scores from tiny to hundreds."""
    if mask.key_lengths is not None:
        mask = Mask(mask.causal, mask.window, tuple(min(length, keys) for length in mask.key_lengths[:batch]))
    check_against_200_bits(*draw((batch, *heads, queries, keys, dim), seed), mask, scale)


@pytest.mark.parametrize("mask", ["none", "all"])
@pytest.mark.parametrize("workspace", [1, 5000])
def test_streaming_over_rows_changes_no_bit(mask: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = draw((2, 4, 2, 37, 53, 24))
    whole = Exact()(q, k, v, MASKS[mask])
    monkeypatch.setitem(exact._WORKSPACE, "cpu", workspace)
    parts = Exact()(q, k, v, MASKS[mask])
    assert torch.equal(parts.out, whole.out)
    assert torch.equal(lse_of(parts), lse_of(whole))


def test_default_scale_and_formats() -> None:
    q, k, v = draw((1, 1, 1, 5, 9, 16))
    assert torch.equal(Exact()(q, k, v, Mask()).out, Exact()(q, k, v, Mask(), 0.25).out)
    assert Exact().format == FP64
    low_q, low_k, low_v = (t.to(torch.bfloat16) for t in (q, k, v))
    widened = Exact()(low_q.double(), low_k.double(), low_v.double(), Mask())
    assert torch.equal(Exact()(low_q, low_k, low_v, Mask()).out, widened.out)
    assert ExactBackward().formats == dict.fromkeys(OUTPUTS, FP64)
    for rounded in (Exact().round_inputs(low_q, low_k, low_v), ExactBackward().round_inputs(low_q, low_k, low_v, low_q)):
        assert {tensor.dtype for tensor in rounded} == {torch.float64}


def test_annotated_shapes_are_enforced(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--shapes"):
        pytest.skip("`make shapes` checks them")
    with pytest.raises(TypeCheckError):
        Output(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5))


OUTPUTS = ("dq", "dk", "dv", "delta")


def check_against_400_bits(inputs: Inputs, mask: Mask, scale: float) -> None:
    """Each output within its bound, and the oracle's own last rounding."""
    got, want, bound = ExactBackward()(*inputs, mask, scale), gradients(*inputs, mask, scale), bounds(inputs, scale)
    for name, expected in zip(OUTPUTS, want, strict=True):
        found = got.tensors()[name]
        assert found.dtype == torch.float64
        assert found.shape == expected.shape
        assert float((found - expected).abs().max()) <= (vars(bound)[name] + float(expected.abs().max())) * U64, name


@settings(max_examples=25)
@given(
    st.integers(1, 2),
    st.sampled_from([(1, 1), (2, 1), (2, 2)]),
    st.integers(1, 5),
    st.integers(1, 5),
    st.integers(1, 3),
    EVERYTHING,
    st.sampled_from([0.25, 1.0, 1 / math.sqrt(3), 8.0]),
    st.integers(0, 99),
)
def test_gradients_of_any_small_problem(
    batch: int, heads: tuple[int, int], queries: int, keys: int, dim: int, mask: Mask, scale: float, seed: int
) -> None:
    if mask.key_lengths is not None:
        mask = Mask(mask.causal, mask.window, tuple(min(length, keys) for length in mask.key_lengths[:batch]))
    check_against_400_bits(draw_all((batch, *heads, queries, keys, dim), seed), mask, scale)


@pytest.mark.parametrize("sizes", [(1, 4, 2, 9, 12, 4), (2, 2, 2, 14, 9, 3)], ids=["grouped", "batch"])
@pytest.mark.parametrize(("mask", "spread"), [(Mask(), 1.0), (Mask(causal=True), 8.0), (Mask(window=4), 64.0), (Mask(), 256.0)])
def test_every_element_is_within_a_bound_that_shrinks_with_the_weights(sizes: Sizes, mask: Mask, spread: float) -> None:
    """Where P saturates the gradient is a small part of what cancels in `dP - delta`; see `element_bounds`."""
    check_elements(draw_all(sizes, spread=spread), mask)


@pytest.mark.parametrize("values_too", [False, True])
def test_tied_rows_are_within_the_same_bound(values_too: bool) -> None:
    """Each key twice: the two largest weights of each row are 1/2."""
    q, k, v, do = draw_all((1, 2, 1, 6, 10, 3), spread=64.0)
    k[:, :, 5:] = k[:, :, :5]
    if values_too:
        v[:, :, 5:] = v[:, :, :5]
    check_elements((q, k, v, do), Mask())


def check_elements(inputs: Inputs, mask: Mask) -> None:
    """Each element of dQ, dK and dV against 2000-bit arithmetic; the oracle's own last rounding is 1 u of the gradient."""
    scale = inputs[0].shape[-1] ** -0.5
    got, want = ExactBackward()(*inputs, mask, scale).tensors(), gradients_by_formula(*inputs, mask, scale)
    for name, bound in element_bounds(inputs, want["p"], scale).items():
        assert bool(((got[name] - want[name]).abs() <= (bound + want[name].abs()) * U64).all()), name


def test_the_bound_is_no_licence() -> None:
    """An error bounded by `c N u` is much less than a thousandth of the gradient: a wrong factor would be seen."""
    inputs = draw_all((2, 4, 2, 37, 53, 24))
    got, bound = ExactBackward()(*inputs, Mask()), bounds(inputs, 24**-0.5)
    for name, found in got.tensors().items():
        assert 2 * vars(bound)[name] * U64 < 1e-6 * float(found.abs().max()), name


@pytest.mark.parametrize(("mask", "workspace"), [("none", 1), ("all", 50000)])
def test_streaming_over_queries_stays_within_the_bound(mask: str, workspace: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """In blocks of 48 rows and of 96 rows. dQ and delta, whose rows are independent, do not change at all."""
    inputs = draw_all((2, 4, 2, 130, 60, 24))
    whole = ExactBackward()(*inputs, MASKS[mask]).tensors()
    monkeypatch.setitem(exact._BACKWARD_WORKSPACE, "cpu", workspace)
    parts, bound = ExactBackward()(*inputs, MASKS[mask]).tensors(), bounds(inputs, 24**-0.5)
    for name, tensor in parts.items():
        assert name in ("dk", "dv") or torch.equal(tensor, whole[name]), name
        assert float((tensor - whole[name]).abs().max()) <= 2 * vars(bound)[name] * U64, name


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_padding_and_hidden_rows_touch_nothing(poison: float) -> None:
    mask = Mask(causal=True, key_lengths=(30, 0))
    q, k, v, do = draw_all((2, 2, 1, 37, 35, 4))
    clean = ExactBackward()(q, k, v, do, mask).tensors()
    k[0, :, 30:], v[0, :, 30:], k[1], v[1] = poison, poison, poison, poison
    hidden = is_fully_masked(mask, 2, 37, 35)[:, None].expand(2, 2, 37)
    q[hidden], do[hidden] = poison, poison
    for name, tensor in ExactBackward()(q, k, v, do, mask).tensors().items():
        assert bool(tensor.isfinite().all()), name
        assert torch.equal(tensor, clean[name]), name


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
