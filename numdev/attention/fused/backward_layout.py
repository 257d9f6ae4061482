"""Where each number of the backward pass stands in the arrays that compiled code takes; `layout` has the fields of a cast."""

from __future__ import annotations

# Operations, by the names of `numdev.attention.operations`, and the casts that follow no operation.
SCALE_S, SHIFT_S, SHIFT_DP, WEIGH_DIFFERENCE, ADD_DQ, ADD_DK, ADD_DV = range(7)
ROUND_S, ROUND_E, ROUND_P, ROUND_DP, ROUND_DS, ROUND_DQ, ROUND_DK, ROUND_DV, OPERATIONS = range(7, 16)
# Settings: FP64 numbers and truth values.
FACTOR, KEEPS, COUNT, E_SHIFT, E_BASE, SETTINGS = range(6)
# Planes of one number per row, and events.
LSE, DELTA, PLANES = range(3)
ABOVE_ONE, NONZERO_P, NONZERO_DS, VISIBLE, EVENTS = range(5)
# Where a tile begins: its head, its row, its key.
HEAD, ROW, KEY = range(3)
