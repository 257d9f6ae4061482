from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import StepPatch
from matplotlib.text import Text
from torch import Tensor

from numdev.arithmetic.formats import BF16
from numdev.errors import BadInput
from numdev.measurement.metrics import Deviation
from numdev.report.figures.elements import Scale, Side, element_errors, error_histogram, error_map, side_by_side
from numdev.report.figures.theme import to_png
from tests.report.printed import assert_inside


def texts(figure: Figure) -> str:
    return "\n".join(text.get_text() for text in figure.findobj(Text) if isinstance(text, Text))


def rounded() -> tuple[Tensor, Tensor]:
    reference = torch.rand(40, 8, dtype=torch.float64) + 0.5
    return reference.bfloat16().double(), reference


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
    left, below, *_ = panels(sides, scale=Scale(3.0, 5.0, 1e-3))  # of another picture
    assert (left.images[0].get_clim(), below.get_xlim(), below.get_ylim()) == ((-3.0, 3.0), (-5.0, 5.0), (1e-3, 1.0))


def test_the_metric_is_the_mean_over_replicates(sides: tuple[Side, Side]) -> None:
    metric = panels(sides, "rmse")[-1]
    drawn = [float(np.asarray(line.get_xdata())[0]) for line in metric.lines if line.get_marker() == "o"]
    for place, own in enumerate(sides):
        values = pd.DataFrame(own.rows).query("subject == 'variant' and reference == 'golden'")["rmse"]
        assert drawn[4 * place] == pytest.approx(float(np.exp(np.log(values).mean())))
    assert metric.get_xlabel() == "RMSE from golden, absolute"
    assert [label.get_text() for label in metric.get_yticklabels()][::2] == ["left: measured", "right: measured"]
