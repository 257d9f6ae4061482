"""The explorer as a notebook drives it: a widget changes, and picture, message and commands follow."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("ipywidgets")

import numdev as nd
from numdev.errors import BadInput
from numdev.explorer.widgets import Explorer
from numdev.report.figures import elements
from numdev.report.figures.elements import Side

PICTURE = elements.picture
SMALL = {"problem.n": 32, "seeds": 2}


@pytest.fixture(autouse=True)
def _sketched(monkeypatch: pytest.MonkeyPatch) -> None:
    """A picture takes a second; other settings have another sketch too."""

    def sketch(*parts: Any) -> bytes:
        return repr([(part.title, float(part.out.sum())) if isinstance(part, Side) else part for part in parts]).encode()

    monkeypatch.setattr(elements, "picture", sketch)


@pytest.fixture(scope="module")
def drawn() -> Explorer:
    return nd.explore(shared=SMALL)


@pytest.fixture
def explorer(drawn: Explorer) -> Explorer:
    """What it states is as it was when it was made; its picture may be of another test until it is drawn."""
    drawn._waits = True
    drawn.keep.value, drawn.metric.value, drawn.drawn.value = False, "max_difference", 0
    for name, preset in (("left", "bf16"), ("right", "kernel_bf16")):
        for field, widget in drawn.sides[name].items():
            if field.startswith("precision."):
                widget.value = ""
        drawn.sides[name]["precision"].value = preset
    drawn._waits = False
    if drawn.shared["problem"].value != "uniform":
        drawn.shared["problem"].value = "uniform"
    return drawn


def test_there_is_a_picture_and_a_command_for_each_side(explorer: Explorer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "picture", PICTURE)
    explorer.draw()
    assert bytes(explorer.image.value).startswith(b"\x89PNG")
    assert explorer.message.value == ""
    for side in explorer.sides.values():
        assert {f"precision.{step}" for step in nd.Precision.golden().steps()} <= set(side)
    left, right = (explorer.commands[side].value for side in ("left", "right"))
    assert left == "numdev measure problem=uniform problem.n=32 precision=bf16 seeds=2 device=cpu"
    assert right == left.replace("=bf16", "=kernel_bf16")


def test_a_step_changes_the_side_that_it_is_of(explorer: Explorer) -> None:
    explorer.draw()
    before, left = explorer.image.value, explorer.view("left")
    explorer.sides["right"]["precision.row_sum"].value = "bf16"
    assert explorer.image.value != before
    assert "precision.row_sum=bf16" in explorer.commands["right"].value
    assert explorer.view("left") == left


def test_an_error_is_a_sentence_in_place_of_the_picture(explorer: Explorer) -> None:
    field = explorer.sides["right"]["precision.scores"]
    field.value = "e99"
    assert "precision.scores: &#x27;e99&#x27; cannot be used; use one of" in explorer.message.value
    assert explorer.image.value == b""
    assert explorer.commands["right"].value == ""
    assert explorer.commands["left"].value.startswith("numdev measure")
    field.value = ""
    assert explorer.message.value == ""
    assert explorer.image.value


def test_captured_tensors_bring_their_lengths_and_parameters(explorer: Explorer) -> None:
    explorer.shared["problem"].value = "captured"
    assert max(explorer.shared["problem.n"].options) == 256
    assert [*explorer.source] == ["problem.source.path", "problem.source.layer"]
    assert list(explorer._parameters.children) == [*explorer.source.values()]
    assert explorer.message.value == ""
    assert "problem=captured problem.n=32 " in explorer.commands["left"].value
    explorer.source["problem.source.layer"].value = "layer5"
    assert "problem.source.layer=layer5" in explorer.commands["left"].value
    explorer.source["problem.source.path"].value = "missing.safetensors"
    assert "there is no such file" in explorer.message.value
    explorer.shared["problem"].value = "sink"
    assert [*explorer.source] == ["problem.source.rise"]
    assert explorer.message.value == ""
    assert "layer5" not in explorer.commands["left"].value


def test_kept_axes_stay(explorer: Explorer) -> None:
    def scale() -> Any:
        return explorer._scale

    explorer.draw()
    before = scale()
    explorer.keep.value = True
    explorer.sides["right"]["precision"].value = "e4m3fn"
    assert scale() == before
    explorer.keep.value = False
    assert scale().error_ulp > before.error_ulp


def test_the_replicate_drawn_is_one_that_is_measured(explorer: Explorer) -> None:
    explorer.draw()
    before = explorer.image.value
    explorer.drawn.value = 7
    assert explorer.drawn.value == 1
    assert explorer.image.value != before


def test_settings_without_a_widget_are_honoured() -> None:
    found = nd.explore({"softmax.exp": "exp2", "precision": "e8m10"}, shared=SMALL | {"problem.head_dim": 16})
    command = found.commands["left"].value
    assert "problem.head_dim=16" in command
    assert "precision.preset=e8m10 softmax.exp=exp2" in command
    assert found.message.value == ""


def test_where_there_are_no_widgets_the_picture_is_shown(explorer: Explorer) -> None:
    data, metadata = explorer._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert data["image/png"]
    assert data["text/plain"].splitlines() == [field.value for field in explorer.commands.values()]
    assert metadata == {"image/png": {"width": 720}}


def test_a_misspelt_name_is_refused_at_once() -> None:
    with pytest.raises(BadInput, match="metric: 'max_diference' .*did you mean max_difference"):
        nd.explore(shared=SMALL, metric="max_diference")
