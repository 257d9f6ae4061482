"""The widgets of settings, by the names that these have on the command line; what they offer follows from what is declared."""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Any

import ipywidgets as widgets

from numdev.attention.captured import Captured
from numdev.attention.precision import FORMATS, Precision
from numdev.explorer.view import CAPTURED, KNOWN, PRESETS, SOURCES, Settings, source_settings, word_of
from numdev.settings import Setting

Controls = dict[str, widgets.ValueWidget]

LABELS = "9.5em"
"""Width of the labels of widgets."""

_POWERS = tuple(1 << power for power in range(4, 12))
_FIELDS: dict[Any, type[widgets.ValueWidget]] = {int: widgets.IntText, float: widgets.FloatText, str: widgets.Text}


def policy_controls(settings: Settings) -> Controls:
    """The preset, every step, the tile and the recurrence of one side, named by `policy_words`."""
    made: Controls = {"precision": choice("", PRESETS, KNOWN["precision.preset"].text)}
    made |= {name: control(KNOWN[name]) for name in (f"precision.{step}" for step in Precision.golden().steps())}
    made["tiling.bc"] = choice("", _POWERS, KNOWN["tiling.bc"].text, 64)
    made |= {name: control(KNOWN[name]) for name in ("tiling.order", "softmax.normalise")}
    put(made, settings)
    return made


def policy_words(names: Iterable[str]) -> list[str]:
    """The labels of the settings of one side, which both sides share."""
    return ["preset" if name == "precision" else word_of(KNOWN[name]) for name in names]


def show_preset(controls: Controls) -> None:
    """Shows the format of the preset in the empty fields of steps; raises BadInput if there is no such preset."""
    for name, text in Precision.parse(controls["precision"].value).steps().items():
        controls[f"precision.{name}"].placeholder = text


def source_controls(name: str, settings: Settings) -> Controls:
    """The parameters of a source of q, k and v."""
    made = {f"problem.source.{one.name}": control(one, one.name) for one in source_settings(name)}
    put(made, settings)
    return made


def shared_controls(settings: Settings) -> Controls:
    """Where q, k and v come from but for its parameters, how many there are, and the replicates."""
    length, causal = KNOWN["problem.n"], KNOWN["problem.causal"]
    made: Controls = {
        "problem": choice("q, k, v drawn from", SOURCES, "a distribution of the entries of q, k and v, or captured tensors"),
        "problem.n": choice(word_of(length), _POWERS, length.text, 512),
        "problem.causal": box(word_of(causal), causal.text),
        "seeds": widgets.BoundedIntText(3, 1, 1000, description="replicates", tooltip="seeds that are measured", **look()),
    }
    put(made, settings)
    return made


def offer_lengths(lengths: widgets.Dropdown, source: str, parameters: Settings) -> None:
    """Offers the lengths that a source has: captured tensors, if they can be read, have so many tokens and no more."""
    most = max(_POWERS)
    if source == CAPTURED:
        shape = Captured(**{name.rpartition(".")[2]: value for name, value in parameters.items()}).shape
        most = min(shape.queries, shape.keys)
    value = min(lengths.value, most)
    lengths.options = sorted({n for n in (*_POWERS, most, value) if n <= most})
    lengths.value = value


def values(controls: Controls) -> dict[str, Any]:
    """The settings of the widgets; an empty field has none."""
    return {name: one.value for name, one in controls.items() if one.value not in (None, "", False)}


def put(controls: Controls, settings: Settings) -> None:
    """Sets the widgets of some settings; a list offers what it is set to, and whether that can be used is seen later."""
    for name, one in controls.items():
        if settings.get(name) is not None:
            if isinstance(one, widgets.Dropdown) and settings[name] not in one.options:
                one.options = [*one.options, settings[name]]
            one.value = settings[name]


def look(label: str = "label") -> dict[str, Any]:
    """The layout of all widgets: they fill their column, and those with a label begin at the same place."""
    own = {"layout": {"width": "auto", "min_width": "0"}}
    return own | ({"style": {"description_width": LABELS}} if label else {})


def box(label: str, text: str = "") -> widgets.Checkbox:
    """A check box below the fields of other widgets; `text` says what it decides."""
    layout = {"width": "auto", "margin": f"2px 2px 2px calc({LABELS} + 4px)"}
    return widgets.Checkbox(description=label, tooltip=text, indent=False, layout=layout)


def choice(label: str, options: Iterable[Any], text: str, value: Any = None) -> widgets.Dropdown:
    """A list to choose from; `text` says what is chosen."""
    known = list(options)
    return widgets.Dropdown(
        options=known, value=known[0] if value is None else value, description=label, tooltip=text, **look(label)
    )


def control(one: Setting, label: str = "") -> widgets.ValueWidget:
    """The widget of a setting, by its type: a list, a number, text, or a format as the command line takes it."""
    if isinstance(one.kind, type) and issubclass(one.kind, Enum):
        return choice(label, [member.value for member in one.kind], one.text, one.default)
    look_of: dict[str, Any] = {"description": label, "tooltip": one.text, "continuous_update": False, **look(label)}
    if one.kind in _FIELDS:
        return _FIELDS[one.kind](one.default, **look_of)
    if one.kind == str | None:
        return widgets.Text("", placeholder="all", **look_of)
    return widgets.Combobox(options=[str(fmt) for fmt in FORMATS], **look_of)
