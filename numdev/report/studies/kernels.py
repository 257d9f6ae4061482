"""Which precision policy real kernels follow: FP32 inside, or every step in the format."""

from __future__ import annotations

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from numdev.report.claims.claim import OURS
from numdev.report.claims.comparisons import clustered
from numdev.report.claims.finding import Evidence, Question, Region, Undecidable, about, select
from numdev.report.figures.grid import replicates, whiskers
from numdev.report.figures.plot import Plot
from numdev.report.figures.style import BLACK, FP32_INSIDE, GREY, TILED
from numdev.report.reading.scenarios import formats
from numdev.report.statistics.estimates import Interval, ratio, significant
from numdev.report.studies.attention import claim
from numdev.report.studies.chapter import Chapter
from numdev.report.studies.entries import KERNEL, METRIC, beside, kernels, panels, readable, subjects, the
from numdev.report.studies.published import FA3
from numdev.results.manifest import EntryRole

NEAR = 1.25  # an RMSE within this factor of kernel(F)'s is kernel(F)'s
_SHADES = {EntryRole.CONTROL: TILED, EntryRole.EXPECTED: FP32_INSIDE, EntryRole.SUBJECT: BLACK, EntryRole.ASIDE: GREY}


def over_policy(rows: pd.DataFrame, name: str, policy: str) -> Interval:
    """The RMSE of a kernel from golden over that of an emulated policy, paired by problem and seed."""
    own, other = (clustered(select(rows, "variant", "golden", **{KERNEL: which})) for which in (name, policy))
    columns = ["pairing", "seed", METRIC]
    pairs = own[[*columns, "cluster"]].merge(other[columns], on=["pairing", "seed"], suffixes=("", "_policy"))
    return ratio(pairs[METRIC], pairs[f"{METRIC}_policy"], pairs["seed"], pairs["cluster"])


def weigh_kernels(rows: pd.DataFrame) -> Evidence:
    """Every fused kernel deviates from golden as much as `kernel(F)`, the expected entry, does.

    That says something of `uniform(F)`, the control, only if it deviates more, which is a condition.
    """
    names, like = subjects(rows), the(rows, EntryRole.EXPECTED)
    times = {name: over_policy(rows, name, like) for name in names}
    strict = over_policy(rows, the(rows, EntryRole.CONTROL), like)
    near = tuple(Question(t, about(1.0, NEAR)) for t in times.values())
    questions = (*near, Question(strict, Region(low=NEAR), is_condition=True))
    told = ", ".join(f"{name.replace('_', ' ')} {t.text()}" for name, t in times.items())
    low, high = min(t.estimate for t in times.values()), max(t.estimate for t in times.values())
    uniform = significant(strict.estimate)
    figure = f"{significant(low, 3)} to {significant(high, 3)} times kernel(F), uniform(F) {uniform} times"
    return Evidence(figure, f"RMSE from golden over that of kernel(F): {told}; uniform(F) {strict.text()}.", questions)


def draw_kernels(rows: pd.DataFrame) -> Figure:
    """RMSE of each kernel from golden, between the emulated policies `kernel(F)` and `uniform(F)`."""
    names, fmt = kernels(rows), formats(rows)[0].upper()
    policy = {EntryRole.CONTROL: f"every step in {fmt}", EntryRole.EXPECTED: f"kernel({fmt}), emulated"}

    def draw(axes: Axes, own: pd.DataFrame) -> None:
        for place, (name, role) in enumerate(names.items()):
            try:
                interval = replicates(select(own, "variant", "golden", **{KERNEL: name}), METRIC)
            except Undecidable:
                axes.annotate("not measured", (0, place), (3, 0), xycoords=("axes fraction", "data"), **beside(GREY))
                continue
            assert interval is not None, "select refuses what holds NaN"
            emulated, shade = role in policy, _SHADES[role]
            axes.errorbar(interval.estimate, place, xerr=whiskers([interval]), color=shade, marker="D" if emulated else "o")
            if emulated:
                axes.axvline(interval.estimate, color=shade, linestyle="--", linewidth=0.6, zorder=0)

    shown = [policy.get(role, readable(name)) for name, role in names.items()]
    return panels(rows, shown, draw, "RMSE of O from golden, absolute")


CHAPTERS = (
    Chapter(
        place=110,
        study="kernels",
        title="Kernels compared with emulated policies",
        question="Where do production kernels stand between FP32 inside and every step in the format?",
        measured="Each kernel against golden, beside the emulated policies.",
        paper="Fused kernels keep S, m, l and O in FP32 (Shah et al. 2024, section 4.3).",
        claims=(
            claim(
                "kernels",
                "kernels",
                "Production kernels deviate as FP32 inside does, kernel(F), not as every step in the format, uniform(F)",
                f"{OURS}; that their kernels keep S, m, l and O in FP32 is said in {FA3}, section 4.3",
                weigh_kernels,
                is_ours=True,
            ),
        ),
        figures={
            "kernels": Plot(
                draw_kernels,
                "One line per kernel, a panel per scenario, on a log axis: its RMSE from golden. Dashed lines stand at the "
                "emulated policies: FP32 inside, and every step in the format.",
                ("kernel",),
            ),
        },
    ),
)
