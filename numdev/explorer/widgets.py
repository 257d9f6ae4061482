"""The explorer: settings of the left, of the right and of both, the picture, and the two commands."""

from __future__ import annotations

import base64
import html
from typing import TYPE_CHECKING, Any

import ipywidgets as widgets

from numdev.errors import BadInput, NumdevError, one_of
from numdev.explorer import controls
from numdev.explorer.view import SHARED, Settings, View, measured
from numdev.measurement.metrics import METRICS

if TYPE_CHECKING:
    from numdev.report.figures.elements import Scale

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
        self.shared = controls.shared_controls(both)
        self.source = controls.source_controls(both["problem"], both)
        self.sides = {name: controls.policy_controls(own) for name, own in policies.items()}
        self.metric = controls.choice("metric", names, "of the lowest panel, which is drawn over all replicates", metric)
        self.drawn = widgets.BoundedIntText(seed, 0, 999, description="replicate drawn", **controls.look())
        self.keep = controls.box("keep these axes")
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
        own = {**self._own[side], **controls.values(self.sides[side])}
        return View.of({**self._both, **controls.values(self.shared), **controls.values(self.source), **own})

    def draw(self) -> None:
        """Measure and draw both sides; what cannot be is a message in place of the picture."""
        try:
            controls.offer_lengths(self.shared["problem.n"], self.shared["problem"].value, controls.values(self.source))
            for side in self.sides.values():
                controls.show_preset(side)
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

    def copy(self) -> None:
        """Make the right side what the left one is, to change it from there."""
        self._waits = True
        for name, one in self.sides["right"].items():
            controls.put({name: one}, {name: self.sides["left"][name].value})
        self._own["right"] = dict(self._own["left"])
        self._waits = False
        self.draw()

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
            self.source = controls.source_controls(change["new"], {})
            for one in self.source.values():
                one.observe(self._changed, "value")
            self._parameters.children = list(self.source.values())
        self.draw()
        self._waits = False

    def _laid_out(self) -> widgets.HBox:
        """Settings, and beside them, or below where a screen is narrow, the picture and the commands."""
        copy = widgets.Button(description="copy left to right", tooltip="then change the right side from there")
        copy.on_click(lambda _: self.copy())
        picture = widgets.Box([self.image], layout={"overflow": "auto"})  # scrolls where it would become too small to read
        commands = [part for name, field in self.commands.items() for part in (widgets.Label(f"Show the command: {name}"), field)]
        both = [*self.shared.values(), self.metric, self.drawn, self.keep]
        settings = [_heading("Both sides: q, k, v and what is measured"), *both, self._parameters]
        settings += [_heading("Each side: an empty field has the format of the preset"), self._table(), copy]
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
        for word, fields in zip(controls.policy_words(self.sides["left"]), rows, strict=True):
            cells += [_label(word), *fields]
        return widgets.GridBox(cells, layout={"grid_template_columns": "30% minmax(0, 1fr) minmax(0, 1fr)"})

    def _repr_mimebundle_(self, **_: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        """The widgets where they can be shown; elsewhere the picture, and the commands as text."""
        shown = dict(self.widget._repr_mimebundle_())
        shown["text/plain"] = "\n".join(field.value for field in self.commands.values())
        if self.image.value:
            shown["image/png"] = base64.b64encode(self.image.value).decode()
        return shown, {"image/png": {"width": _WIDTH}}
