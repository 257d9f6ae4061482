"""Colours have one meaning each."""

from __future__ import annotations

from itertools import combinations

from matplotlib.colors import to_rgb

from numdev.report.figures import style


def meanings() -> dict[str, str]:
    """Every colour by what it means."""
    single = {name: getattr(style, name) for name in ("GREY", "PALE", "BLACK", "TILED", "FP32_INSIDE", "BASELINE")}
    groups = (style.FORMAT_COLOURS, style.OUTPUT_COLOURS, style.CHANGE_COLOURS)
    series = {f"series {place}": shade for place, shade in enumerate(style.SERIES)}
    return single | {name: shade for group in groups for name, shade in group.items()} | series


def test_no_two_meanings_share_a_colour() -> None:
    for (one, first), (other, second) in combinations(meanings().items(), 2):
        distance = sum((a - b) ** 2 for a, b in zip(to_rgb(first), to_rgb(second), strict=True)) ** 0.5
        assert distance > 0.05, (one, other)
