"""Tilings: every key exactly once, in the order that was asked for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput
from tests.oracles.double_loop import tile_orders

tilings = st.builds(
    Tiling,
    br=st.integers(1, 40),
    bc=st.integers(1, 40),
    order=st.sampled_from(Order),
    splits=st.integers(1, 6),
    stride=st.integers(1, 5),
    seed=st.integers(0, 9),
)


joined = tilings.map(lambda tiling: replace(tiling, splits=1, split_size=tiling.splits * tiling.bc))


@given(st.one_of(tilings, joined), st.integers(1, 200))
def test_the_order_is_the_one_stated(tiling: Tiling, keys: int) -> None:
    stated = [[(tile.start, tile.stop) for tile in tiles] for tiles in tile_orders(tiling, keys)]
    assert tiling.key_tiles(keys) == stated


@given(st.integers(1, 200_000), st.integers(1, 300))
def test_tile_of_the_paper(elements: int, head_dim: int) -> None:
    """Bc = ceil(M / 4d) and Br = min(Bc, d), with the ceiling taken in whole numbers."""
    tiling = Tiling.from_sram(elements, head_dim)
    assert tiling.bc == -(-elements // (4 * head_dim))
    assert tiling.br == min(tiling.bc, head_dim)


@given(tilings, st.integers(1, 500))
def test_figure_six(tiling: Tiling, keys: int) -> None:
    assert tiling.swapped().swapped() == tiling
    assert (tiling.swapped().br, tiling.swapped().bc) == (tiling.bc, tiling.br)
    assert tiling.area == tiling.swapped().area == tiling.br * tiling.bc
    square = tiling.square()
    assert square.br == square.bc
    assert abs(square.br - math.sqrt(tiling.area)) <= 0.5
    assert replace(square, br=tiling.br, bc=tiling.bc) == tiling
    assert tiling.rescales(keys) == sum(len(tiles) for tiles in tiling.key_tiles(keys)) - 1


def test_impossible_tilings_are_refused() -> None:
    for field in ("br", "bc", "splits", "stride"):
        with pytest.raises(BadInput, match=rf"^tiling\.{field}: 0 "):
            Tiling(**{field: 0})  # type: ignore[arg-type]
    for refused in ({"split_size": 0}, {"split_size": 100}, {"split_size": 64, "bc": 128}):
        with pytest.raises(BadInput, match=r"^tiling\.split_size: .* give a multiple of tiling\.bc="):
            Tiling(**refused)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match=r"^tiling\.splits: 2 .* tiling\.split_size=128 decides it"):
        Tiling(splits=2, split_size=128)
    for elements, head_dim in ((0, 64), (1024, 0)):
        with pytest.raises(BadInput, match=r"^tiling\.sram: "):
            Tiling.from_sram(elements, head_dim)
