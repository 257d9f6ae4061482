"""Shapes and problems: what is refused, and what inputs they give."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.attention.captured import Captured
from numdev.attention.distributions import Distribution, Kind
from numdev.attention.mask import Mask
from numdev.attention.problem import Problem, Shape, Source
from numdev.errors import BadInput

NORMAL = Distribution(Kind.NORMAL)
SIZES = st.integers(1, 5)


@given(SIZES, SIZES, SIZES, SIZES, SIZES, SIZES)
def test_shapes(batch: int, group: int, kv_heads: int, queries: int, keys: int, dim: int) -> None:
    shape = Shape(batch, group * kv_heads, kv_heads, queries, keys, dim)
    problem = Problem(NORMAL, shape)
    tensors = problem.inputs(0)
    assert list(tensors) == ["q", "k", "v"]
    assert tensors["q"].shape == shape.q == (batch, group * kv_heads, queries, dim)
    assert tensors["k"].shape == tensors["v"].shape == shape.kv == (batch, kv_heads, keys, dim)


@pytest.mark.parametrize("name", ["batch", "heads", "kv_heads", "queries", "keys", "head_dim"])
def test_sizes_below_one_are_refused(name: str) -> None:
    with pytest.raises(BadInput, match=f"^problem.{name}: 0 "):
        Shape(**{name: 0})
    with pytest.raises(BadInput, match="^problem.kv_heads: 2"):
        Shape(heads=3, kv_heads=2)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan")])
def test_scales_that_are_refused(scale: float) -> None:
    with pytest.raises(BadInput, match="^problem.scale: "):
        Problem(NORMAL, scale=scale)


def test_scale() -> None:
    assert Problem(NORMAL, Shape(head_dim=64)).softmax_scale == 0.125
    assert Problem(NORMAL, Shape(head_dim=64), scale=3.0).softmax_scale == 3.0
    mask = Mask(causal=True)
    assert Problem(NORMAL, Shape(head_dim=16), mask).arguments() == {"mask": mask, "scale": 0.25}


@pytest.mark.parametrize("source", [NORMAL, Captured()], ids=lambda s: type(s).__name__)
def test_inputs_are_fp64_on_the_cpu_and_a_function_of_the_seed(source: Source) -> None:
    problem = Problem(source, Shape(queries=8, keys=9, head_dim=32))
    one, again, other = problem.inputs(0), problem.inputs(0), problem.inputs(1)
    for name, tensor in one.items():
        assert tensor.dtype == torch.float64
        assert tensor.device == torch.device("cpu")
        assert torch.equal(tensor, again[name])
        assert not torch.equal(tensor, other[name])
    assert isinstance(source, Source)
