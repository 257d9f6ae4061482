"""No line of a figure joins points that differ in a setting, unless it follows from what the points of its study state."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from numdev.report.reading.view import LABELS, split

AXES = ("label.a", "label.b", "label.c", "label.d")
POINT = st.fixed_dictionaries({name: st.sampled_from([1, 2, None]) for name in AXES} | {"study": st.sampled_from("st")})


def table(points: list[dict[str, Any]]) -> pd.DataFrame:
    rows = [point | {"key": str(i), "seed": seed, "cluster": ""} for i, point in enumerate(points) for seed in (0, 1)]
    return pd.DataFrame(rows)


@settings(max_examples=40)
@given(st.lists(POINT, min_size=2, max_size=12), st.sampled_from(AXES), st.sets(st.sampled_from(AXES[1:]), max_size=2))
def test_points_of_a_line_differ_in_x_alone(points: list[dict[str, Any]], x: str, shown: set[str]) -> None:
    """By every pair: each study states every label that it has, so nothing follows from anything."""
    colour = sorted(shown - {x})
    found, more = split(table(points), x, colour, with_baseline=False)
    stated = {study: {name for point in points if point["study"] == study for name in AXES if point[name]} for study in "st"}
    for one, other in itertools.combinations([row for _, row in found.drop_duplicates("key").iterrows()], 2):
        if all(str(one[name]) == str(other[name]) for name in (*colour, *more)):
            both = stated[one["study"]] & stated[other["study"]]
            first, second = points[int(one["key"])], points[int(other["key"])]
            assert all(first[name] == second[name] for name in both - {x})
    assert not found.duplicated([x, *colour, *more, "seed", "cluster"]).any(), "a replicate counts once"


def test_a_default_of_one_study_is_not_joined_with_what_another_states() -> None:
    points = [
        {"study": "sweep", "label.n": 64, "label.p": "bf16"},
        {"study": "sweep", "label.n": 256, "label.p": "bf16"},
        {"study": "points", "label.n": 128, "label.p": "e4m3fn"},
    ]
    frame = table(points)
    frame.attrs[LABELS] = {"sweep": ["n"], "points": ["n", "p"]}
    assert split(frame, "label.n", [], with_baseline=False)[1] == ["label.p"]


def test_a_baseline_beside_several_variants_has_one_line() -> None:
    points = [
        {"study": "s", "label.n": n, "label.bc": bc, "pairing": str(n), "subject": subject}
        for n, bc, subject in itertools.product((1, 2), (16, 64), ("variant", "baseline"))
    ]
    frame, more = split(table(points), "label.n", ["subject"], with_baseline=True)
    assert more == ["label.bc"]
    kept = frame[frame["subject"] == "baseline"]
    assert kept["label.bc"].isna().all()
    assert kept.groupby(["label.n", "seed"]).size().tolist() == [1] * 4


MEMORY = [{"label.memory": m, "variant.tiling.bc": m // 4, "problem.n": 64} for m in (64, 128, 256)]
BOTH = list(itertools.product((1, 2), ("exp", "poly")))
ENVIRONMENTS = [{"label.n": 1, "environment": 0}, {"label.n": 2, "environment": 1}]


@pytest.mark.parametrize(
    ("points", "x", "more"),
    [
        (MEMORY, "label.memory", []),  # what follows from x
        (MEMORY, "variant.tiling.bc", []),  # nor what x follows from
        (MEMORY, "problem.n", ["label.memory"]),
        ([{"label.n": n, "variant.softmax.exp": e} for n, e in BOTH], "label.n", ["variant.softmax.exp"]),
        ([{"label.n": n, "scenario.title": t, "problem.kind": t[:1]} for n, t in BOTH], "label.n", ["scenario.title"]),
        (ENVIRONMENTS, "label.n", []),
        ([*ENVIRONMENTS, {"label.n": 1, "environment": 1}], "label.n", ["environment"]),
    ],
)
def test_a_line_is_split_by_what_its_points_differ_in_beside_x(points: list[dict[str, Any]], x: str, more: list[str]) -> None:
    assert split(table([{"study": "s"} | point for point in points]), x, [], with_baseline=False)[1] == more
