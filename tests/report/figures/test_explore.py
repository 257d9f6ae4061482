from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.text import Text
from scipy import stats
from torch import Tensor

from numdev.arithmetic.formats import BF16
from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import NONFINITE, Deviation
from numdev.report.figures.elements import element_errors
from numdev.report.figures.elements import blame, total_and_arithmetic
from numdev.report.figures.theme import to_png
from numdev.report.offered import error_histogram, error_map

STEPS = ("row_sum", "output")


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))


def rounded() -> tuple[Tensor, Tensor]:
    reference = torch.rand(40, 8, dtype=torch.float64) + 0.5
    return reference.bfloat16().double(), reference


def rows(values: dict[tuple[str, str], float], label: str = "") -> pd.DataFrame:
    """One row per seed, subject and reference; a seed multiplies the value by 1, 2 or 4."""
    return pd.DataFrame(
        [
            {"seed": seed, "subject": subject, "output": "out", "primary": True, "reference": reference}
            | dict.fromkeys(NONFINITE, 0)
            | {"max_difference": value * 2.0**seed, "rmse": value, "label.step": label}
            for (subject, reference), value in values.items()
            for seed in range(3)
        ]
    )


def record_rows() -> pd.DataFrame:
    subjects, references = ("variant", "baseline"), ("golden", "golden_same_inputs")
    keys = [(subject, reference) for subject in subjects for reference in references]
    return rows(dict(zip(keys, (8.0, 4.0, 2.0, 1.0), strict=True)))


NOTHING = "none"
TITLES = {"low": "this step in BF16", "high": "this step in FP32"}


def study_rows() -> pd.DataFrame:
    parts = []
    for scenario, scale in (("low", 1.0), ("high", 100.0)):
        for place, step in enumerate((NOTHING, *STEPS)):
            of: dict[str, Any] = {"scenario": scenario, "scenario.title": TITLES[scenario], "scenario.role": "beyond"}
            of["role.step"] = "control" if step == NOTHING else None
            parts.append(rows({("variant", "golden"): scale * (place + 1)}, step).assign(**of))
    return pd.concat(parts, ignore_index=True)


def bars(figure: Figure) -> list[BarContainer]:
    """Bars that stand for a value, not for a legend's entry."""
    found = [item for item in figure.axes[0].containers if isinstance(item, BarContainer)]
    return [item for item in found if str(item.get_label()).startswith("_")]


def test_a_map_shows_the_difference_in_units_of_u() -> None:
    x, reference = rounded()
    figure = error_map(element_errors(x, reference, BF16))
    shown = figure.axes[0].images[0].get_array()
    assert shown is not None
    expected = (x - reference) / (BF16.u * reference.abs().max())
    np.testing.assert_array_equal(np.asarray(shown), expected.T.numpy())
    ring = figure.axes[0].lines[0]
    row, column = np.asarray(ring.get_xydata()).astype(int)[0]
    assert (x - reference).abs()[row, column] == (x - reference).abs().max()


def test_a_map_leaves_out_what_is_not_finite() -> None:
    x, reference = rounded()
    x[3, 2], x[4, 1] = float("nan"), float("inf")
    shown = error_map(element_errors(x, reference, BF16)).axes[0].images[0].get_array()
    assert shown is not None
    assert np.ma.getmaskarray(shown).sum() == 2
    nothing = torch.full_like(x, float("nan"))
    assert to_png(error_map(element_errors(nothing, reference, BF16)))


def test_one_rounding_stays_within_half_an_ulp() -> None:
    x, reference = rounded()
    figure = error_histogram(element_errors(x, reference, BF16))
    assert "0 % beyond ½ ulp" in texts(figure)
    heights = [(patch.get_x(), patch.get_width(), patch.get_height()) for patch in figure.axes[0].containers[0]]  # type: ignore[attr-defined]
    assert sum(height for *_, height in heights) == pytest.approx(1.0)
    # A bin that meets the band's edge may stand out of it by its own width.
    assert all(height == 0 for left, width, height in heights if left > 0.5 or left + width < -0.5)


def test_a_histogram_counts_what_it_does_not_show() -> None:
    x, reference = rounded()
    x[0, 0] = float("inf")
    x[1] += BF16.ulp(reference[1]) * 2
    words = texts(error_histogram(element_errors(x, reference, BF16)))
    assert "1 element is NaN or Inf" in words
    assert "2.5 % beyond ½ ulp" in words  # one row of forty


@pytest.mark.parametrize("draw", [error_map, error_histogram])
def test_a_title_tells_the_policy(draw: Callable[..., Figure]) -> None:
    found = element_errors(*rounded(), BF16)
    axes = draw(found, "every step in BF16").axes[0]
    assert axes.get_title(loc="left") == "every step in BF16"
    assert "every step" not in texts(draw(found))


def test_a_title_leaves_the_histograms_own_words() -> None:
    found = element_errors(*rounded(), BF16)
    bare, titled = error_histogram(found).axes[0], error_histogram(found, "FP32 inside").axes[0]
    assert titled.get_title(loc="right") == bare.get_title(loc="left")
    assert "beyond ½ ulp" in titled.get_title(loc="right")


