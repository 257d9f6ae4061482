"""The cost model against counts by brute force, and against the orders of growth that its source states."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.arithmetic.formats import BF16, E4M3FN
from numdev.attention import cost
from numdev.attention.base import Implementation
from numdev.attention.cost import Algorithm, Cost, CostModel, Width
from numdev.attention.distributions import Distribution
from numdev.attention.exact import Exact
from numdev.attention.instrumented import Instrumented
from numdev.attention.kernel_launch import KernelLaunch
from numdev.attention.mask import Mask
from numdev.attention.naive import Naive
from numdev.attention.precision import Precision
from numdev.attention.problem import Problem, Shape
from numdev.attention.tiled import Tiled
from numdev.attention.tiling import Tiling
from numdev.attention.triton import Triton
from numdev.attention.vendor.custom import Custom
from numdev.attention.vendor.flex import Flex
from numdev.attention.vendor.sdpa import Backend, Sdpa
from numdev.attention.vendor.vanilla import Vanilla

TWO, FOUR = Width(2.0, 2.0), Width(4.0, 4.0)
CPU = torch.device("cpu")
UNKNOWN = KernelLaunch()


def problem(n: int = 256, d: int = 64, mask: Mask | None = None, **sizes: int) -> Problem:
    shape = Shape(**({"queries": n, "keys": n, "head_dim": d} | sizes))
    return Problem(Distribution(), shape, mask or Mask())


@st.composite
def masked(draw: st.DrawFn) -> tuple[Mask, int, int, int]:
    batch, queries, keys = draw(st.integers(1, 3)), draw(st.integers(1, 20)), draw(st.integers(1, 20))
    lengths = draw(st.none() | st.tuples(*(st.integers(0, keys) for _ in range(batch))))
    return Mask(draw(st.booleans()), draw(st.none() | st.integers(1, 25)), lengths), batch, queries, keys


def table(mask: Mask, batch: int, queries: int, keys: int) -> torch.Tensor:
    """Every pair, by the mask itself."""
    seen = mask.visible(queries, keys, (0, queries), (0, keys), CPU)
    every = torch.ones(batch, 1, queries, keys, dtype=torch.bool)
    return every if seen is None else seen.expand_as(every)


@given(masked())
def test_pairs_are_counted_as_the_mask_sees_them(case: tuple[Mask, int, int, int]) -> None:
    assert cost.visible_pairs(*case) == int(table(*case).sum())


@given(masked(), st.integers(1, 8))
def test_a_tiled_algorithm_reads_the_keys_that_a_block_sees(case: tuple[Mask, int, int, int], br: int) -> None:
    """Keys between the first and the last that any row of the block sees, for each block of each batch entry."""
    mask, batch, queries, keys = case
    seen = table(*case)[:, 0]
    read = 0
    for b in range(batch):
        for start in range(0, queries, br):
            columns = seen[b, start : start + br].any(0).nonzero()
            read += int(columns.max() - columns.min()) + 1 if len(columns) else 0
    shape = {"batch": batch, "queries": queries, "keys": keys, "heads": 4, "kv_heads": 2}
    given = problem(d=8, mask=mask, **shape)
    expected = 2 * batch * 4 * queries * 8 + 2 * 4 * 8 * read
    assert cost.tiled_bytes(given, FOUR, br) == 4 * expected


def test_vanilla_moves_all_scores_four_times() -> None:
    n, d = 128, 32
    assert cost.vanilla_bytes(problem(n, d), TWO) == 2 * (4 * n * d + 4 * n * n)
    causal = cost.vanilla_bytes(problem(n, d, Mask(causal=True)), TWO)
    assert causal == 2 * (4 * n * d + 6 * n * n)


@pytest.mark.parametrize("d", [32, 64, 128])
def test_orders_of_growth(d: int) -> None:
    """Dao et al. 2022, Theorem 2: for large N vanilla attention goes as N^2, tiled as N^2 d^2 / M, where `Br = M / 4d`."""
    big, bigger, m = 1 << 14, 1 << 15, 1 << 16
    vanilla = [cost.vanilla_bytes(problem(n, d), TWO) for n in (big, bigger)]
    assert 3.9 < vanilla[1] / vanilla[0] < 4.0
    tiled = {n: cost.tiled_bytes(problem(n, d), TWO, m // (4 * d)) for n in (big, bigger)}
    assert 3.7 < tiled[bigger] / tiled[big] < 4.0
    assert tiled[bigger] / (2 * 8 * bigger**2 * d**2 / m) == pytest.approx(1.0, abs=0.1)
    halved = cost.tiled_bytes(problem(bigger, d), TWO, m // (8 * d))
    assert 1.9 < halved / tiled[bigger] < 2.0


def test_operations() -> None:
    assert cost.operations(problem(64, 16, batch=3, heads=2)) == 4 * 16 * 64 * 64 * 6
    assert cost.operations(problem(64, 16, Mask(causal=True))) == 4 * 16 * 64 * 65 // 2


def model(variant: Implementation, ran: KernelLaunch = UNKNOWN) -> CostModel:
    """Of a variant that has one."""
    found = variant.cost_model(ran)
    assert found is not None
    return found


def test_which_algorithm() -> None:
    vanilla = (Vanilla(), Naive(Precision.golden()), Sdpa(Backend.MATH))
    tiled = (Tiled(Precision.golden()), Instrumented(Precision.parse("bf16")), Triton(), Sdpa(Backend.FLASH), Flex())
    assert {model(variant).algorithm for variant in vanilla} == {Algorithm.VANILLA}
    assert {model(variant).algorithm for variant in tiled} == {Algorithm.TILED}
    assert Exact().cost_model(KernelLaunch()) is None
    assert Custom("numdev.attention.exact:rounded_once").cost_model(KernelLaunch()) is None


def test_which_hold_all_scores() -> None:
    assert [model(variant).holds_scores for variant in (Vanilla(), Sdpa(Backend.MATH))] == [True, True]
    assert not any(model(variant).holds_scores for variant in (Naive(Precision.golden()), Sdpa(Backend.FLASH), Triton()))


def test_the_width_of_an_element() -> None:
    assert model(Triton(BF16)).width == Width(2.0, 2.0)
    assert model(Triton(E4M3FN)).width == Width(1.0, 2.0)  # FP8 in, FP16 out
    assert model(Sdpa(Backend.MATH, BF16)).width == Width(4.0, 2.0)  # torch widens 16 bits
    assert model(Tiled(Precision.parse("bf16"))).width == Width(2.0, 2.0)
    given = problem(64, 16)
    assert cost.tiled_bytes(given, Width(1.0, 2.0), 64) == 64 * 16 * (1 + 2 + 2)


def test_the_rows_of_a_tile() -> None:
    given = problem(d=64)
    ran = KernelLaunch("numdev portable", 128, 64, 4, 2)
    models = (
        (model(Tiled(Precision.golden(), Tiling(br=48))), 48),
        (model(Triton(), ran), 128),
        (model(Triton(br=32), ran), 32),
        (model(Flex(br=32), KernelLaunch("triton_tem_fused_flex_attention_0")), 32),
        (model(Sdpa(Backend.FLASH), KernelLaunch("aten::flash")), math.ceil(cost.on_chip_bytes(CPU) / 2 / (4 * 64))),
    )
    for each, rows in models:
        assert cost.rows_of_tile(given, each, CPU) == rows
        moved = cost.tiled_bytes(given, each.width, rows)
        assert cost.cost_of(given, each, CPU) == Cost(Algorithm.TILED, moved, rows)
    assert cost.cost_of(given, model(Vanilla()), CPU).br == 0
    assert cost.on_chip_bytes(CPU) >= 1 << 14


@pytest.mark.parametrize("variant", [Triton(), Sdpa(Backend.CUDNN), Flex()])
def test_one_query_of_heads_that_share_keys_reads_them_once(variant: Any) -> None:
    """Bytes in FP16: q, k and v once, O once; four times as many keys and values for heads that are computed apart."""
    asked = Problem(Distribution(), Shape(2, 8, 2, 1, 100, 16), Mask(causal=True))
    once = 2 * (2 * 8 * 16 + 2 * 2 * 2 * 100 * 16 + 2 * 8 * 16)
    assert cost.tiled_bytes(cost.as_computed(asked, model(variant)), TWO, 64) == once
    assert cost.tiled_bytes(asked, TWO, 64) == once + 3 * 2 * 2 * 2 * 2 * 100 * 16
    windowed = replace(asked, mask=Mask(window=9))
    assert cost.as_computed(windowed, model(variant)) is windowed
    assert cost.as_computed(asked, model(Tiled(Precision.parse("fp16")))) is asked
