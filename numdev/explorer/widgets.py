"""The explorer: settings of the left, of the right and of both, the picture, and the two commands."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from enum import Enum
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from numdev.attention.captured import Captured
from numdev.attention.precision import FORMATS, Precision
from numdev.errors import BadInput, NumdevError, one_of
from numdev.explorer.view import CAPTURED, KNOWN, PRESETS, SHARED, SOURCES, Settings, View, measured, source_settings, word_of
from numdev.measurement.metrics import METRICS
from numdev.settings import Setting

if TYPE_CHECKING:
    from numdev.report.figures.elements import Scale

Controls = dict[str, widgets.ValueWidget]

LABELS = "9.5em"
"""Width of the labels of widgets."""

_POWERS = tuple(1 << power for power in range(4, 12))
_FIELDS: dict[Any, type[widgets.ValueWidget]] = {int: widgets.IntText, float: widgets.FloatText, str: widgets.Text}
_SIDES = ("left", "right")
_WIDTH = 720  # of the picture in pixels of a page; it has twice as many
_IMAGE: Any = {"width": "100%", "min_width": "min(34em, 100%)", "max_width": f"{_WIDTH}px"}


def _heading(text: str) -> widgets.HTML:
    return widgets.HTML(f"<b>{text}</b>")


def _label(text: str) -> widgets.HTML:
    return widgets.HTML(f"<div style='text-align: right; line-height: 1.2; padding: 6px 4px 0 0'>{html.escape(text)}</div>")


class Explorer:
    """Two policies side by side; `numdev.explore` makes one, and a notebook shows it.

    Every change of a widget measures what is not yet measured and draws both sides again.
    """

    def __init__(self, left: Settings, right: Settings, shared: Settings, metric: str, seed: int) -> None:
        """See `numdev.explore`; raises BadInput for a setting or a metric that does not exist."""
        policies: dict[str, Settings] = {"left": left, "right": right}
        both = {**SHARED, **shared}
        for own in policies.values():
            View.of({**both, **own})
        names = [name for name, (unit, _) in METRICS.items() if unit != "count"]
        if metric not in names:
            raise BadInput("metric", metric, one_of(metric, names))
        self.shared = shared_controls(both)
        self.source = source_controls(both["problem"], both)
        self.sides = {name: policy_controls(own) for name, own in policies.items()}
        self.metric = choice("metric", names, "of the lowest panel, which is drawn over all replicates", metric)
        self.drawn = widgets.BoundedIntText(seed, 0, 999, description="replicate drawn", **look())
        self.keep = box("keep these axes")
        self.image, self.message = widgets.Image(format="png", width=_WIDTH, layout=_IMAGE), widgets.HTML()
        self.commands = {name: widgets.Textarea(rows=4, layout={"width": "auto"}) for name in _SIDES}
        # Settings without a widget are honoured all the same.
        self._both = {name: value for name, value in both.items() if name not in {**self.shared, **self.source}}
        self._own = {side: {k: v for k, v in own.items() if k not in self.sides[side]} for side, own in policies.items()}
        self._scale: Scale | None = None
        self._waits = False  # several widgets change, and one picture is drawn when all have
        self._parameters = widgets.VBox(list(self.source.values()))
        self.widget = self._laid_out()
        fields = [one for group in (self.shared, self.source, *self.sides.values()) for one in group.values()]
        for one in (self.metric, self.drawn, self.keep, *fields):
            one.observe(self._changed, "value")
        self.draw()

    def view(self, side: str) -> View:
        """The settings of a side, `left` or `right`, as a view; raises BadInput for settings that cannot be used."""
        own = {**self._own[side], **values(self.sides[side])}
        return View.of({**self._both, **values(self.shared), **values(self.source), **own})

    def draw(self) -> None:
        """Measure and draw both sides; what cannot be is a message in place of the picture."""
        try:
            offer_lengths(self.shared["problem.n"], self.shared["problem"].value, values(self.source))
            for side in self.sides.values():
                show_preset(side)
            self.drawn.max = self.shared["seeds"].value - 1
            self.image.value, message = self._picture(), ""
        except NumdevError as error:
            self.image.value, message = b"", str(error)
        self.message.value = f"<p role='alert'>{html.escape(message)}</p>" if message else ""
        for name, field in self.commands.items():
            try:
                field.value = self.view(name).command
            except NumdevError:
                field.value = ""

    def _picture(self) -> bytes:
        from numdev.report.figures.elements import Scale, Side, picture

        views = {name: self.view(name) for name in _SIDES}
        results = {name: measured(view, self.drawn.value) for name, view in views.items()}
        sides = {name: Side(views[name].title, one.out, one.golden, one.record.rows) for name, one in results.items()}
        fmt, metric = views["left"].variant.format, self.metric.value
        if self._scale is None or not self.keep.value:
            self._scale = Scale.of(tuple(sides.values()), fmt)
        return picture(sides["left"], sides["right"], metric, fmt, self._scale)

    def _changed(self, change: Any) -> None:
        """A widget has another value."""
        if self._waits:
            return
        self._waits = True  # the widgets that follow from this one
        if change["owner"] is self.shared["problem"]:
            self._both = {name: value for name, value in self._both.items() if not name.startswith("problem.")}
            self.source = source_controls(change["new"], {})
            for one in self.source.values():
                one.observe(self._changed, "value")
            self._parameters.children = list(self.source.values())
        self.draw()
        self._waits = False

    def _laid_out(self) -> widgets.HBox:
        """Settings, and beside them, or below where a screen is narrow, the picture and the commands."""
        picture = widgets.Box([self.image], layout={"overflow": "auto"})  # scrolls where it would become too small to read
        commands = [part for name, field in self.commands.items() for part in (widgets.Label(f"Show the command: {name}"), field)]
        both = [*self.shared.values(), self.metric, self.drawn, self.keep]
        settings = [_heading("Both sides: q, k, v and what is measured"), *both, self._parameters]
        settings += [_heading("Each side: an empty field has the format of the preset"), self._table()]
        return widgets.HBox(
            [
                widgets.VBox(settings, layout={"flex": "1 1 30em", "min_width": "0", "max_width": "36em"}),
                widgets.VBox([self.message, picture, *commands], layout={"flex": "1 1 36em", "min_width": "0"}),
            ],
            layout={"flex_flow": "row wrap", "grid_gap": "0 1em"},
        )

    def _table(self) -> widgets.GridBox:
        """A row for each setting of a policy: its name, the left side, the right side."""
        cells: list[widgets.Widget] = [_label(""), *(_heading(name.title()) for name in _SIDES)]
        rows = zip(*(side.values() for side in self.sides.values()), strict=True)
        for word, fields in zip(policy_words(self.sides["left"]), rows, strict=True):
            cells += [_label(word), *fields]
        return widgets.GridBox(cells, layout={"grid_template_columns": "30% minmax(0, 1fr) minmax(0, 1fr)"})

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widgets where they can be shown; elsewhere the picture, and the commands as text."""
        shown = dict(self.widget._repr_mimebundle_())
        shown["text/plain"] = "\n".join(field.value for field in self.commands.values())
        if self.image.value:
            shown["image/png"] = base64.b64encode(self.image.value).decode()
        return shown, {"image/png": {"width": _WIDTH}}


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
