"""A figure in words: what is wrong with it is told when the study is loaded, by the part and the mend."""

from __future__ import annotations

from typing import Any

import pytest

from numdev.cli.plots import plot_of
from numdev.errors import BadInput

AXES = ("problem.n", "step")
FIGURES = ("out.max_difference", "out.rmse", "lse.rmse")
SHOWN = {"x": "problem.n", "y": "out.rmse"}


def read(stated: Any) -> dict[str, Any]:
    return plot_of(stated, AXES, lambda: FIGURES)


def test_text_and_mapping_say_the_same() -> None:
    full = {**SHOWN, "colour": "step", "facet": ["scenario.title"], "reference": "baseline"}
    text = "x: problem.n, y: out.rmse, colour: step, facet: [scenario.title], reference: baseline"
    assert read(full) == read(text) == {**full, "colour": ["step"]}


def test_what_is_empty_is_left_out() -> None:
    assert read({**SHOWN, "colour": []}) == SHOWN


@pytest.mark.parametrize(
    ("stated", "error"),
    [
        ("x: problem.m, y: out.rmse", "plot.x: 'problem.m' cannot be used; did you mean problem.n"),
        ("x: problem.n, y: out.rsme", "plot.y: 'out.rsme' cannot be used; did you mean out.rmse"),
        ("x: problem.n", "plot.y: None cannot be used; name what stands on this axis, as in x: problem.n, y: out.rmse"),
        ("y: out.rmse", "plot.x: None cannot be used; name what stands on this axis"),
        ({**SHOWN, "color": "step"}, "plot.color: 'step' cannot be used; a figure has no such part; did you mean colour"),
        ({**SHOWN, "facet": ["stp"]}, "plot.facet: 'stp' cannot be used; did you mean step"),
        ({**SHOWN, "reference": "gold"}, "plot.reference: 'gold' cannot be used; did you mean golden"),
        ("problem.n", "plot: 'problem.n' cannot be used; give plot='x: NAME, y: METRIC"),
        ("x: [problem.n, y: out.rmse", "plot: 'x: [problem.n, y: out.rmse' cannot be used; give it as in x: problem.n"),
        (7, "plot: 7 cannot be used; give it as in x: problem.n, y: out.rmse"),
    ],
)
def test_a_mistake_is_told(stated: Any, error: str) -> None:
    with pytest.raises(BadInput) as raised:
        read(stated)
    assert str(raised.value).startswith(error)
