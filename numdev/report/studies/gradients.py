"""The deviation of dQ, dK and dV over lengths and formats, the direction of their errors, and the signed bias of delta.

The gradients differ in size, and with N: so their deviations are compared normwise, `||D||_2 / ||golden||_2`, which one rounding
of each element makes about u. A gradient is added to weights step after step: errors of random directions cancel, one that keeps
its direction does not. `delta = rowsum(dO * O)` enters every element of dS; its bias is the mean of `sign(delta) D` over the mean
of `|delta|`, in units of u: it would be 1 if every element of O were off by u away from zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from scipy.special import beta

from numdev.arithmetic.formats import Format
from numdev.report.claims.evidence import EVERY, by_format, left_out, mean_of, over, over_column, per_replicate, select
from numdev.report.claims.verdicts import LARGER, Evidence, Question, Region, Undecidable
from numdev.report.figures.grid import (
    Panel,
    at_least_a_decade,
    by_scenario,
    draw_grid,
    in_u,
    limits,
    means,
    plain_ticks,
    whiskers,
)
from numdev.report.figures.labels import WHITE, corner, room_above
from numdev.report.figures.style import FP32_INSIDE, GREY, PAGE, PALE, SMALL, TILED
from numdev.report.reading.scenarios import ENTRY_ROLE, FORMATS, formats, of, ordered
from numdev.report.statistics import Interval, ratio
from numdev.report.studies.attention import GRADIENTS, LENGTH, SAME_INPUTS, SHADES, SYMBOLS, measured, narrowest, of_output
from numdev.report.studies.marks import DASHED, legend, line, titled
from numdev.report.studies.marks import measured as value_of
from numdev.results.manifest import EntryRole

SIZE = "relative_frobenius"
_ROOM = 0.38  # share of the vertical axis above the lines: a line of words for each gradient


def _chosen(rows: pd.DataFrame) -> pd.DataFrame:
    """The gradients of the variant against golden of the same rounded inputs."""
    return rows[(rows["subject"] == "variant") & (rows["reference"] == SAME_INPUTS) & rows["output"].isin(GRADIENTS)]


def draw_gradients(rows: pd.DataFrame) -> Figure:
    """The relative deviation over N in the narrowest format, a line for each gradient."""
    own = narrowest(in_u(_chosen(rows), (SIZE,)))

    def ticks(axes: Axes, panel: pd.DataFrame) -> None:
        plain_ticks(axes, panel["place"].unique().tolist())

    def exponent(each: pd.DataFrame) -> Interval:
        return over_column(each, LENGTH, SIZE, "N", SAME_INPUTS)

    text = f"sequence length N, tokens (F = {own['format'].iloc[0].upper()})"
    return _lines(own.assign(place=own[LENGTH].astype(float)), text, ticks, exponent, "N")


def draw_gradients_formats(rows: pd.DataFrame) -> Figure:
    """The relative deviation in units of u over the formats, a line for each gradient: level where it is proportional to u."""
    own = _chosen(rows)
    names = formats(own)
    own = own.assign(place=own["format"].map(names.index).astype(float))

    def ticks(axes: Axes, panel: pd.DataFrame) -> None:
        axes.set_xticks(range(len(names)), names)
        axes.set_xlim(-0.3, len(names) - 0.7)

    def exponent(each: pd.DataFrame) -> Interval:
        units = each["format"].map(lambda name: Format.parse(name).u).astype(float)
        return over_column(each.assign(**{SIZE: each[SIZE] * units}), "u", SIZE, "u", SAME_INPUTS)

    return _lines(in_u(own, (SIZE,)), "number format F, from few mantissa bits to many", ticks, exponent, "u")


def _lines(
    rows: pd.DataFrame,
    text: str,
    ticks: Callable[[Axes, pd.DataFrame], None],
    exponent: Callable[[pd.DataFrame], Interval],
    symbol: str,
) -> Figure:
    """A panel for each scenario, a line for each gradient over the column `place`, and its exponent of `symbol`."""

    def draw(axes: Axes, panel: Panel) -> None:
        ticks(axes, panel.rows)
        for place, output in enumerate(measured(panel.rows)):
            here = of_output(panel.rows, output)
            line(axes, means(here, "place", SIZE), color=SHADES[output], marker="o", elinewidth=0.8)
            value, _, interval = power.text().partition(" ") if (power := value_of(exponent, here)) else ("", "", "")
            words = f"$\\propto {symbol}^{{{value}}}$ {interval}" if value else ""
            corner(axes, f"{SYMBOLS[output]} {words}", down=3 + 10 * place, color=SHADES[output])

    def ends(own: pd.DataFrame) -> tuple[float, float]:
        each = [limits(of_output(own, output), (SIZE,), "place") for output in measured(own)]
        low, high = at_least_a_decade(min(low for low, _ in each), max(high for _, high in each))
        return low, room_above(low, high, _ROOM)

    figure = draw_grid(by_scenario(rows), draw, ends, axes_text=(text, "‖D‖ / ‖golden‖, in u of F"), heights=(2.0, 1.7))
    legend(figure, {SYMBOLS[name]: Line2D([], [], color=SHADES[name], marker="o") for name in measured(rows)}, 3)
    return figure


_SHARE, _STAYS = "top_share", "step_alignment"


def weigh_direction(rows: pd.DataFrame) -> Evidence:
    """The top singular vector of every gradient's error stays from one draw of the inputs to the next, more than by chance."""

    def judge(own: pd.DataFrame) -> Evidence:
        each = {SYMBOLS[name]: select(of_output(own, name), reference=SAME_INPUTS) for name in GRADIENTS}
        times = {name: _alignment(one) for name, one in each.items()}
        figure = ", ".join(f"{name} {value.text()}" for name, value in times.items())
        shares = ", ".join(f"{name} {_mean(one, _SHARE).text()}" for name, one in each.items())
        sentence = (
            f"the |cosine| of the top singular vector with that of the seed before, over that of chance, is {figure}; "
            f"the share of the error's energy in that vector is {shares}.{left_out(*times.values())}"
        )
        return Evidence(f"{figure} times chance", sentence, tuple(Question(value, LARGER) for value in times.values()))

    return by_format(rows, judge)


