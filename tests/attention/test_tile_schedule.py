"""The order in which tiles of keys meet queries and add to dQ: each pair once, in one order, and none waits for ever.

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

from numdev.attention.kernels.hopper.launch import Limits, Work
from numdev.attention.kernels.hopper.order import TILE, first_tile, own, place, unit_at, walk
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
    span: int  # of a window, else 0
    causal: bool
    lengths: tuple[int, ...]
    shared_by: int
    together: int

    def walk(self, tile: int) -> tuple[int, int, int, int]:
        return walk(tile, self.shift, self.span, self.units, self.causal, self.span > 0)  # type: ignore[no-any-return]

    def additions(self, number: int) -> list[tuple[int, int, int, int]]:
        """(KV head, query head, unit, tile) of the tile with a number, in the order in which a program makes them."""
        tile, head = place(number, self.tiles, self.together)
        if tile * TILE >= self.lengths[head]:
            return []
        first, end, *_ = self.walk(tile)
        return [(head, h, unit_at(step, end), tile) for step in range(end - first) for h in range(self.shared_by)]

    def rank(self, unit: int, tile: int) -> int:
        """For how many additions to a unit that of a tile waits."""
        return tile - first_tile(unit, self.shift, self.span, self.span > 0)  # type: ignore[no-any-return]

    def sees(self, query: int, key: int) -> bool:
        before = key <= query + self.shift or not self.causal
        return before and (key > query + self.shift - self.span or not self.span)

    @property
    def count(self) -> int:
        return self.tiles * len(self.lengths)

    def seen(self) -> Counter[tuple[int, int, int, int]]:
        """By the mask alone: which tiles of keys any query of a unit sees."""
        pairs: Counter[tuple[int, int, int, int]] = Counter()
        for head, length in enumerate(self.lengths):
            for unit in range(self.units):
                last = min(length - 1, (unit + 1) * TILE - 1 + self.shift) if self.causal else length - 1
                first = max(unit * TILE + self.shift - self.span + 1, 0) if self.span else 0
                for tile in range(first // TILE, last // TILE + 1):
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
    span = draw(st.integers(0, keys)) if causal else 0
    return Grid(tiles, units, keys - queries, span, causal, lengths, draw(st.integers(1, 3)), together)


def run(grid: Grid, programs: int, seed: int) -> list[tuple[int, int, int, int]]:
    """The additions of a run in which anything that can happen may be the next: the order of tiles is all that is given.

    So many programs run. Each takes tiles in the order of their numbers, up to four before it has made all additions of the
    first. This is every speed that programs can have: what a program computes never waits for another, only its additions do. Two
    warps make these, each every second one of the program.
    """
    rng = random.Random(seed)
    done: Counter[tuple[int, int, int]] = Counter()
    made = []
    running: list[tuple[list[Any], list[Any]]] = [([], []) for _ in range(programs)]
    before, taken = [0] * programs, 0
    while taken < grid.count or any(warp for warps in running for warp in warps):
        able = [warp for warps in running for warp in warps if warp and done[warp[0][:3]] == grid.rank(*warp[0][2:])]
        free = [n for n, warps in enumerate(running) if len({(at[0], at[3]) for warp in warps for at in warp}) < 4]
        moves = [*able, *(free if taken < grid.count else ())]
        assert moves, f"a deadlock of {grid} with {programs} programs"
        chosen = rng.choice(moves)
        if isinstance(chosen, int):
            additions = grid.additions(taken)
            for first, warp in enumerate(running[chosen]):
                warp.extend(additions[(before[chosen] + first) % 2 :: 2])
            before[chosen] += len(additions)
            taken += 1
        else:
            head, h, unit, tile = chosen.pop(0)
            done[head, h, unit] += 1
            made.append((head, h, unit, tile))
    return made


@settings(max_examples=300, deadline=None)
@given(grids(), st.integers(1, 6), st.integers())
def test_every_share_is_added_once_and_the_run_ends(grid: Grid, programs: int, seed: int) -> None:
    """However many programs find a place beside other work: at least one."""
    made = run(grid, programs, seed)
    assert Counter(made) == grid.seen()


@given(grids())
def test_only_units_in_which_every_query_sees_every_key_need_no_mask(grid: Grid) -> None:
    for tile in range(grid.tiles):
        first, end, whole, whole_end = grid.walk(tile)
        for unit in range(first, end):
            corners = [(unit * TILE + i, tile * TILE + j) for i in (0, TILE - 1) for j in (0, TILE - 1)]
            assert (whole <= unit < whole_end) == all(grid.sees(*corner) for corner in corners)


@settings(max_examples=300)
@given(
    st.sampled_from([(128, 128), (192, 128), (128, 64)]),
    st.integers(0, 5),
    st.builds(lambda n, more: 64 * n + more, st.integers(-9, 9), st.integers(-1, 1)),
    st.builds(lambda n, more: max(64 * n + more, 0), st.integers(0, 14), st.integers(-1, 1)),
    st.integers(1, 9),
    st.booleans(),
    st.sampled_from([(0, False), (1, False), (3, False), (2, True)]),
)
def test_a_group_visits_what_its_rows_see_and_masks_what_some_do_not(
    tile: tuple[int, int], row: int, shift: int, span: int, blocks: int, causal: bool, split: tuple[int, bool]
) -> None:
    """The forward kernel's: every block with a seen key is visited, and of those that need no mask every key is seen."""
    (br, bc), row, span = tile, row * tile[0], 0 if split[0] else span
    causal = causal or span > 0
    grid = Grid(0, 0, shift, span, causal, (), 1, 1)
    work = Work(1, 1, row + br, blocks * bc, br, Limits(causal, shift, span), (blocks * bc,), 1, bc, *split)
    ranges = work.ranges(row, blocks * bc)
    for top in range(row, row + br, 64):
        passed = set[int]()
        for first, n in ranges:
            end = n - first
            assert end >= 1
            skip, whole, edge = own(top, n, end, shift, span, bc, causal, span > 0)
            assert 0 <= skip <= 1
            assert skip < end
            for block in range(first, n):
                seen = [grid.sees(top + i, block * bc + j) for i in (0, 63) for j in range(bc)]
                step = n - 1 - block
                if skip <= step:
                    passed.add(block)
                if whole <= step < edge:
                    assert all(seen)
                elif skip < step:
                    assert not all(seen)
            assert whole <= edge <= end or not span
        for block in set(range(blocks)) - passed:
            assert not any(grid.sees(top + i, block * bc + j) for i in (0, 63) for j in range(bc))
