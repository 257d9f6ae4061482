"""The order in which programs that own keys meet queries and add to dQ: each pair once, in one order, and none waits for ever.

The order of the emulation is that of the kernels.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.attention.kernels.hopper.order import TILE, first_unit, first_whole, place, unit_at
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision
from numdev.attention.tile_schedule import Sizes, Turns
from numdev.attention.tiled import TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput
from tests.attention.test_tiled import GOLDEN, check_gradients
from tests.cases import draw_all

turns = st.builds(Turns, st.sampled_from([4, 8]))


@given(st.integers(1, 9), st.integers(1, 12), st.integers(1, 3), st.integers(1, 2))
def test_the_order_is_that_of_the_kernels(units: int, tiles: int, heads: int, per: int) -> None:
    """Shares of dQ by the number of the tile, for which a program waits, and units of dK and dV by the step of the visit."""
    found = Turns(8).meetings(Tiling(8 // per, 8), Sizes(heads, 0, 8 * units, 8 * tiles))
    met = [(meeting.queries[0][0] // 8, meeting.heads[0], meeting.keys[0] // 8) for meeting in found]
    for unit, head in itertools.product(range(units), range(heads)):
        assert [tile for at, of, tile in met if (at, of) == (unit, head)] == list(range(tiles))
    for tile in range(tiles):
        own = [(start, meeting.heads[0]) for meeting in found if meeting.keys[0] // 8 == tile for start, _ in meeting.queries]
        visits = itertools.product(range(units), range(heads), range(per))
        assert own == [(8 * unit_at(step, units) + part * (8 // per), head) for step, head, part in visits]


@settings(max_examples=24)
@given(
    turns,
    st.sampled_from([(2, 1), (2, 2)]),
    st.tuples(st.integers(1, 24), st.integers(11, 30), st.integers(1, 9)),
    st.builds(Mask, causal=st.booleans(), key_lengths=st.one_of(st.none(), st.integers(0, 11).map(lambda n: (n,)))),
    st.integers(0, 99),
)
def test_any_walk_in_double_precision_is_exact(
    turn: Turns, heads: tuple[int, int], sizes: tuple[int, int, int], mask: Mask, seed: int
) -> None:
    """Every pair of tiles meets once: the share of one that is left out, or added twice, is larger than any error."""
    backward = TiledBackward(GOLDEN, BackwardPrecision.golden(), Tiling(4, 4), turns=turn)
    check_gradients(draw_all((1, *heads, *sizes), seed, spread=3.0), backward, mask)


@pytest.mark.parametrize(
    ("tiling", "field"),
    [(Tiling(48, 128), "tiling.br"), (Tiling(64, 128, Order.REVERSE), "tiling.order")],
)
def test_tiles_that_do_not_make_up_units_are_refused(tiling: Tiling, field: str) -> None:
    with pytest.raises(BadInput) as error:
        TiledBackward(GOLDEN, BackwardPrecision.golden(), tiling, turns=Turns(128))
    assert error.value.field == field
    with pytest.raises(BadInput, match=r"backward\.query_order"):
        TiledBackward(GOLDEN, BackwardPrecision.golden(), Tiling(), query_order=Order.FORWARD, turns=Turns(128))


@dataclass(frozen=True)
class Grid:
    """A launch: KV heads of all batch entries, each with its number of keys that exist."""

    tiles: int
    units: int
    shift: int
    causal: bool
    lengths: tuple[int, ...]
    shared_by: int
    together: int

    def additions(self, number: int) -> list[tuple[int, int, int, int]]:
        """(KV head, query head, unit, tile) in the order in which a program makes them."""
        tile, head = place(number, self.tiles, self.together)
        if tile * TILE >= self.lengths[head]:
            return []
        steps = range(self.units - first_unit(tile, self.shift, self.causal))
        return [(head, h, unit_at(step, self.units), tile) for step in steps for h in range(self.shared_by)]

    @property
    def programs(self) -> int:
        return self.tiles * len(self.lengths)

    def seen(self) -> Counter[tuple[int, int, int, int]]:
        """By the mask alone: which tiles of keys any query of a unit sees."""
        pairs: Counter[tuple[int, int, int, int]] = Counter()
        for head, length in enumerate(self.lengths):
            for unit in range(self.units):
                last = min(length - 1, (unit + 1) * TILE - 1 + self.shift) if self.causal else length - 1
                for tile in range(last // TILE + 1):
                    pairs.update((head, h, unit, tile) for h in range(self.shared_by))
        return pairs


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    units, causal = draw(st.integers(1, 12)), draw(st.booleans())
    tiles = draw(st.integers(units if causal else 1, units + 8 if causal else 20))
    keys = draw(st.integers(TILE * (tiles - 1) + 1, TILE * tiles))
    queries = draw(st.integers(TILE * (units - 1) + 1, min(TILE * units, keys) if causal else TILE * units))
    heads = draw(st.integers(1, 4))
    together = draw(st.sampled_from([n for n in range(1, heads + 1) if heads % n == 0]))
    lengths = tuple(draw(st.one_of(st.just(keys), st.integers(0, keys))) for _ in range(heads))
    return Grid(tiles, units, keys - queries, causal, lengths, draw(st.integers(1, 3)), together)


def run(grid: Grid, processors: int, seed: int) -> list[tuple[int, int, int, int]]:
    """The additions of a run in which any program that can go on may be the next; started by number, ended ones make place.

    This is every speed that programs can have: what a program computes never waits for another, only its additions do.
    """
    rng = random.Random(seed)
    waiting = [grid.additions(number) for number in range(grid.programs)]
    done: Counter[tuple[int, int, int]] = Counter()
    made = []
    running: list[Any] = []
    started = 0
    while started < grid.programs or running:
        while started < grid.programs and len(running) < processors:
            running.append(started)
            started += 1
        running_on = [n for n in running if not waiting[n] or done[waiting[n][0][:3]] == waiting[n][0][3]]
        assert running_on, f"a deadlock of {grid} on {processors}"
        number = rng.choice(running_on)
        if waiting[number]:
            head, h, unit, tile = waiting[number].pop(0)
            done[head, h, unit] += 1
            made.append((head, h, unit, tile))
        else:
            running.remove(number)
    return made


@settings(max_examples=300, deadline=None)
@given(grids(), st.integers(1, 6), st.integers())
def test_every_share_is_added_once_and_the_run_ends(grid: Grid, processors: int, seed: int) -> None:
    """On any number of multiprocessors, of which other work may hold all but one."""
    made = run(grid, processors, seed)
    assert Counter(made) == grid.seen()


@given(grids())
def test_only_the_units_before_the_first_whole_one_need_a_mask(grid: Grid) -> None:
    for tile in range(grid.tiles):
        whole = first_whole(tile, grid.shift, grid.units, grid.causal)
        for unit in range(first_unit(tile, grid.shift, grid.causal), grid.units):
            sees_all = not grid.causal or unit * TILE + grid.shift >= (tile + 1) * TILE - 1
            assert (unit >= whole) == sees_all
