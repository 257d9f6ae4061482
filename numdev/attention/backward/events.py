"""The events that a tiled backward run counts: their columns, units and meanings."""

from __future__ import annotations

BACKWARD_COUNTERS = {
    "p_above_one": ("relative", "share of the visible entries of P, as it is recomputed, above 1: only rounding can make them"),
    "p_flushed": ("relative", "share of the visible entries of P that are 0 after the probabilities cast"),
    "ds_flushed": ("relative", "share of the visible entries of dS that are 0 after the ds cast"),
}
