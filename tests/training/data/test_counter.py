"""Random numbers are a function of purpose, seed and step."""

from __future__ import annotations

import numpy as np

from numdev.training.data.counter import Purpose, stream


def test_the_same_numbers_in_any_order_of_calls() -> None:
    first = {step: stream(Purpose.NOISE, 3, step).random(8) for step in (0, 1, 2)}
    again = {step: stream(Purpose.NOISE, 3, step).random(8) for step in (2, 0, 1)}
    assert all(np.array_equal(first[step], again[step]) for step in first)


def test_purpose_seed_and_step_each_make_another_stream() -> None:
    places = [(Purpose.NOISE, 0, 1), (Purpose.NOISE, 1, 0), (Purpose.NOISE, 0, 0), (Purpose.SCENES, 0, 0)]
    assert len({stream(*place).random() for place in places}) == len(places)
