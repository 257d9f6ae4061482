"""Exact attention against 200-bit arithmetic, within a bound derived from d, N and the sizes of the scores."""

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
from numdev.attention.exact import Exact
from numdev.attention.mask import Mask
from tests.cases import MASKS, U64, draw, lse_error, lse_of, output_error, reach
from tests.oracles.multiprecision import attention

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
    st.sampled_from([0.25, 1.0, 1 / math.sqrt(3), 30.0]),
    st.integers(0, 99),
)
def test_any_small_problem(
    batch: int, heads: tuple[int, int], queries: int, keys: int, dim: int, mask: Mask, scale: float, seed: int
) -> None:
    """One key, one query, grouped heads, more queries than keys, every mask, scores from tiny to hundreds."""
    if mask.key_lengths is not None:
        mask = Mask(mask.causal, mask.window, tuple(min(length, keys) for length in mask.key_lengths[:batch]))
    check_against_200_bits(*draw((batch, *heads, queries, keys, dim), seed), mask, scale)


def test_error_grows_with_the_scores_as_the_bound_says() -> None:
    """Keys with a large common part: large scores that differ little. The term in A carries the error, and the bound."""
    q, k, v = draw((1, 1, 1, 8, 12, 6))
    k = k + 1000.0
    check_against_200_bits(q, k, v, Mask(), 1.0)
    off = float((Exact()(q, k, v, Mask(), 1.0).out - attention(q, k, v, Mask(), 1.0)[0]).abs().max())
    assert off > (6 + 12 + 10) * U64 * float(v.abs().max()), "d and N alone do not bound it"


def test_scores_beyond_the_range_of_exp_are_no_matter() -> None:
    q, k, v = draw((1, 1, 1, 4, 5, 3))
    check_against_200_bits(q * 1e4, k, v, Mask(), 1.0)
    check_against_200_bits(q * 1e-300, k, v, Mask(), 1.0)


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("workspace", [1, 1000, 5000])
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
    assert [t.dtype for t in Exact().round_inputs(low_q, low_k, low_v)] == [torch.float64] * 3


def test_annotated_shapes_are_enforced(pytestconfig: pytest.Config) -> None:
    if not pytestconfig.getoption("--shapes"):
        pytest.skip("`make shapes` checks them")
    with pytest.raises(TypeCheckError):
        Output(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 5))
