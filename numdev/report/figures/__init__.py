"""Every figure by name: rows of one study in, a matplotlib Figure out.

Nothing here judges a claim or writes a file.
"""

from __future__ import annotations

from numdev.report.figures.assumptions import fig4_assumptions
from numdev.report.figures.beyond import parting, rescales, total
from numdev.report.figures.comparisons import fa3_table3, sign
from numdev.report.figures.formats import fig3, fig4
from numdev.report.figures.kernels import policies, validate
from numdev.report.figures.plot import Plot
from numdev.report.figures.shapes import fig6a, fig6b
from numdev.report.figures.trends import fig5a, fig5b, fig6c

_PANELS = (
    "One panel per scenario, our assumption about the paper first; geometric means over seeds or captured heads, with their 95 % "
    "confidence intervals."
)
_SHAPES = (
    "on log axes; a panel per scenario and number format, with the ratio of the two, its interval, and what the paper found."
)

FIGURES: dict[str, Plot] = {
    "fig3": Plot(
        fig3,
        "Bars of the max difference between tiled attention and the baseline for each number format, on a log axis, "
        f"with the unit roundoff u of the format as a dashed line. {_PANELS}",
    ),
    "fig4": Plot(
        fig4,
        "Pairs of bars for each number format, on a log axis: the max difference of tiled attention and of the "
        "baseline from golden. The ratio of the pair is written above BF16, and a dashed line stands at the paper's "
        f"ten times. {_PANELS}",
    ),
    "fig4_assumptions": Plot(
        fig4_assumptions,
        "Lines of the ratio of Figure 4, the max difference of tiled attention from golden over that of the baseline at BF16, "
        "over the sequence length N, on log axes, one line per distribution of the inputs, each with its name and 95 % "
        "confidence intervals; a dashed line stands at the paper's ten times, and a band at half and twice that.",
    ),
    "fig5a": Plot(
        fig5a,
        "Lines of the max difference between tiled attention and the baseline over the sequence length N, on log axes, "
        f"one per number format, in units of its unit roundoff, each with its exponent of N; an arrow "
        f"tells the paper's trend. {_PANELS}",
    ),
    "fig5b": Plot(
        fig5b,
        "Lines of the mean absolute difference between tiled attention and the baseline (solid) and of the standard "
        "deviation of the difference (dashed) over the sequence length N, on log axes, one pair per number format, in "
        f"units of its unit roundoff; an arrow tells the paper's trend. {_PANELS}",
    ),
    "fig6a": Plot(
        fig6a,
        "Lines of the max difference over the block area, with the paper's tile (solid) and with Br and Bc swapped "
        f"(dashed), {_SHAPES} {_PANELS}",
        ("tiling.shape", "tiling.sram"),
    ),
    "fig6b": Plot(
        fig6b,
        "Lines of the max difference over the block area, with the paper's tile (solid) and with square ones (dashed), "
        f"{_SHAPES} {_PANELS}",
        ("tiling.shape", "tiling.sram"),
    ),
    "fig6c": Plot(
        fig6c,
        "Lines of the max difference between tiled attention and the baseline over the block area Br times Bc, on log "
        f"axes, one per number format, in units of its unit roundoff, each with its exponent; an arrow "
        f"tells the paper's trend. {_PANELS}",
    ),
    "fa3_table3": Plot(
        fa3_table3,
        "One line per method of FlashAttention-3's Table 3, on a log axis: the measured RMSE with its 95 % confidence "
        "interval, the published one as a diamond, and a band from 2/3 to 3/2 of the published one.",
    ),
    "sign": Plot(
        sign,
        "One line per scenario, number format and precision policy, on a log axis: the deviation of tiled attention "
        "from golden divided by the baseline's, by max difference (filled) and by RMSE (open). Right of 1 tiled "
        "attention is worse, left of it better; dashed lines stand at the 10 of Golden et al. and the 1/1.7 of "
        "FlashAttention-3.",
    ),
    "parting": Plot(
        parting,
        "Lines of the max difference from golden over the sequence length N on log axes, one per scenario and one per "
        "baseline, each with its name: where every step rounds to the format (red) the error parts from FP32 inside (blue).",
        title="Where the policies part: the max difference from golden over the sequence length",
    ),
    "total": Plot(
        total,
        "One numbered point per scenario, with a list of their titles, of the narrowest format, on log axes of equal aspect: "
        "total error, from golden on the unrounded inputs, over arithmetic error, from golden on the same rounded inputs; tiled "
        "attention filled, its baselines open and with letters. On the diagonal the two are equal; above it, the rounding of the "
        "inputs has its share.",
        title="Total error against arithmetic error",
    ),
    "rescales": Plot(
        rescales,
        "One panel per scenario, all with the same axes: the max difference between tiled attention and the baseline of the "
        "narrowest format over the block area, and on the right axis the number of rescales R, which falls with it.",
        title="The deviation over the block area, beside the number of rescales",
    ),
    "validate": Plot(
        validate,
        "One line per kernel, a panel per scenario, on a log axis: the RMSE between the kernel and its emulation in pure "
        "tensors, divided by the emulation's own RMSE from golden, for each number format, with the share of elements that "
        "are equal to the bit. Left of 1 the emulation predicts the kernel's errors.",
        ("kernel",),
    ),
    "kernels": Plot(
        policies,
        "One line per kernel, a panel per scenario, on a log axis: its RMSE from golden. Dashed lines stand at the emulated "
        "policies: FP32 inside, and every step in the format.",
        ("kernel",),
    ),
}