def _alignment(rows: pd.DataFrame) -> Interval:
    """The alignment of the error's top singular vector with that of the seed before, over what it is by chance."""
    own = rows.dropna(subset=_STAYS)
    if own.empty:
        raise Undecidable("the direction of an error is compared between seeds, and there is one")
    values = per_replicate(own.assign(times=own[_STAYS] / own["problem.shape.head_dim"].map(by_chance)), "times")
    return ratio(values["value"], [1.0] * len(values), values.index, values["cluster"])


def by_chance(dim: int) -> float:
    """The mean |cosine| of a random unit vector of so many numbers with any other: `Gamma(d/2) / (sqrt(pi) Gamma((d+1)/2))`."""
    return float(beta(dim / 2, 0.5)) / math.pi


def _mean(rows: pd.DataFrame, metric: str) -> Interval:
    return mean_of(per_replicate(rows.dropna(subset=metric), metric))


def draw_direction(rows: pd.DataFrame) -> Figure:
    """How well the top singular vector of each gradient's error keeps its direction, and how much of the error lies in it."""
    own = narrowest(_chosen(rows))
    chance = by_chance(int(own["problem.shape.head_dim"].iloc[0]))

    def draw(axes: Axes, panel: Panel) -> None:
        axes.set_yscale("linear")
        axes.set_ylim(0, 1.05)
        axes.axhline(chance, **DASHED)
        names = measured(panel.rows)
        for place, output in enumerate(names):
            for metric, shift, face in ((_STAYS, -0.12, SHADES[output]), (_SHARE, 0.12, "white")):
                value = _mean(of_output(panel.rows, output), metric)
                if value.count:
                    look: dict[str, Any] = {"color": SHADES[output], "marker": "o", "markerfacecolor": face}
                    axes.errorbar(place + shift, value.estimate, whiskers([value]), **look)
        axes.set_xticks(range(len(names)), [SYMBOLS[name] for name in names])
        axes.set_xlim(-0.5, len(names) - 0.5)
        axes.tick_params(axis="x", length=0)

    text = f"gradient (F = {own['format'].iloc[0].upper()})", "top singular vector of the error"
    figure = draw_grid(by_scenario(own), draw, lambda _: (0.1, 1.0), axes_text=text, heights=(2.0, 1.7))
    keys = {
        "|cosine| with that of the seed before": Line2D([], [], color=GREY, marker="o", linestyle=""),
        "the same by chance": Line2D([], [], **DASHED),
        "its share of the error's energy": Line2D([], [], color=GREY, marker="o", linestyle="", markerfacecolor="white"),
    }
    legend(figure, keys, 3)
    return figure


