"""No line of a figure joins points that differ in a setting, unless it follows from what the points of its study state."""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
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


def test_what_follows_from_x_does_not_split_its_line() -> None:
    points = [{"study": "s", "label.memory": m, "variant.tiling.bc": m // 4, "problem.n": 64} for m in (64, 128, 256)]
    assert split(table(points), "label.memory", [], with_baseline=False)[1] == []
    assert split(table(points), "variant.tiling.bc", [], with_baseline=False)[1] == [], "nor what it follows from"
    assert split(table(points), "problem.n", [], with_baseline=False)[1] == ["label.memory"]


def test_a_default_of_one_study_is_not_joined_with_what_another_states() -> None:
    points = [
        {"study": "sweep", "label.n": 64, "label.p": "bf16"},
        {"study": "sweep", "label.n": 256, "label.p": "bf16"},
        {"study": "points", "label.n": 128, "label.p": "e4m3fn"},
    ]
    frame = table(points)
    frame.attrs[LABELS] = {"sweep": ["n"], "points": ["n", "p"]}
    assert split(frame, "label.n", [], with_baseline=False)[1] == ["label.p"]


def test_a_setting_without_a_label_splits_too() -> None:
    points = [{"study": "s", "label.n": n, "variant.softmax.exp": e} for n in (1, 2) for e in ("exp", "exp2")]
    assert split(table(points), "label.n", [], with_baseline=False)[1] == ["variant.softmax.exp"]


def test_scenarios_tell_points_apart_before_their_settings_do() -> None:
    points = [
        {"study": "s", "label.n": n, "scenario.title": t, "problem.kind": t[:1]} for n in (1, 2) for t in ("uniform", "normal")
    ]
    assert split(table(points), "label.n", [], with_baseline=False)[1] == ["scenario.title"]


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


def test_a_point_measured_in_two_environments_has_two_lines() -> None:
    points = [{"study": "s", "label.n": n, "environment": e} for n, e in ((1, 0), (2, 1))]
    assert split(table(points), "label.n", [], with_baseline=False)[1] == []
    points.append({"study": "t", "label.n": 1, "environment": 1})
    assert split(table(points), "label.n", [], with_baseline=False)[1] == ["environment"]
