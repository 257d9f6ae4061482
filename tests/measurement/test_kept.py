"""What is kept between points: each value computed once, the least recently used evicted beyond a number of bytes."""

from __future__ import annotations

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, zeros

from numdev.measurement.runner import Kept


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(1, 5)), max_size=40), st.integers(1, 12))
def test_it_is_a_dictionary_that_evicts_the_least_recently_used(uses: list[tuple[int, int]], limit: int) -> None:
    """Against a model; the sizes of a key's value differ, one larger than the limit is kept alone."""
    kept, model, made = Kept(8 * limit), OrderedDict[int, int](), list[int]()
    for key, size in uses:

        def make(key: int = key, size: int = size) -> tuple[Tensor, ...]:
            made.append(key)
            return tuple(zeros(1).double() for _ in range(size))

        before = len(made)
        kept.get(key, make)
        assert (len(made) > before) == (key not in model)
        model.setdefault(key, min(size, limit))
        model.move_to_end(key)
        while sum(model.values()) > limit:
            model.popitem(last=False)


def test_a_value_that_needs_others_is_kept_with_them() -> None:
    kept = Kept(1 << 10)
    assert kept.get("sum", lambda: kept.get("one", lambda: 1) + kept.get("two", lambda: 2)) == 3
    assert kept.get("one", lambda: 5) == 1