LEAST = 0.025
"""Of u. If half of the sums of P V are halfway cases, as sums of two numbers with one exponent are, and all of these are rounded
to one side, by u / 2 at least, then O is off by u / 4 at least on average. Below a tenth of that there is no bias."""
_FORM, _READ = "variant.recompute.delta", "variant.recompute.output"
_ACCUMULATES = ("variant.forward.precision.values", "variant.forward.precision.accumulator")
_WIDE = ("fp32", "fp64")


class Made(NamedTuple):
    """How delta is made: F, whether O is accumulated in FP32 or FP64, `DeltaForm` and `OutputForDelta`."""

    fmt: str
    wide: bool
    form: str
    read: str

    @property
    def text(self) -> str:
        """For a reader."""
        form = f"dO·O, O {'before' if self.read == 'unrounded' else 'after'} its cast" if self.form == "output" else "dP·P"
        return f"{self.fmt}, PV in {'FP32' if self.wide else self.fmt}: {form}"


def ways(rows: pd.DataFrame) -> dict[Made, pd.DataFrame]:
    """The rows of delta by how it is made, with `bias` in units of u of the study's format and relative to the mean |delta|."""
    own = of_output(rows, "delta")
    lacking = [name for name in (_FORM, _READ, *_ACCUMULATES) if name not in own]
    if lacking:
        raise Undecidable(f"the points do not say {', '.join(lacking)}")
    units = own["format"].map({name: Format.parse(name).u for name in own["format"].unique()}).astype(float)
    size = (own["mean_absolute"] / own["relative_l1"]).where(own["relative_l1"] > 0, 1.0)  # mean |delta|
    wide = own[list(_ACCUMULATES)].apply(lambda each: each.str.partition("@")[0].isin(_WIDE)).all(axis=1)
    grouped = own.assign(bias=own["bias"] / size / units, wide=wide).groupby(["format", "wide", _FORM, _READ], sort=False)
    each = {Made(str(fmt), bool(wide), str(form), str(read)): group for (fmt, wide, form, read), group in grouped}
    return dict(sorted(each.items(), key=lambda item: (FORMATS.index(item[0].fmt), *item[0][1:])))


