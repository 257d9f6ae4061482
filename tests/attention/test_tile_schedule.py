"""The order in which programs that own keys meet queries: each pair once, the order of the kernels, and bits by a double loop."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.arithmetic.formats import FP16
from numdev.attention.differentiable import saved_by
from numdev.attention.kernels.hopper.order import first_unit, rank_at, unit_at
from numdev.attention.mask import Mask
from numdev.attention.precision import BackwardPrecision, Precision
from numdev.attention.softmax import Exponential, Recompute
from numdev.attention.tile_schedule import Meeting, Sizes, Turns
from numdev.attention.tiled import Tiled, TiledBackward
from numdev.attention.tiling import Order, Tiling
from numdev.errors import BadInput
from tests.attention.test_tiled import GOLDEN, check_gradients
from tests.cases import BACKWARD_POLICIES as POLICIES
from tests.cases import draw_all, same
from tests.oracles.double_loop import WalkingLoop

turns = st.builds(Turns, st.one_of(st.none(), st.integers(1, 5)), st.sampled_from([4, 8]), st.sampled_from([4, 8]))


def pairs(found: list[Meeting]) -> list[tuple[int, int, int]]:
    """Head, first query and first key, in their order."""
    return [(head, start, meeting.keys[0]) for meeting in found for head in range(*meeting.heads) for start, _ in meeting.queries]


@given(turns, st.integers(1, 3), st.integers(0, 9), st.integers(1, 40), st.integers(1, 60))
def test_every_pair_meets_once(turn: Turns, group: int, first: int, more: int, keys: int) -> None:
    sizes = Sizes(group, first, first + more, keys)
    found = pairs(turn.meetings(Tiling(4, 4), sizes))
    starts = {
        start for unit in range(first, sizes.queries, turn.unit) for start in range(unit, min(unit + turn.unit, sizes.queries), 4)
    }
    assert Counter(found) == Counter((h, i, j) for h in range(group) for i in starts for j in range(0, keys, 4))


@given(st.integers(1, 9), st.integers(1, 12), st.one_of(st.none(), st.integers(1, 5)), st.integers(1, 2))
def test_the_order_is_that_of_the_kernels(units: int, tiles: int, group: int | None, per: int) -> None:
    """Shares of dQ by the rank that a program waits for, and units of dK and dV by the step at which it visits them."""
    together, causal = None if group is None else min(group, units), group is None  # of a group no two are at the same unit
    turn = Turns(together, tile=8, unit=8)
    found = turn.meetings(Tiling(8 // per, 8), Sizes(1, 0, 8 * units, 8 * tiles))
    met = [(meeting.queries[0][0] // 8, meeting.keys[0] // 8) for meeting in found]
    for unit in range(units):
        own = [tile for at, tile in met if at == unit]
        assert [rank_at(unit, tile, tiles, together, causal) for tile in own] == list(range(tiles))  # type: ignore[no-untyped-call]
    for tile in range(tiles):
        own = [start for meeting in found if meeting.keys[0] // 8 == tile for start, _ in meeting.queries]
        visited = [unit_at(step, tile, units, together, causal) for step in range(units)]  # type: ignore[no-untyped-call]
        assert own == [8 * unit + part * (8 // per) for unit in visited for part in range(per)]


@given(st.integers(1, 60), st.integers(1, 60), st.integers(0, 60))
def test_units_begin_with_the_first_query_that_sees_a_key(queries: int, keys: int, tile: int) -> None:
    """Under a causal limit, where more queries than keys leave the first without any: no program of the kernels visits those."""
    mask = Mask(causal=True)
    first = mask.query_range(queries, keys, 0, keys)[0]
    assert first == max(0, queries - keys)
    if tile * 128 < keys:
        begin = first_unit(tile, keys - (queries - first), True)  # type: ignore[no-untyped-call]
        seeing = mask.query_range(queries, keys, 128 * tile, min(128 * tile + 128, keys))[0]
        assert begin == (seeing - first) // 128


@settings(max_examples=12)
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
    backward = TiledBackward(GOLDEN, BackwardPrecision.golden(), Tiling(4, 4), turns=turn)
    check_gradients(draw_all((1, *heads, *sizes), seed, spread=3.0), backward, mask)


@pytest.mark.parametrize("name", ["uniform_bf16", "mixed"])
@pytest.mark.parametrize(
    ("together", "mask", "exp"),
    [
        (2, Mask(), Exponential.EXP2),
        (None, Mask(causal=True), Exponential.EXP),
        (3, Mask(key_lengths=(7,)), Exponential.EXP),
    ],
)
def test_the_double_loop_gives_the_same_bits(name: str, together: int | None, mask: Mask, exp: Exponential) -> None:
    """Two heads to a KV head; units of two tiles of queries."""
    policy, turn = POLICIES[name](), Turns(together, tile=4, unit=4)
    variant = TiledBackward(GOLDEN, policy, Tiling(2, 4), Recompute(exponential=exp), turns=turn)
    rounded = policy.round_inputs(*draw_all((1, 2, 1, 7, 11, 3)))
    saved = saved_by(Tiled(Precision.kernel(FP16)), variant.reads, rounded[:3], mask, 0.21)
    oracle = WalkingLoop(policy, variant.tiling, variant.recompute, turns=turn)
    out, lse = saved.out.to(policy.carrier), saved.lse.to(policy.carrier)
    same(variant.backward(*rounded, saved, mask, 0.21), oracle(rounded, out, lse, mask, 0.21))


@pytest.mark.parametrize(
    ("tiling", "field"),
    [(Tiling(48, 128), "tiling.br"), (Tiling(64, 96), "tiling.bc"), (Tiling(64, 128, Order.REVERSE), "tiling.order")],
)
def test_tiles_that_do_not_make_up_units_are_refused(tiling: Tiling, field: str) -> None:
    with pytest.raises(BadInput) as error:
        TiledBackward(GOLDEN, BackwardPrecision.golden(), tiling, turns=Turns(4))
    assert error.value.field == field
    with pytest.raises(BadInput, match=r"backward\.query_order"):
        TiledBackward(GOLDEN, BackwardPrecision.golden(), Tiling(), query_order=Order.FORWARD, turns=Turns(4))
