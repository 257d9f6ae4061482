"""Masks against the question asked for one query and one key at a time."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.attention.mask import Mask
from numdev.errors import BadInput
from tests.oracles.double_loop import sees

CPU = torch.device("cpu")
BATCH = 2

masks = st.builds(
    Mask,
    causal=st.booleans(),
    window=st.one_of(st.none(), st.integers(1, 12)),
    key_lengths=st.one_of(st.none(), st.tuples(st.integers(0, 5), st.integers(0, 5))),
)
sizes = st.integers(5, 14)


@st.composite
def ranges(draw: st.DrawFn, size: int) -> tuple[int, int]:
    first = draw(st.integers(0, size - 1))
    return first, draw(st.integers(first + 1, size))


@given(st.data(), masks, sizes, sizes)
def test_visible_is_the_answer_for_every_pair(data: st.DataObject, mask: Mask, queries: int, keys: int) -> None:
    rows, columns = data.draw(ranges(queries)), data.draw(ranges(keys))
    got = mask.visible(queries, keys, rows, columns, CPU)
    want = torch.tensor(
        [[[[sees(mask, b, i, j, queries, keys) for j in range(*columns)] for i in range(*rows)]] for b in range(BATCH)]
    )
    if got is None:
        assert bool(want.all())
    else:
        assert torch.equal(got.expand(want.shape), want)


@given(st.data(), masks, sizes, sizes)
def test_no_query_outside_the_range_sees_the_tile(data: st.DataObject, mask: Mask, queries: int, keys: int) -> None:
    start, stop = data.draw(ranges(keys))
    first, last = mask.query_range(queries, keys, start, stop)
    assert 0 <= first <= queries
    assert 0 <= last <= queries
    inside = set(range(first, last))
    for i in range(queries):
        seen = any(sees(mask, b, i, j, queries, keys) for b in range(BATCH) for j in range(start, stop))
        assert i in inside or not seen
        if mask.key_lengths is None:
            assert seen or i not in inside, "the range is no wider than it must be"


def test_no_mask_needs_no_tensor() -> None:
    assert Mask().is_none
    assert Mask().visible(9, 9, (0, 9), (0, 9), CPU) is None
    assert Mask(causal=True).visible(9, 9, (4, 9), (0, 5), CPU) is None
    assert Mask(window=9).visible(9, 9, (0, 9), (0, 9), CPU) is None
    assert Mask(key_lengths=(9, 5)).visible(9, 9, (0, 9), (0, 5), CPU) is None
    assert not any(mask.is_none for mask in (Mask(causal=True), Mask(window=3), Mask(key_lengths=(1,))))


def test_impossible_masks_are_refused() -> None:
    with pytest.raises(BadInput, match=r"^problem\.window: 0"):
        Mask(window=0)
    for lengths in ((3, -1), (3,), (3, 4, 5), (3, 8)):
        with pytest.raises(BadInput, match=r"^problem\.key_lengths: "):
            Mask(key_lengths=lengths).check(batch=2, keys=7)
    Mask(key_lengths=(7, 0)).check(batch=2, keys=7)


def test_keys_that_do_not_exist_are_zero() -> None:
    x = torch.full((2, 3, 7, 4), torch.nan)
    x[0, :, :5], x[1, :, :2] = 1.0, 1.0
    assert torch.equal(Mask(key_lengths=(5, 2)).without_padding(x), x.nan_to_num(0.0))
    assert Mask().without_padding(x) is x
