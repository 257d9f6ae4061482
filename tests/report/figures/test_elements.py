from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from scipy import stats
from torch import Tensor

from numdev.arithmetic.formats import BF16
from numdev.errors import BadInput
from numdev.measurement.deviation.metrics import NONFINITE, Deviation
from numdev.report.figures.elements import Axis, Side, blame, element_errors, side_by_side, total_and_arithmetic
from numdev.report.figures.theme import to_png
from numdev.report.offered import error_histogram, error_map
from tests.report.printed import assert_inside

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
    (stairs,) = (patch for patch in figure.axes[0].patches if isinstance(patch, StepPatch))
    shares, edges, _ = stairs.get_data()
    assert shares.sum() == pytest.approx(1.0)
    # A bin that meets the band's edge may stand out of it by its own width.
    assert not shares[(edges[:-1] > 0.5) | (edges[1:] < -0.5)].any()


def test_a_histogram_counts_what_it_does_not_show() -> None:
    x, reference = rounded()
    x[0, 0] = float("inf")
    x[1] += BF16.ulp(reference[1]) * 2
    words = texts(error_histogram(element_errors(x, reference, BF16)))
    assert "1 element is NaN or Inf" in words
    assert "2.5 % beyond ½ ulp" in words  # one row of forty


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
    assert dots(figure) == pytest.approx([2 * value for value in (8.0, 4.0, 2.0, 1.0)])  # the geometric mean of 1, 2 and 4 is 2
    assert "largest difference from golden, absolute" in texts(figure)
    assert "RMSE from golden, absolute" in texts(total_and_arithmetic(record_rows(), "rmse"))


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


def test_blame_speaks_in_the_words_of_the_study() -> None:
    """Whatever the scenarios and the control are called."""
    legend = blame(study_rows()).legends[0]
    assert [text.get_text() for text in legend.get_texts()] == [
        word for title in TITLES.values() for word in (title, f"{title}, without the change")
    ]
    renamed = study_rows().replace({"scenario": {"low": "a", "high": "b"}, "label.step": {NOTHING: "as it is"}})
    assert to_png(blame(renamed)) == to_png(blame(study_rows()))


def test_blame_refuses_what_it_cannot_draw() -> None:
    with pytest.raises(BadInput, match=r"axis: 'policy' .*label\.step"):
        blame(study_rows(), axis="policy")
    four = pd.concat([study_rows(), study_rows().assign(**{"scenario.title": "another"})])
    with pytest.raises(BadInput, match="4 scenarios"):
        blame(four)


@pytest.mark.parametrize("draw", [lambda: total_and_arithmetic(record_rows()), lambda: blame(study_rows())])
def test_no_text_leaves_the_figure_and_the_bytes_repeat(draw: Callable[[], Figure]) -> None:
    figure = draw()
    assert_inside(figure)
    assert to_png(figure) == to_png(draw())


@pytest.mark.parametrize("draw", [error_map, error_histogram])
def test_no_text_leaves_a_picture_of_elements(draw: Callable[..., Figure]) -> None:
    assert_inside(draw(element_errors(*rounded(), BF16), "FP32 inside"))


def side(title: str, rounding: torch.dtype, seeds: int = 3) -> Side:
    """Golden rounded once, `seeds` times."""
    rows, kept = [], None
    for seed in range(seeds):
        golden = torch.rand(40, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)) + 0.5
        out = golden.to(rounding).double()
        kept = kept or (out, golden)
        for subject in ("variant", "baseline"):
            for reference in ("golden", "golden_same_inputs"):
                place: dict[str, Any] = {"seed": seed, "cluster": "", "subject": subject, "reference": reference}
                found = Deviation.between(out, golden, BF16).metrics()
                rows.append(place | {"output": "out", "primary": True} | found)
    assert kept is not None
    return Side(title, *kept, rows)


@pytest.fixture(scope="module")
def sides() -> tuple[Side, Side]:
    return side("bf16", torch.bfloat16), side("fp16", torch.float16)


def panels(sides: tuple[Side, Side], metric: str = "max_difference", **other: Any) -> list[Axes]:
    """Left map, left histogram, right map, right histogram, metric."""
    *maps_and_histograms, _, metric_panel = side_by_side(*sides, metric, BF16, **other).axes
    return [*maps_and_histograms, metric_panel]


def test_both_sides_have_the_same_axes(sides: tuple[Side, Side]) -> None:
    assert_inside(side_by_side(*sides, "bias", BF16))
    left, below, right, beside, _ = panels(sides)
    assert left.images[0].get_clim() == right.images[0].get_clim()
    assert below.get_xlim() == beside.get_xlim()
    assert below.get_ylim() == beside.get_ylim()
    kept = Axis(3.0, 5.0, 1e-3, "max_difference", 1e-4, 2.0, True)  # of another picture
    left, below, *_, metric = panels(sides, axes=kept)
    assert (left.images[0].get_clim(), below.get_xlim(), metric.get_xlim()) == ((-3.0, 3.0), (-5.0, 5.0), (1e-4, 2.0))


def test_both_are_in_units_of_one_format(sides: tuple[Side, Side]) -> None:
    """An FP16 error is an eighth of a BF16 one, and is drawn as such."""
    drawn = panels(sides)
    shown = [np.abs(np.asarray(drawn[place].images[0].get_array())) for place in (0, 2)]
    for own, array in zip(sides, shown, strict=True):
        largest = float((own.out - own.golden).abs().max() / (BF16.u * own.golden.max()))
        assert array.max() == pytest.approx(largest)
    assert 4 < shown[0].max() / shown[1].max() < 16


def test_the_metric_is_the_mean_over_replicates(sides: tuple[Side, Side]) -> None:
    metric = panels(sides, "rmse")[-1]
    drawn = [float(np.asarray(line.get_xdata())[0]) for line in metric.lines if line.get_marker() == "o"]
    for place, own in enumerate(sides):
        values = pd.DataFrame(own.rows).query("subject == 'variant' and reference == 'golden'")["rmse"]
        assert drawn[4 * place] == pytest.approx(float(np.exp(np.log(values).mean())))
    assert metric.get_xlabel() == "RMSE from golden, absolute"
    assert [label.get_text() for label in metric.get_yticklabels()][::2] == ["left: measured", "right: measured"]


def test_nan_is_written_beside_one_another(sides: tuple[Side, Side]) -> None:
    out = sides[0].out.clone()
    out[0, 0] = float("nan")
    rows = [row | dict.fromkeys(NONFINITE[:1], 1) for row in sides[0].rows]
    broken = Side("bf16", out, sides[0].golden, rows), sides[1]
    figure = side_by_side(*broken, "rmse", BF16)
    words = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]
    assert words.count("NaN, Inf or not measured") == 4
    assert any("1 element is NaN or Inf" in text for text in words)
