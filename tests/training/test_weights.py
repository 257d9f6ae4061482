"""Metrics of weights against NumPy and SciPy, and what each can see."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.spatial.distance import cosine
from scipy.stats import wasserstein_distance

from numdev.errors import BadInput
from numdev.training.weights import METRICS, MODEL, WeightDeviation, Weights, deviations

CPU = torch.device("cpu")


def drawn(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@given(st.integers(0, 1000), st.integers(1, 300))
def test_each_metric_is_that_of_numpy_and_scipy(seed: int, count: int) -> None:
    tensors = w, w0, i, i0 = [drawn(seed + n, count) for n in range(4)]
    found = WeightDeviation.between(*tensors)
    x, y, a, b = (t.double().numpy() for t in (w, w0, i, i0))
    assert found.max_difference == np.abs(x - y).max()
    # FP64 sums of n terms in another order: n u of the sum of their sizes, and those are of order 1
    assert found.wasserstein == pytest.approx(wasserstein_distance(x, y), rel=1e-12, abs=1e-12)
    assert found.relative_frobenius == pytest.approx(np.linalg.norm(x - y) / np.linalg.norm(y), rel=1e-12)
    assert found.cosine == pytest.approx(1 - cosine(x, y), abs=1e-12)
    assert found.change_cosine == pytest.approx(1 - cosine(x - a, y - b), abs=1e-12)


@given(st.integers(0, 1000), st.integers(2, 300))
def test_the_same_weights_deviate_by_exactly_0(seed: int, count: int) -> None:
    w, i = drawn(seed, count), drawn(seed + 1, count)
    assert WeightDeviation.between(w, w, i, i) == WeightDeviation(0.0, 0.0, 0.0, 1.0, 1.0)


@given(st.integers(0, 1000), st.integers(2, 300))
def test_a_permutation_is_seen_by_all_but_wasserstein(seed: int, count: int) -> None:
    w = drawn(seed, count)
    found = WeightDeviation.between(w.roll(1), w, torch.zeros_like(w), torch.zeros_like(w))
    assert found.wasserstein == 0
    assert found.max_difference > 0
    assert found.relative_frobenius > 0
    assert found.cosine < 1


def test_a_common_factor_is_seen_by_all_but_the_cosines() -> None:
    w, zero = drawn(0, 100), torch.zeros(100)
    found = WeightDeviation.between(2 * w, w, zero, zero)
    assert found.cosine == pytest.approx(1, abs=1e-12)
    assert found.change_cosine == pytest.approx(1, abs=1e-12)
    assert found.relative_frobenius == pytest.approx(1, rel=1e-12)
    assert found.wasserstein > 0


def test_before_the_first_step_no_change_has_a_direction() -> None:
    w = drawn(0, 10)
    assert math.isnan(WeightDeviation.between(w, w, w, w).change_cosine)


def test_weights_that_are_not_finite_have_no_metrics() -> None:
    w = drawn(0, 10)
    found = WeightDeviation.between(w / 0, w, w, w).metrics()
    assert set(found) == set(METRICS)
    assert all(map(math.isnan, found.values()))


def test_every_tensor_and_all_together() -> None:
    now, start = ({"a": drawn(n, 3, 4), "b": drawn(n + 1, 5)} for n in (0, 2))
    other = {"a": now["a"] + 0.25, "b": now["b"].clone()}
    found = deviations(Weights(other, start), Weights(now, start), CPU)
    assert list(found) == [MODEL, "a", "b"]
    assert found["b"].max_difference == 0 < found["a"].max_difference == found[MODEL].max_difference
    turned = [{name: part[name] for name in ("b", "a")} for part in (other, now, start)]
    again = deviations(Weights(turned[0], turned[2]), Weights(turned[1], turned[2]), CPU)
    assert list(again.items()) == list(found.items())  # a file of tensors has no order
    both = [torch.cat([part["a"].flatten(), part["b"]]) for part in (other, now, start, start)]
    assert found[MODEL] == WeightDeviation.between(*both)


def test_weights_of_other_models_are_refused() -> None:
    a, b = {"a": drawn(0, 3)}, {"a": drawn(0, 4)}
    with pytest.raises(BadInput, match="runs of the same task"):
        deviations(Weights(a, a), Weights(b, b), CPU)
    with pytest.raises(BadInput, match="holds something"):
        WeightDeviation.between(*[torch.zeros(0)] * 4)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_on_a_gpu_they_are_those_of_the_cpu() -> None:
    parts = [{"w": drawn(n, 10_000_000)} for n in range(4)]
    args = Weights(parts[0], parts[2]), Weights(parts[1], parts[3])
    cpu, gpu = deviations(*args, CPU), deviations(*args, torch.device("cuda"))
    for name in cpu:
        # FP64 sums of 1e7 terms: 1e7 u of the sum of sizes at the very most
        assert gpu[name].metrics() == pytest.approx(cpu[name].metrics(), rel=1e-9, abs=1e-9)
        assert gpu[name].max_difference == cpu[name].max_difference
