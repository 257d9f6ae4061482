from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.text import Text

from numdev.arithmetic.formats import BF16, FP16
from numdev.measurement.deviation.metrics import NONFINITE, Deviation
from numdev.report.figures.elements import Axis, Side, axes_for, side_by_side
from numdev.report.figures.theme import to_png


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
    left, below, right, beside, _ = panels(sides)
    assert left.images[0].get_clim() == right.images[0].get_clim()
    assert below.get_xlim() == beside.get_xlim()
    assert below.get_ylim() == beside.get_ylim()


def test_both_are_in_units_of_one_format(sides: tuple[Side, Side]) -> None:
    """An FP16 error is an eighth of a BF16 one, and is drawn as such."""
    drawn = panels(sides)
    shown = [np.abs(np.asarray(drawn[place].images[0].get_array())) for place in (0, 2)]
    for own, array in zip(sides, shown, strict=True):
        largest = float((own.out - own.golden).abs().max() / (BF16.u * own.golden.max()))
        assert array.max() == pytest.approx(largest)
    assert 4 < shown[0].max() / shown[1].max() < 16


def test_axes_of_another_picture_are_kept(sides: tuple[Side, Side]) -> None:
    given = Axis(3.0, 5.0, 1e-3, "max_difference", 1e-4, 2.0, True)
    left, below, *_, metric = panels(sides, axes=given)
    assert left.images[0].get_clim() == (-3.0, 3.0)
    assert below.get_xlim() == (-5.0, 5.0)
    assert metric.get_xlim() == (1e-4, 2.0)


def test_the_metric_is_the_mean_over_replicates(sides: tuple[Side, Side]) -> None:
    metric = panels(sides, "rmse")[-1]
    drawn = [float(np.asarray(line.get_xdata())[0]) for line in metric.lines if line.get_marker() == "o"]
    for place, own in enumerate(sides):
        values = pd.DataFrame(own.rows).query("subject == 'variant' and reference == 'golden'")["rmse"]
        assert drawn[4 * place] == pytest.approx(float(np.exp(np.log(values).mean())))
    assert metric.get_xlabel() == "RMSE from golden, absolute"
    assert [label.get_text() for label in metric.get_yticklabels()][::2] == ["left: measured", "right: measured"]


@pytest.mark.parametrize("metric", ["max_difference", "bias", "agreement_bits", "cosine_similarity", "max_ulp"])
def test_every_dot_lies_on_its_axis(sides: tuple[Side, Side], metric: str) -> None:
    found = axes_for(sides, metric, BF16)
    for own in sides:
        for *_, interval in own.intervals(metric):
            assert interval is not None
            assert found.low < interval.estimate < found.high


def test_nan_is_written(sides: tuple[Side, Side]) -> None:
    out = sides[0].out.clone()
    out[0, 0] = float("nan")
    rows = [row | dict.fromkeys(NONFINITE[:1], 1) for row in sides[0].rows]
    broken = Side("bf16", out, sides[0].golden, rows), sides[1]
    figure = side_by_side(*broken, "rmse", BF16)
    words = [text.get_text() for text in figure.findobj(Text) if isinstance(text, Text)]
    assert words.count("NaN, Inf or not measured") == 4
    assert any("1 element is NaN or Inf" in text for text in words)


def test_equal_results_are_drawn() -> None:
    golden = torch.ones(4, 2, dtype=torch.float64)
    exact = Side("fp64", golden, golden, side("bf16", torch.float64).rows)
    assert to_png(side_by_side(exact, exact, "rmse", FP16))


@pytest.mark.parametrize("metric", ["max_difference", "bias"])
def test_no_text_leaves_the_figure_and_the_bytes_repeat(sides: tuple[Side, Side], metric: str) -> None:
    figure = side_by_side(*sides, metric, BF16)
    box, (width, height) = figure.get_tightbbox(), figure.get_size_inches()
    assert min(box.x0, box.y0) > 0
    assert box.x1 < width
    assert box.y1 < height
    assert to_png(figure) == to_png(side_by_side(*sides, metric, BF16))