def _judged(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows without those that the study declares to be controls."""
    roles = [name for name in rows if str(name).startswith(ENTRY_ROLE)]
    return rows[~(rows[roles] == EntryRole.CONTROL.value).any(axis=1)]


def _bias(rows: pd.DataFrame) -> Interval:
    """The mean over replicates, with its sign."""
    return _mean(select(rows, reference=SAME_INPUTS), "bias")


def weigh_bias(rows: pd.DataFrame, *, wide: bool) -> Evidence:
    """Delta from O is biased away from zero where P V is rounded tile by tile, and not biased where O is accumulated in FP32."""

    def judge(own: pd.DataFrame) -> Evidence:
        each = {made: _bias(of) for made, of in ways(own).items() if made.wide == wide and made.form == "output"}
        if not each:
            raise Undecidable(f"nothing was measured with O accumulated in {'FP32' if wide else 'a low format'}")
        listed = "; ".join(f"{value.text()} u with {made.text}" for made, value in each.items())
        region = Region(-LEAST, LEAST) if wide else Region(low=LEAST)
        questions = tuple(Question(value, region) for value in each.values())
        return Evidence(
            ", ".join(f"{value.text()} u" for value in each.values()), f"the signed bias of delta is {listed}.", questions
        )

    return by_format(_judged(rows), judge)


def weigh_delta_forms(rows: pd.DataFrame) -> Evidence:
    """With O accumulated in FP32, delta computed from the rounded O is farther from the exact one than delta computed from P."""

    def judge(own: pd.DataFrame) -> Evidence:
        each = {made: of for made, of in ways(own).items() if made.wide}
        rounded = [of for made, of in each.items() if made.form == "output" and made.read == "rounded"]
        recomputed = [of for made, of in each.items() if made.form != "output"]
        if not (rounded and recomputed):
            raise Undecidable("it compares delta from the rounded O with delta from P, both with O accumulated in FP32")
        times = over(*(per_replicate(select(of, reference=SAME_INPUTS), EVERY) for of in (rounded[0], recomputed[0])))
        sentence = f"the RMSE of delta computed from the rounded O is {times.text()} times that of delta computed from P."
        return Evidence(times.text(), sentence + left_out(times), (Question(times, LARGER),))

    return by_format(_judged(rows), judge)


def draw_delta(rows: pd.DataFrame) -> Figure:
    """The signed bias of delta, a row for each way to make it, below the title of its scenario."""
    blocks = []
    for scenario in ordered(rows):
        known = ((made, value_of(_bias, own)) for made, own in ways(of(rows, scenario)).items())
        blocks.append((scenario, {made: value for made, value in known if value is not None}))
    low = [value for _, each in blocks for made, value in each.items() if made.fmt not in _WIDE]
    ends = [most for value in low if (most := max(abs(value.low), abs(value.high))) <= 1]
    end = 1.05 * max(ends, default=0.0) or 4 * LEAST  # all intervals within 1 u are inside, and `LEAST` can be seen
    lines = sum(1 + len(each) for _, each in blocks)
    figure = Figure(figsize=(PAGE, 0.7 + 0.145 * lines), layout="constrained")
    axes = figure.add_subplot()
    axes.axvspan(-LEAST, LEAST, color=PALE, zorder=0, linewidth=0)
    axes.axvline(0, color="black", linewidth=0.8, zorder=1)
    named: dict[int, str] = {}
    place = 0
    for scenario, each in blocks:
        words: dict[str, Any] = {"va": "center", "fontsize": 7, "fontweight": "bold", "bbox": WHITE}
        axes.annotate(titled(scenario), (0, place), (2, 0), ("axes fraction", "data"), "offset points", **words)
        for made, value in each.items():
            place += 1
            named[place] = made.text
            _mark(axes, place, value, end, FP32_INSIDE if made.wide else TILED)
        place += 1
    axes.set_yticks(list(named), list(named.values()), fontsize=SMALL)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(lines - 0.4, -0.7)
    axes.set_xlim(-end, 1.15 * end)  # on the right is room for the values
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    text = f"signed bias of delta in u of the format: mean of sign(delta) D / mean |delta|; grey: within {LEAST:g} u"
    figure.supxlabel(text, fontsize=SMALL)
    return figure


def _mark(axes: Axes, place: int, value: Interval, end: float, shade: str) -> None:
    """The bias with its interval, or an arrow where it lies beyond the end; its value in the margin of the panel."""
    bias = value.estimate
    if abs(bias) <= end:
        bars = [[min(half, end - abs(bias)) for half in side] for side in whiskers([value])]
        axes.errorbar(bias, place, xerr=bars, color=shade, marker="o")
    else:
        axes.errorbar(math.copysign(0.96 * end, bias), place, xerr=0.0, color=shade, marker="<" if bias < 0 else ">")
    shown = round(bias, 2) + 0.0  # no minus before a zero
    text = f"{shown:+.2f}" if abs(shown) < 100 else f"{bias:+.0e}"
    look: dict[str, Any] = {"ha": "right", "va": "center", "fontsize": SMALL, "color": GREY}
    axes.annotate(text, (1, place), (-2, 0), ("axes fraction", "data"), "offset points", **look)
