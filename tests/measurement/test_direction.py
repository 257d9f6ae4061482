from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from torch import Tensor

from numdev.arithmetic.formats import BF16
from numdev.attention.naive import NaiveBackward
from numdev.attention.operation import ATTENTION, ATTENTION_BACKWARD
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.problem import Distribution, Kind, Problem, Shape
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Tiling
from numdev.measurement.deviation import COLUMNS, Deviations
from numdev.measurement.metrics import DIRECTED, METRICS, Direction, Sample
from numdev.measurement.runner import Runner
from numdev.results.record import Record

U = 2.0**-53
PROBLEM = Problem(Distribution(Kind.NORMAL), Shape(heads=2, queries=24, keys=24, head_dim=8))


def direction(error: Tensor, reference: Tensor | None = None) -> Direction:
    reference = torch.zeros_like(error) if reference is None else reference
    return Direction.of(Sample(reference + error), Sample(reference))


def tolerance(shape: tuple[int, ...]) -> float:
    """Of a share of the energy: each entry of the Gram matrix is off by at most `tokens u` of the energy, and an eigenvalue of a
    matrix of `dim` rows by `dim` times that (Weyl), and by as much from the eigensolver; a share is that over the energy."""
    return 4 * max(shape[-2:]) * min(shape[-2:]) * U + 1e-15


@given(arrays(np.float64, array_shapes(min_dims=2, max_dims=4, max_side=7), elements=st.integers(-9, 9)))
def test_rank_and_share_are_those_of_the_singular_values(error: np.ndarray[Any, Any]) -> None:
    result = direction(torch.from_numpy(error)).after(None)
    heads = [head for head in error.reshape(-1, *error.shape[-2:]) if head.any()]
    if not heads:
        assert all(math.isnan(value) for value in result.values())
        return
    values = [np.linalg.svd(head, compute_uv=False) for head in heads]
    shares = [float(s[0] ** 2 / (s**2).sum()) for s in values]
    assert result["top_share"] == pytest.approx(np.mean(shares), abs=tolerance(error.shape))
    # a rank is 1 / share, at most 7 here: its error is at most 49 times that of the share
    assert result["stable_rank"] == pytest.approx(np.mean([1 / share for share in shares]), abs=49 * tolerance(error.shape))


@pytest.mark.parametrize("shape", [(3, 40, 8), (3, 8, 40)])
def test_the_top_vector_is_that_of_the_singular_value_decomposition(shape: tuple[int, ...]) -> None:
    error = torch.from_numpy(np.random.default_rng(0).standard_normal(shape))
    error[..., 0, :] += 20.0  # well apart from the second singular value: a vector is off by u times energy over the gap
    result = direction(error)
    for head, vector in zip(error, result.vectors, strict=True):
        expected = np.linalg.svd(head.numpy())[2][0]
        assert abs(float(expected @ vector.numpy())) == pytest.approx(1.0, abs=1e-12)


def test_an_error_that_stays_keeps_its_direction() -> None:
    """Rows scaled anew at each seed: the direction among the columns stays, that of all elements does not."""
    draws, v = np.random.default_rng(3), np.array([3.0, 0.0, 4.0])
    first, second = (direction(torch.from_numpy(draws.standard_normal((2, 500, 1)) * v)) for _ in range(2))
    result = second.after(first)
    assert result["step_alignment"] == pytest.approx(1.0, abs=1e-12)
    assert abs(result["step_cosine"]) < 6 / math.sqrt(1000)
    same = first.after(first)
    assert same["step_cosine"] == pytest.approx(1.0, abs=1000 * U)
    opposite = direction(-torch.ones(1, 2, 2, dtype=torch.float64)).after(direction(torch.ones(1, 2, 2, dtype=torch.float64)))
    assert opposite["step_cosine"] == pytest.approx(-1.0, abs=8 * U)
    assert opposite["step_alignment"] == pytest.approx(1.0, abs=8 * U)  # a singular vector has no sign


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_error_that_is_not_finite_has_no_direction(bad: float) -> None:
    error = torch.ones(1, 3, 2, dtype=torch.float64)
    fine = direction(error)
    error[0, 1, 1] = bad
    result = Direction.of(Sample(error), Sample(torch.zeros_like(error)))
    assert all(math.isnan(value) for value in result.after(fine).values())
    after = fine.after(result)
    assert after["stable_rank"] == pytest.approx(1.0)
    assert math.isnan(after["step_cosine"])
    assert math.isnan(after["step_alignment"])


def measured(seeds: int = 3, bench: Runner | None = None) -> Record:
    forward = Tiled(Precision.kernel(BF16), Tiling(br=8, bc=8))
    variant = TiledBackward(forward, BackwardPrecision.kernel(BF16), Tiling(br=8, bc=8))
    bench = bench or Runner(Deviations(ATTENTION_BACKWARD), "cpu")
    return bench.measure(PROBLEM, variant, NaiveBackward.eager(BF16), seeds)


def test_gradients_have_rank_and_direction_and_delta_has_a_signed_bias() -> None:
    record = measured()
    assert set(DIRECTED) <= {column.name for column in record.primary}
    for row in record.rows:
        directed, later = row["output"] != "delta", row["seed"] > 0
        assert (row["stable_rank"] >= 1) == directed
        assert (0 < row["top_share"] <= 1) == directed
        assert math.isnan(row["step_cosine"]) == math.isnan(row["step_alignment"]) == (not (directed and later))
        assert math.isfinite(row["bias"])
        assert row["bias_error"] > 0
    assert {row["output"] for row in record.rows} == {"dq", "dk", "dv", "delta"}
    assert {row["subject"] for row in record.rows} == {"variant", "baseline"}


def test_an_operation_without_directed_outputs_records_nothing_more() -> None:
    assert Deviations(ATTENTION).columns["deviation"] == COLUMNS
    assert not {column.name for column in COLUMNS} & set(DIRECTED)
    assert not set(METRICS) & set(DIRECTED)
    plain = replace(ATTENTION_BACKWARD, outputs=tuple(replace(o, directed=False) for o in ATTENTION_BACKWARD.outputs))
    assert Deviations(plain).columns["deviation"] == COLUMNS
    assert not set(DIRECTED) & set(measured(1, Runner(Deviations(plain), "cpu")).rows[0])
