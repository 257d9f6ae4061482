"""The cost model of both passes against counts by brute force."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev import Backend, Custom, Exact, Flex, Instrumented, Mask, Naive, Precision, Sdpa, Tiled, Triton, Vanilla
from numdev.arithmetic.formats import BF16, E4M3FN
from numdev.arithmetic.quantise import Quantised
from numdev.arithmetic.rounding import Cast
from numdev.attention import cost
from numdev.attention.base import Implementation
from numdev.attention.cost import Algorithm, CostModel, Width
from numdev.attention.problem import Distribution, Problem, Shape
from numdev.attention.tiling import KernelLaunch, Tiling
from numdev.attention.triton import Kernel

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


def extent(seen: torch.Tensor) -> int:
    """From the first to the last that is set."""
    places = seen.nonzero()
    return int(places.max() - places.min()) + 1 if len(places) else 0


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
            read += extent(seen[b, start : start + br].any(0))
    shape = {"batch": batch, "queries": queries, "keys": keys, "heads": 4, "kv_heads": 2}
    given = problem(d=8, mask=mask, **shape)
    expected = 2 * batch * 4 * queries * 8 + 2 * 4 * 8 * read
    assert cost.tiled_bytes(given, FOUR, br) == 4 * expected


def test_vanilla_moves_all_scores_four_times() -> None:
    n, d = 128, 32
    assert cost.vanilla_bytes(problem(n, d), TWO) == 2 * (4 * n * d + 4 * n * n)
    causal = cost.vanilla_bytes(problem(n, d, Mask(causal=True)), TWO)
    assert causal == 2 * (4 * n * d + 6 * n * n)
    assert cost.backward_vanilla_bytes(problem(n, d), TWO) == 2 * (8 * n * d + 7 * n * n)
    assert cost.backward_vanilla_bytes(problem(n, d, Mask(causal=True)), TWO) == 2 * (8 * n * d + 9 * n * n)


def model(variant: Implementation, ran: KernelLaunch = UNKNOWN) -> CostModel:
    """Of a variant that has one."""
    found = variant.cost_model(ran)
    assert found is not None
    return found


def test_what_implementations_declare() -> None:
    naive, rounded = Naive(Precision.golden()), "numdev.attention.exact:rounded_once"
    vanilla = (Vanilla(), naive, Sdpa(Backend.MATH))
    tiled = (Tiled(Precision.golden()), Instrumented(Precision.parse("bf16")), Triton(), Sdpa(Backend.FLASH), Flex())
    assert {model(variant).algorithm for variant in vanilla} == {Algorithm.VANILLA}
    assert {model(variant).algorithm for variant in tiled} == {Algorithm.TILED}
    assert [variant.cost_model(UNKNOWN) for variant in (Exact(), Custom(rounded))] == [None, None]
    assert [model(variant).holds_scores for variant in (*vanilla, *tiled)] == [True, False, True, *[False] * 5]
    assert model(Triton(E4M3FN)).width == Width(1.0, 2.0)  # FP8 in, FP16 out
    assert model(Sdpa(Backend.MATH, BF16)).width == Width(4.0, 2.0)  # torch widens 16 bits
    assert model(Tiled(Precision.parse("bf16"))).width == model(Triton(BF16)).width == Width(2.0, 2.0)
    assert cost.tiled_bytes(problem(64, 16), Width(1.0, 2.0), 64) == 64 * 16 * (1 + 2 + 2)


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
        assert cost.cost_of(given, each, CPU) == (moved, rows)
    assert cost.cost_of(given, model(Vanilla()), CPU)[1] == 0
    assert cost.on_chip_bytes(CPU) >= 1 << 14


@pytest.mark.parametrize("variant", [Triton(), Sdpa(Backend.CUDNN), Flex()])
def test_one_query_of_heads_that_share_keys_reads_them_once(variant: Any) -> None:
    """Bytes in FP16: q, k and v once, O once; four times as many keys and values for heads that are computed apart."""
    asked = Problem(Distribution(), Shape(2, 8, 2, 1, 100, 16), Mask(causal=True))
    once = 2 * (2 * 8 * 16 + 2 * 2 * 2 * 100 * 16 + 2 * 8 * 16)
    assert cost.tiled_bytes(cost.as_computed(asked, model(variant)), TWO, 64) == once
    assert cost.tiled_bytes(asked, TWO, 64) == once + 3 * 2 * 2 * 2 * 2 * 100 * 16
    few = replace(asked, shape=replace(asked.shape, queries=16), mask=Mask())
    is_ours = isinstance(variant, Triton)
    assert (cost.as_computed(few, model(variant)).shape.heads == 2) == is_ours, "64 rows of a KV head"
    for more in (replace(few, shape=replace(few.shape, queries=17)), replace(few, mask=Mask(causal=True))):
        assert cost.as_computed(more, model(variant)).shape.heads == 8
    apart = Triton(E4M3FN, kernel=Kernel.HOPPER, quantise=Quantised(Cast.parse("e4m3fn:saturate")))
    assert cost.as_computed(few, model(apart)) is few, "no call that quantises packs heads"
    windowed = replace(asked, mask=Mask(window=9))
    assert cost.as_computed(windowed, model(variant)) is windowed
    assert cost.as_computed(asked, model(Tiled(Precision.parse("fp16")))) is asked


@given(masked(), st.integers(1, 8), st.integers(1, 8), st.integers(1, 3), st.booleans(), st.booleans())
def test_a_tiled_backward_pass_moves_what_its_tiles_meet(
    case: tuple[Mask, int, int, int], br: int, bc: int, passes: int, first: bool, scaled: bool
) -> None:
    """Tile by tile and row by row, in bytes of FP16, and of FP32 for LSE, delta and the running sum of dQ.

    Where the first tile stores its share, the sum of each row that sees a tile is read once less.
    """
    shape, seen, twice = Shape(case[1], 4, 2, *case[2:], 8), table(*case)[:, 0], passes > 1
    problem = Problem(Distribution(), shape, case[0])
    assert cost.backward_operations(problem) == 10 * 8 * 4 * int(seen.sum())
    q, kv = shape.batch * 4 * shape.queries * 8, shape.batch * 2 * shape.keys * 8
    rows = shape.batch * 4 * shape.queries
    moved = 2 * 2 * q + 4 * rows  # O and dO in, delta out
    for b in range(shape.batch):
        length = shape.keys if problem.mask.key_lengths is None else problem.mask.key_lengths[b]
        for start in range(0, length, bc):
            stop = min(start + bc, length)
            met = extent(seen[b, :, start:stop].any(1))
            if met:
                moved += 4 * (2 * 2 * 8 * (stop - start) + met * (2 * 2 * 8 + 2 * 4))
                moved += 0 if twice else 4 * met * 2 * 4 * 8
                moved += 4 * (2 * 8 * (stop - start) + met * (2 * 2 * 8 + 2 * 4)) if passes == 3 else 0  # dV alone
        for start in range(0, shape.queries, br):
            moved += 4 * 2 * 2 * 8 * extent(seen[b, start : start + br].any(0)) if twice else 0
    moved += rows * (2 * 2 * 8 + 2 * 4) if twice else 4 * q
    moved += 2 * (q + 2 * kv) + (2 * 4 * rows if scaled else 0)
    moved -= 4 * 4 * 8 * sum(extent(entry.any(1)) for entry in seen) if first and not twice else 0
    model = CostModel(Algorithm.TILED, TWO, br, bc=bc, passes=passes, stores_first=first, scales_lse=scaled)
    assert cost.backward_tiled_bytes(problem, model, br, bc) == moved
    assert cost.cost_of(problem, model, CPU, backward=True) == (float(moved), br)
