"""Spikes of a series: none in noise, planted ones to the step."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.report.statistics.excursions import FACTOR, WINDOW, Excursion, excursions


def noise(count: int, seed: int = 0) -> list[float]:
    found: list[float] = np.random.default_rng(seed).standard_normal(count).tolist()
    return found


def beyond(values: list[float], window: int, factor: float) -> np.ndarray:
    """Which values lie beyond the range of all those before, by NumPy at once."""
    x = np.array(values)
    before = np.lib.stride_tricks.sliding_window_view(x, window)[:-1]
    middle = np.median(before, axis=1)
    spread = np.median(np.abs(before - middle[:, None]), axis=1) / 0.674489750196
    return x[window:] > middle + factor * spread


class TestNoise:
    def test_the_rate_of_false_alarms_is_as_stated(self) -> None:
        count = 300_000
        alarms = int(beyond(noise(count), WINDOW, FACTOR).sum())
        assert alarms <= 8  # of a Poisson count of mean 3, 0.4 % exceed it

    @pytest.mark.parametrize("seed", range(3))
    def test_none_is_found_in_it(self, seed: int) -> None:
        assert excursions(noise(600, seed)) == []

    def test_the_first_is_where_all_values_at_once_say(self) -> None:
        values = noise(2000)
        places = WINDOW + np.flatnonzero(beyond(values, WINDOW, 3.0))
        assert excursions(values, factor=3.0)[0].first == places[0]

    def test_what_falls_is_none(self) -> None:
        falling = [10 * math.exp(-step / 50) + 0.01 * x for step, x in enumerate(noise(300))]
        assert excursions(falling) == []
        assert excursions([-x for x in noise(300)]) == []


class TestPlanted:
    @given(st.integers(WINDOW, 180), st.integers(1, 15), st.integers(0, 5))
    @settings(max_examples=30, deadline=None)
    def test_they_are_found_to_the_step(self, place: int, length: int, seed: int) -> None:
        values = noise(200, seed)
        values[place : place + length] = [x + 40 for x in values[place : place + length]]
        (found,) = excursions(values)
        assert (found.first, found.last) == (place, min(place + length, 200) - 1)
        assert found.height > FACTOR

    @given(st.floats(1e-3, 1e3), st.floats(-1e3, 1e3))
    @settings(max_examples=20, deadline=None)
    def test_units_and_origin_do_not_matter(self, unit: float, origin: float) -> None:
        values = noise(120)
        values[80] += 30
        places = [(found.first, found.last) for found in excursions([unit * x + origin for x in values])]
        assert places == [(80, 80)]

    def test_two_with_ordinary_values_between_are_two(self) -> None:
        values = noise(200)
        values[100] += 40
        values[103] += 80
        assert [found.first for found in excursions(values)] == [100, 103]

    def test_a_new_level_is_one(self) -> None:
        values = [x + 40 * (place >= 100) for place, x in enumerate(noise(300))]
        (found,) = excursions(values)
        assert (found.first, found.last) == (100, 99 + WINDOW)

    def test_what_is_not_finite_is_out_of_range(self) -> None:
        values = noise(100)
        values[60], values[61], values[5] = math.nan, math.inf, math.nan
        assert excursions(values) == [Excursion(60, 61, math.inf)]

    def test_too_short_a_series_has_none(self) -> None:
        assert excursions([*noise(WINDOW - 1), 1000.0]) == []
        assert excursions([]) == []
        assert excursions([1.0] * 100) == []
