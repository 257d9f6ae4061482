"""What a tiled run counts of itself: the columns, their units, and what they mean."""

from __future__ import annotations

COUNTERS = {
    "rescales_per_row": ("per row", "times that alpha differed from 1 on a row already begun, mean over rows"),
    "tied_rows": ("relative", "share of rows whose largest score occurs more than once"),
    "p_one_per_row": ("per row", "entries of P equal to 1, mean over rows"),
    "p_flushed": ("relative", "share of the visible entries of P that are 0 after the probabilities cast"),
    "p_saturated": ("relative", "share of the visible entries of P beyond the largest number of the probabilities format"),
    "stagnated_per_row": ("per row", "additions of something positive that left a running row sum as it was, mean over rows"),
    "lost_rows": (
        "relative",
        "share of rows that see a key and whose row sum is 0: their result is 0, their LSE -inf",
    ),
}