@pytest.mark.parametrize("draw", [error_map, error_histogram])
def test_equal_values_are_drawn(draw: object) -> None:
    _, reference = rounded()
    assert callable(draw)
    assert to_png(draw(element_errors(reference, reference, BF16)))
    zero = torch.zeros_like(reference)
    assert to_png(draw(element_errors(zero, zero, BF16)))


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(BadInput, match="reference"):
        element_errors(torch.zeros(0, 4), torch.zeros(0, 4), BF16)


def test_elements_agree_with_the_metrics() -> None:
    x, reference = rounded()
    found, metrics = element_errors(x, reference, BF16), Deviation.between(x, reference, BF16)
    assert len(found) == x.numel()
    assert found["error"].abs().max() == metrics.max_difference
    assert found["error_u"].abs().max() == pytest.approx(metrics.max_u, rel=1e-12)
    assert found["error_ulp"].abs().max() == pytest.approx(metrics.max_ulp, rel=1e-12)
    worst = int(found["error"].abs().argmax())
    assert (found["row"].iloc[worst], found["column"].iloc[worst]) == metrics.max_index


def test_total_stands_beside_arithmetic() -> None:
    figure = total_and_arithmetic(record_rows())
    widths = [item.patches[0].get_width() for item in bars(figure)]
    assert widths == pytest.approx([2 * value for value in (8.0, 4.0, 2.0, 1.0)])  # the geometric mean of 1, 2 and 4 is 2
    assert "largest difference from golden, absolute" in texts(figure)
    assert "RMSE from golden, absolute" in texts(total_and_arithmetic(record_rows(), "rmse"))


def test_nan_is_written_and_not_drawn() -> None:
    found = record_rows()
    found.loc[found["subject"] == "variant", "nan_count"] = 1
    figure = total_and_arithmetic(found)
    assert len(bars(figure)) == 2
    assert texts(figure).count("NaN, Inf or not measured") == 2


def dots(figure: Figure) -> list[float]:
    """Where they stand on the axis of the metric."""
    return [float(np.asarray(line.get_xdata())[0]) for line in figure.axes[0].lines if line.get_marker() == "o"]


def dashed(figure: Figure) -> list[float]:
    return [float(np.asarray(line.get_xdata())[0]) for line in figure.axes[0].lines if line.get_linestyle() == "--"]


def test_blame_has_a_pair_of_dots_for_each_step() -> None:
    figure = blame(study_rows())
    assert dots(figure) == pytest.approx([4.0, 6.0, 400.0, 600.0])
    low, high = (stats.gmean([value, 2 * value, 4 * value]) for value in (1.0, 100.0))
    assert dashed(figure) == pytest.approx([low, high])
    assert [label.get_text() for label in figure.axes[0].get_yticklabels()] == ["row sum", "output"]


def test_blame_writes_what_it_cannot_draw() -> None:
    found = study_rows()
    found.loc[(found["label.step"] == "output") & (found["scenario"] == "low"), "max_difference"] = 0.0
    found.loc[(found["label.step"] == "output") & (found["scenario"] == "high"), "inf_count"] = 1
    figure = blame(found)
    assert len(dots(figure)) == 2
    assert {"0", "NaN, Inf or not measured"} <= set(texts(figure).splitlines())


def test_blame_speaks_in_the_words_of_the_study() -> None:
    """Whatever the scenarios and the control are called."""
    legend = blame(study_rows()).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [
        word for title in TITLES.values() for word in (title, "without the change")
    ]
    renamed = study_rows().replace({"scenario": {"low": "a", "high": "b"}, "label.step": {NOTHING: "as it is"}})
    assert to_png(blame(renamed)) == to_png(blame(study_rows()))


def test_blame_of_one_scenario_without_a_control_has_dots_alone() -> None:
    figure = blame(study_rows().query("scenario == 'low' and `label.step` != 'none'").drop(columns="role.step"))
    assert len(dots(figure)) == len(STEPS)
    assert dashed(figure) == []


def test_blame_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(BadInput, match=r"axis: 'policy' .*label\.step"):
        blame(study_rows(), axis="policy")
    four = pd.concat([study_rows(), study_rows().assign(**{"scenario.title": "another"})])
    with pytest.raises(BadInput, match="4 scenarios"):
        blame(four)


@pytest.mark.parametrize("figure", ["map", "histogram", "titled map", "titled histogram", "errors", "blame"])
def test_no_text_leaves_the_figure_and_the_bytes_repeat(figure: str) -> None:
    x, reference = rounded()
    draws: dict[str, Callable[[], Figure]] = {
        "map": lambda: error_map(element_errors(x, reference, BF16)),
        "histogram": lambda: error_histogram(element_errors(x, reference, BF16)),
        "titled map": lambda: error_map(element_errors(x, reference, BF16), "FP32 inside"),
        "titled histogram": lambda: error_histogram(element_errors(x, reference, BF16), "FP32 inside"),
        "errors": lambda: total_and_arithmetic(record_rows()),
        "blame": lambda: blame(study_rows()),
    }
    drawn = draws[figure]()
    box, (width, height) = drawn.get_tightbbox(), drawn.get_size_inches()
    slack = 0.02
    assert min(box.x0, box.y0) > -slack
    assert box.x1 < width + slack
    assert box.y1 < height + slack
    assert to_png(drawn) == to_png(draws[figure]())
