"""The cache keeps within its bytes, and evicts the least recently used value."""

from __future__ import annotations

from collections.abc import Callable, Hashable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from numdev.cache import LeastRecentlyUsed, bytes_of
from numdev.measurement.deviation.sample import Sample


class Made:
    """Values of a size in bytes, and which of them were made."""

    def __init__(self, limit: int) -> None:
        self.kept, self.made = LeastRecentlyUsed(limit), list[Hashable]()

    def get(self, key: Hashable, size: int = 100) -> object:
        def make() -> torch.Tensor:
            self.made.append(key)
            return torch.zeros(size, dtype=torch.uint8)

        return self.kept.get(key, make)


def test_a_value_is_made_once() -> None:
    made = Made(1000)
    assert made.get("a") is made.get("a")
    assert made.made == ["a"]


def test_the_least_recently_used_is_evicted_first() -> None:
    made = Made(300)
    for key in "abcad":
        made.get(key)
    assert made.made == list("abcd")
    made.get("a")
    made.get("c")
    assert made.made == list("abcd"), "they are kept: a was asked for after b"
    made.get("b")
    assert made.made == list("abcdb")


def test_a_value_larger_than_the_limit_is_kept_alone() -> None:
    made = Made(50)
    first = made.get("a", 100)
    assert made.get("a") is first
    made.get("b")
    made.get("a")
    assert made.made == ["a", "b", "a"]


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(1, 400)), max_size=30), st.integers(1, 1000))
def test_against_a_list_of_the_most_recent(asked: list[tuple[int, int]], limit: int) -> None:
    made, recent = Made(limit), list[tuple[int, int]]()
    for key, size in asked:
        known = dict(recent)
        before = len(made.made)
        made.get(key, size)
        assert (len(made.made) == before) == (key in known)
        recent = [entry for entry in recent if entry[0] != key] + [(key, known.get(key, size))]
        while sum(n for _, n in recent) > limit and len(recent) > 1:
            recent.pop(0)


def test_values_may_be_made_of_others() -> None:
    kept = LeastRecentlyUsed(1000)
    outer: Callable[[], int] = lambda: kept.get("inner", lambda: 2) + 1  # noqa: E731
    assert kept.get("outer", outer) == 3
    assert kept.get("inner", lambda: 9) == 2


@pytest.mark.parametrize(
    ("value", "size"),
    [
        (torch.zeros(3, 4, dtype=torch.float64), 96),
        (torch.zeros(3, 4, dtype=torch.bfloat16), 24),
        ((torch.zeros(2), torch.zeros(3)), 20),
        ([torch.zeros(2), {"a": torch.zeros(1)}], 12),
        ({"a": torch.zeros(2), "b": (torch.zeros(3),)}, 20),
        (Sample(torch.zeros(5)), 4 * 40),
        (3.0, 64),
    ],
)
def test_sizes(value: object, size: int) -> None:
    assert bytes_of(value) == size


def test_several_values_are_made_in_one_call_where_the_cache_has_none() -> None:
    kept, calls = LeastRecentlyUsed(1000), list[list[int]]()

    def make(places: list[int]) -> list[str]:
        calls.append(places)
        return [f"made at {place}" for place in places]

    kept.get("b", lambda: "kept")
    assert kept.get_all("abc", make) == ["made at 0", "kept", "made at 2"]
    assert kept.get_all("cab", make) == ["made at 2", "made at 0", "kept"]
    assert kept.get_all("", make) == []
    assert calls == [[0, 2]]


def test_several_values_come_back_though_the_cache_cannot_hold_them() -> None:
    kept = LeastRecentlyUsed(100)
    assert kept.get_all(range(9), lambda places: places) == [*range(9)]
