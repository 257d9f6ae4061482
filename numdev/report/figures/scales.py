"""The axes that the panels of one figure share: places or names on x, a linear or logarithmic y."""

from __future__ import annotations

import textwrap
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from numdev.report.figures.grid import log_y, name_steps, plain_ticks

LOG_FROM = 8.0
"""The ratio of the greatest and the least positive number from which an axis is logarithmic."""
_LONG = 90  # characters that stand level in the names of the categories of all panels of a row


@dataclass(frozen=True)
class Scales:
    """The axes that all panels share.

    Attributes:
        places: of the values of x.
        names: of the categories; None on an axis of numbers.
        is_log: whether y is logarithmic.
        ends: of y where it is.
    """

    places: dict[Any, float]
    names: list[str] | None
    is_log: bool
    ends: tuple[float, float]

    def of(self, present: Collection[Any]) -> Scales:
        """Those of one panel, which has no room for categories of other panels."""
        if self.names is None or len(present) == len(self.names):
            return self
        kept = [(value, name) for value, name in zip(self.places, self.names, strict=True) if value in present]
        return replace(self, places={value: float(i) for i, (value, _) in enumerate(kept)}, names=[name for _, name in kept])

    def lay(self, axes: Axes, beside: int) -> None:
        """Set scales, ticks and names on a panel, of which `beside` stand in a row."""
        if self.is_log:
            log_y(axes, *self.ends)
        else:
            axes.ticklabel_format(axis="y", style="sci", scilimits=(-3, 4), useMathText=True)
            axes.margins(y=0.1)
        places = sorted(self.places.values())
        if self.names is not None:
            _name_categories(axes, self.names, _LONG // beside)
        elif places[0] > 0 and places[-1] >= LOG_FROM / 2 * places[0]:
            if len(places) <= 12:
                plain_ticks(axes, places, turned=len(places) > 8)
            else:
                axes.set_xscale("log")
                name_steps(axes.xaxis)
        elif len(places) <= 8:
            axes.set_xticks(places, [f"{place:g}" for place in places])
        else:
            axes.xaxis.set_major_locator(MaxNLocator(8))


def _name_categories(axes: Axes, names: list[str], room: int) -> None:
    is_long = sum(map(len, names)) > room
    turn: Any = {"rotation": 30, "ha": "right", "rotation_mode": "anchor"} if is_long else {}
    axes.set_xticks(range(len(names)), [textwrap.fill(name, 28) for name in names], **turn)
    axes.tick_params(axis="x", length=0)
    axes.set_xlim(-0.6, len(names) - 0.4)
