"""Where each number stands in the arrays that compiled code takes."""

from __future__ import annotations

# A cast, and whether the operation before it needs care (`numdev.arithmetic.elementary`): a row of int32.
KIND, SHIFT, LOW, HIGH, TOP, ABOVE, BELOW, INFINITE, FLUSH, MODE, CAREFUL, FIELDS = range(12)
NOTHING, BY_CARRY, ON_BITS, BY_ADDER, SCALED = range(5)
EVEN, AWAY, ZERO, UP, DOWN, ODD = range(6)
# Operations, by the names of `numdev.attention.operations`, and the casts that follow no operation.
(SCALE_S, SHIFT_TIES, SHIFT_S, FALL, WEIGH_SUM, ADD_SUMS, UNSCALE_SUM, SCALE_P, UNSCALE_V, RESCALE_O, WEIGH_O) = range(11)
WEIGH_V, ACCUMULATE, ACCUMULATE_WEIGHED, NORMALISE, ROUND_S, ROUND_E, ROUND_A, ROUND_L, ADD_PIECE, ROUND_V, OPERATIONS = range(
    11, 22
)
# Settings: FP64 numbers and truth values.
(FACTOR, THRESHOLD, TIE_SHIFT, P_SCALE, LIMIT, LOCAL, EACH, SUM_ROUNDED, KEEPS, COUNT, LAGS, SATURATES) = range(12)
EVERY, E_SHIFT, E_BASE, A_SHIFT, A_BASE, SETTINGS = range(12, 18)
# Planes of one number per row, and events.
M, L, FALLS, RISES, SUM, KEPT, SEEN, LARGEST, TIES, OLD, PLANES = range(11)
RESCALED, ONES, STAGNATED, SATURATED, NONZERO, VISIBLE, EVENTS = range(7)
