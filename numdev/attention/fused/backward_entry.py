"""The passes of the backward pass as numba keeps them on disk; see `entry`."""

from __future__ import annotations

from typing import Any

from numba import njit

from numdev.attention.fused import backward_layout, backward_passes, entry

MODULES = (*entry.MODULES, backward_layout, backward_passes)


def _entries(sources: str, *, cached: bool) -> tuple[Any, Any, Any, Any]:
    compiled = njit(nogil=True, error_model="numpy", cache=cached)

    @compiled
    def recompute(s, planes, ranges, place, ops, settings, table):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        backward_passes.recompute(s, planes, ranges, place, ops, settings, table)

    @compiled
    def differ(p, dp, planes, ranges, events, place, ops, settings):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        backward_passes.differ(p, dp, planes, ranges, events, place, ops, settings)

    @compiled
    def add(total, new, place, ops):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        backward_passes.add(total, new, place, ops)

    @compiled
    def add_in_turn(total, shares, turns, rounded, added):  # type: ignore[no-untyped-def]
        sources  # noqa: B018
        backward_passes.add_in_turn(total, shares, turns, rounded, added)

    return recompute, differ, add, add_in_turn


recompute, differ, add, add_in_turn = _entries(entry.stamp(*MODULES), cached=entry.is_cached())
