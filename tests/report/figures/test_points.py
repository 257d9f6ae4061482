"""The figure of a study that names none: lines over numbers where there are some, else a line for each point."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
from matplotlib.container import ErrorbarContainer
from matplotlib.figure import Figure

from numdev.measurement.deviation.metrics import NONFINITE
from numdev.report.figures.plot import POINTS, axis_of
from numdev.report.figures.theme import to_png


def rows(labels: list[dict[str, Any]], scenarios: tuple[str, ...] = ("one",), error: float = 1e-3) -> pd.DataFrame:
    """Three replicates of each point, and of its baseline with twice the error; a second output is much farther off."""
    found = []
    for scenario in scenarios:
        head = {
            "scenario": scenario,
            "scenario.title": f"{scenario} title",
            "scenario.role": "beyond",
            "format": "",
            "cluster": "",
        }
        for place, point in enumerate(labels):
            for seed in range(3):
                for subject, factor in (("variant", 1.0), ("baseline", 2.0)):
                    for output, times in (("y", 1.0), ("rms", 1000.0)):
                        row = head | {f"label.{name}": value for name, value in point.items()}
                        row |= {"key": f"{scenario}{place}", "seed": seed, "subject": subject, "reference": "golden"}
                        value = error * (place + 1) * factor * times * (1 + 0.01 * seed)
                        row |= {"output": output, "primary": output == "y", "rmse": value}
                        found.append(row | dict.fromkeys(NONFINITE, 0))
    return pd.DataFrame(found)


def drawn(figure: Figure) -> list[ErrorbarContainer]:
    return [item for axes in figure.axes for item in axes.containers if isinstance(item, ErrorbarContainer)]


def places(figure: Figure) -> list[tuple[float, float]]:
    return [(float(x), float(y)) for item in drawn(figure) for x, y in np.asarray(item.lines[0].get_xydata())]


GRID = [{"policy": policy, "block": block} for policy in ("low", "high") for block in (64, 256, 1024)]


def test_numbers_are_an_axis_and_the_other_labels_are_lines() -> None:
    found = rows(GRID, ("one", "two"))
    assert axis_of(found) == "label.block"
    figure = POINTS(found)
    assert len(drawn(figure)) == 2 * 2
    assert [x for x, _ in places(figure)] == [64, 256, 1024] * 4
    seeds = (1.0 * 1.01 * 1.02) ** (1 / 3)  # the geometric mean
    assert [y for _, y in places(figure)] == pytest.approx([1e-3 * (i + 1) * seeds for i in range(6)] * 2)
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["policy = low", "policy = high"]
    assert figure.get_supxlabel() == "block"


@pytest.mark.parametrize(
    "labels",
    [
        [{"policy": name} for name in ("a", "b", "c")],
        [{"block": 64}, {"block": 256}],
        [{"skips": value} for value in (0, 1, 2)],
        [{"first": str(i), "block": 2**i} for i in range(9)],
        [{}],
    ],
    ids=["words", "two numbers", "no logarithm", "too many lines", "no label"],
)
def test_else_every_point_has_a_line_of_its_own(labels: list[dict[str, Any]]) -> None:
    found = rows(labels)
    assert axis_of(found) is None
    figure = POINTS(found)
    assert len(drawn(figure)) == 2 * len(labels)
    names = [", ".join(f"{name} = {value}" for name, value in point.items()) or "defaults" for point in labels]
    assert [text.get_text() for text in figure.axes[0].get_yticklabels()] == names
    assert {y for _, y in places(figure)} == set(range(len(labels)))


def test_many_points_are_cut_and_counted() -> None:
    figure = POINTS(rows([{"policy": f"p{i}"} for i in range(50)]))
    assert len(drawn(figure)) == 2 * 40
    assert figure.get_supxlabel().endswith("; the first 40 of 50 points")


@pytest.mark.parametrize("labels", [GRID, [{"policy": "a"}, {"policy": "b"}]], ids=["lines", "points"])
def test_what_has_no_logarithm_is_left_out(labels: list[dict[str, Any]]) -> None:
    nothing = rows(labels, error=0.0)
    assert drawn(POINTS(nothing)) == []
    broken = rows(labels).assign(nan_count=1)
    assert drawn(POINTS(broken)) == []
    assert to_png(POINTS(broken)) == to_png(POINTS(broken))
