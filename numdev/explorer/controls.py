"""The widgets of settings, by the names that these have on the command line; what they offer follows from what is declared."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum
from typing import Any

import ipywidgets as widgets

from numdev.attention.captured import Captured
from numdev.attention.policy import FORMATS
from numdev.attention.precision import Precision
from numdev.attention.settings import GROUPS
from numdev.attention.softmax import Normalise
from numdev.attention.tiling import Order
from numdev.explorer.view import CAPTURED, PRESETS, SOURCES, Settings, source_settings, word_of
from numdev.settings import Setting, declared

Controls = dict[str, widgets.ValueWidget]

_POWERS = tuple(1 << power for power in range(4, 12))


def policy_controls(settings: Settings) -> Controls:
    """The preset, every step, the tile and the recurrence of one side."""
    said = {f"{group}.{one.name}": one for group, kind in GROUPS.items() for one in declared(kind)}
    steps = [f"precision.{name}" for name in Precision.golden().steps()]
    made: Controls = {"precision": choice("preset", PRESETS, said["precision.preset"].text)}
    made |= {name: _format(said[name]) for name in steps}
    bc, order, normalise = (said[name] for name in ("tiling.bc", "tiling.order", "softmax.normalise"))
    made["tiling.bc"] = choice(word_of(bc), _POWERS, bc.text, 64)
    made["tiling.order"] = choice(word_of(order), _values(Order), order.text)
    made["softmax.normalise"] = choice(word_of(normalise), _values(Normalise), normalise.text, Normalise.END.value)
    put(made, settings)
    return made


def show_preset(controls: Controls) -> None:
    """Writes the format of the preset into the empty fields of steps.

    Raises:
        BadInput: if there is no such preset.
    """
    for name, text in Precision.parse(controls["precision"].value).steps().items():
        controls[f"precision.{name}"].placeholder = f"{text} (preset)"


def source_controls(name: str, settings: Settings) -> Controls:
    """The parameters of a source of q, k and v."""
    made: Controls = {f"problem.source.{one.name}": _parameter(one) for one in source_settings(name)}
    put(made, settings)
    return made


def shared_controls(settings: Settings) -> Controls:
    """Where q, k and v come from but for its parameters, how many there are, and the replicates."""
    said = {one.name: one for one in declared(GROUPS["problem"])}
    length, causal = said["n"], said["causal"]
    made: Controls = {
        "problem": choice("q, k, v drawn from", SOURCES, "a distribution of the entries of q, k and v, or captured tensors"),
        "problem.n": choice(word_of(length), _POWERS, length.text, 512),
        "problem.causal": widgets.Checkbox(description=word_of(causal), tooltip=causal.text, **look()),
        "seeds": widgets.BoundedIntText(3, 1, 1000, description="replicates", tooltip="seeds that are measured", **look()),
    }
    put(made, settings)
    return made


def offer_lengths(lengths: widgets.Dropdown, source: str, parameters: Settings) -> None:
    """Offers the lengths that a source has: captured tensors have so many tokens and no more.

    Raises:
        BadInput: if captured tensors cannot be read.
    """
    most = max(_POWERS)
    if source == CAPTURED:
        shape = Captured(**{name.rpartition(".")[2]: value for name, value in parameters.items()}).shape
        most = min(shape.queries, shape.keys)
    value = min(lengths.value, most)
    lengths.options = sorted({n for n in (*_POWERS, most, value) if n <= most})
    lengths.value = value


def stated(controls: Controls) -> dict[str, Any]:
    """What the widgets state; an empty field states nothing."""
    return {name: one.value for name, one in controls.items() if one.value not in (None, "", False)}


def put(controls: Controls, settings: Settings) -> None:
    """Sets the widgets of some settings; a list offers what it is set to, and whether that can be used is seen later."""
    for name, one in controls.items():
        if settings.get(name) is not None:
            if isinstance(one, widgets.Dropdown) and settings[name] not in one.options:
                one.options = [*one.options, settings[name]]
            one.value = settings[name]


def look() -> dict[str, Any]:
    """What all widgets have in common, so that they stand in columns."""
    return {"style": {"description_width": "12.5em"}, "layout": {"width": "21em"}}


def choice(label: str, options: Iterable[Any], text: str, value: Any = None) -> widgets.Dropdown:
    """A list to choose from; `text` says what is chosen."""
    known = list(options)
    return widgets.Dropdown(options=known, value=known[0] if value is None else value, description=label, tooltip=text, **look())


def _values(kind: type[Enum]) -> list[Any]:
    return [member.value for member in kind]


def _format(step: Setting) -> widgets.Combobox:
    """A format as the command line takes it; those that have presets are offered."""
    names = [str(fmt) for fmt in FORMATS]
    return widgets.Combobox(options=names, description=word_of(step), tooltip=step.text, continuous_update=False, **look())


def _parameter(one: Setting) -> widgets.ValueWidget:
    said: Mapping[str, Any] = {"description": one.name, "tooltip": one.text, "continuous_update": False, **look()}
    if one.default is None or isinstance(one.default, str):
        return widgets.Text(one.default or "", placeholder="all" if one.default is None else "", **said)
    return (widgets.IntText if isinstance(one.default, int) else widgets.FloatText)(one.default, **said)
