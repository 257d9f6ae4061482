"""Casts and operations that round once, compiled by numba: `numdev.arithmetic.rounding` and `elementary` bit for bit, in FP32.

The bits of a number are a 32-bit integer, and magnitudes have the order of their bits. A loop runs over a whole array or slice,
because only then does the compiler know that no index is negative, and uses vector instructions.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from numdev.attention.fused.layout import (
    ABOVE,
    AWAY,
    BELOW,
    BY_ADDER,
    BY_CARRY,
    CAREFUL,
    DOWN,
    EVEN,
    FLUSH,
    HIGH,
    INFINITE,
    KIND,
    LOW,
    MODE,
    ODD,
    ON_BITS,
    SCALED,
    SHIFT,
    TOP,
    UP,
)

compiled = njit(nogil=True, error_model="numpy")

I32, F32 = np.int32, np.float32
SIGN, MAGNITUDE, INFINITY, LARGEST_BITS = I32(-2147483648), I32(0x7FFFFFFF), I32(0x7F800000), I32(0x7F7FFFFF)
NEVER = F32(-np.inf)


@compiled
def end(rounded, bits, op):
    """The bits of a result from its rounded magnitude and the bits of what was rounded to nearest."""
    magnitude = I32(bits & MAGNITUDE)
    rounded = op[ABOVE] if rounded > op[TOP] else rounded
    rounded = magnitude if magnitude > INFINITY else rounded
    return I32(rounded | I32(bits & SIGN)).view(F32)


@compiled
def on_bits(x, op):
    """`cast(x)` to nearest even in a format with the exponents of FP32: half a unit is added, less one bit, and the rest cut."""
    unit = I32(1 << op[SHIFT])
    half, kept = I32((unit >> 1) - 1), I32(-unit)
    for i in range(x.size):
        bits = F32(x[i]).view(I32)
        magnitude = I32(bits & MAGNITUDE)
        carry = I32(half + (I32(1) if magnitude & unit != 0 else I32(0)))
        x[i] = end(I32(I32(magnitude + carry) & kept), bits, op)


@compiled
def by_carry(x, op):
    """The same where what overflows becomes infinity, as the carry does by itself, and subnormal numbers are kept."""
    unit = I32(1 << op[SHIFT])
    half, kept = I32((unit >> 1) - 1), I32(-unit)
    for i in range(x.size):
        bits = F32(x[i]).view(I32)
        rounded = I32(I32(bits + I32(half + (I32(1) if bits & unit != 0 else I32(0)))) & kept)
        x[i] = I32(bits if I32(bits & MAGNITUDE) > INFINITY else rounded).view(F32)


@compiled
def by_adder(x, op):
    """The same for fewer exponents, by adding and subtracting `1.5 * 2^(E + 23 - m)` (`numdev.arithmetic.bits.round_magic`)."""
    low, high, magic = op[LOW], op[HIGH], I32((op[SHIFT] << 23) | 0x400000)
    for i in range(x.size):
        bits = F32(x[i]).view(I32)
        magnitude = I32(bits & MAGNITUDE)
        constant = I32(min(max(I32(magnitude & INFINITY), low), high) + magic).view(F32)
        x[i] = end(F32(F32(magnitude.view(F32) + constant) - constant).view(I32), bits, op)


@compiled
def scaled(x, op):
    """The same in any mode, in FP64: `t = |x| 2^(m - E)` rounded to an integer (`numdev.arithmetic.bits.round_scaled`)."""
    mode = op[MODE]
    for i in range(x.size):
        bits = F32(x[i]).view(I32)
        magnitude = I32(bits & MAGNITUDE)
        if magnitude > INFINITY:
            continue
        if magnitude == INFINITY:
            x[i] = I32(op[INFINITE] | I32(bits & SIGN)).view(F32)
            continue
        quantum = np.int64((max(magnitude, op[LOW]) >> 23) - 127 - (23 - op[SHIFT]))
        t = np.float64(magnitude.view(F32)) * np.int64((1023 - quantum) << 52).view(np.float64)
        whole = np.floor(t)
        odd = whole != 2.0 * np.floor(0.5 * whole)
        up = (mode == AWAY and t - whole >= 0.5) or (mode == ODD and t != whole and not odd)
        up = up or (mode == EVEN and (t - whole > 0.5 or (t - whole == 0.5 and odd)))
        up = up or (t != whole and ((mode == UP and bits >= 0) or (mode == DOWN and bits < 0)))
        rounded = F32((whole + (1.0 if up else 0.0)) * np.int64((1023 + quantum) << 52).view(np.float64)).view(I32)
        if rounded > op[TOP]:
            rounded = op[ABOVE] if bits >= 0 else op[BELOW]
        x[i] = I32((rounded if rounded >= op[FLUSH] else I32(0)) | I32(bits & SIGN)).view(F32)


@compiled
def cast(x, op):
    """The cast of a flat array, in place."""
    if op[KIND] == BY_CARRY:
        by_carry(x, op)
    elif op[KIND] == ON_BITS:
        on_bits(x, op)
    elif op[KIND] == BY_ADDER:
        by_adder(x, op)
    elif op[KIND] == SCALED:
        scaled(x, op)


@compiled
def settled(s, e, finite):
    """`s`, or where it is even its neighbour on the side of the rest `e` that it lacks: rounding to odd.

    Of finite operands it is the largest number where `s` is infinite.
    """
    bits = F32(s).view(I32)
    magnitude, sign = I32(bits & MAGNITUDE), I32(bits & SIGN)
    moved = I32(bits + (I32(1) if (s > 0) == (e > 0) else I32(-1)))
    moved = (I32(1) if e > 0 else I32(SIGN | I32(1))) if magnitude == 0 else moved
    moves = (e != 0) & (abs(e) < np.inf) & (magnitude < INFINITY) & (I32(bits & I32(1)) == 0)
    result = moved if moves else bits
    result = I32(LARGEST_BITS | sign) if finite & (magnitude == INFINITY) else result
    return I32(result).view(F32)


@compiled
def careful_product(x, y):
    """`x y`, settled: of two FP32 numbers it is exact in FP64."""
    wide = np.float64(x) * np.float64(y)
    s = F32(wide)
    return settled(s, wide - np.float64(s), np.isfinite(x) & np.isfinite(y))


@compiled
def times(x, y, op):
    """`x <- cast(x y)`, rows with one `y` each."""
    for r in range(x.shape[0]):
        row, factor = x[r], y[r]
        if op[CAREFUL]:
            for i in range(row.size):
                row[i] = careful_product(row[i], factor)
        else:
            for i in range(row.size):
                row[i] *= factor
    cast(x.reshape(-1), op)


@compiled
def weigh(x, y, op):
    """`x <- cast(x y)`, number by number."""
    if op[CAREFUL]:
        for i in range(x.size):
            x[i] = careful_product(x[i], y[i])
    else:
        for i in range(x.size):
            x[i] *= y[i]
    cast(x, op)


@compiled
def over(x, y, op):
    """`x <- cast(x / y)`, rows with one `y` each."""
    for r in range(x.shape[0]):
        row, divisor = x[r], y[r]
        if op[CAREFUL]:
            for i in range(row.size):
                wide = np.float64(row[i]) / np.float64(divisor)
                s = F32(wide)
                row[i] = settled(s, wide - np.float64(s), np.isfinite(row[i]) & np.isfinite(divisor) & (divisor != 0))
        else:
            for i in range(row.size):
                row[i] /= divisor
    cast(x.reshape(-1), op)


@compiled
def careful_sum(x, y):
    """`x + y`, settled (TwoSum)."""
    s = F32(x + y)
    part = F32(s - x)
    rest = F32(F32(x - F32(s - part)) + F32(y - part))
    return settled(s, np.float64(rest), np.isfinite(x) & np.isfinite(y))


@compiled
def minus(x, y, op):
    """`x <- cast(x - y)`, rows with one `y` each."""
    for r in range(x.shape[0]):
        row, term = x[r], F32(-y[r])
        if op[CAREFUL]:
            for i in range(row.size):
                row[i] = careful_sum(row[i], term)
        else:
            for i in range(row.size):
                row[i] += term
    cast(x.reshape(-1), op)


@compiled
def plus(x, y, op):
    """`x <- cast(x + y)`, number by number."""
    if op[CAREFUL]:
        for i in range(x.size):
            x[i] = careful_sum(x[i], y[i])
    else:
        for i in range(x.size):
            x[i] += y[i]
    cast(x, op)


@compiled
def look_up(x, table, shift, base):
    """`x <- table(x)`: places are the bits of a number of the table's format, without those that are always 0; the last is NaN's.

    First every number becomes its place, by vector instructions, then what stands there.
    """
    half, shift, base = I32(table.size // 2), I32(shift & 31), I32(base)
    for i in range(x.size):
        bits = F32(x[i]).view(I32)
        magnitude = I32(bits & MAGNITUDE)
        place = min(max(I32(I32(magnitude >> shift) - base), I32(0)), I32(half - I32(1)))
        place = I32(place + half) if bits < 0 else place
        x[i] = I32(place if magnitude <= INFINITY else I32(half + half)).view(F32)
    for i in range(x.size):
        x[i] = table[np.uint32(F32(x[i]).view(I32))]


@compiled
def largest_of(x, largest):
    """The largest number of each row; NaN where there is one."""
    for r in range(x.shape[0]):
        row, best = x[r], SIGN
        for i in range(row.size):
            bits = F32(row[i]).view(I32)
            ordered = I32(bits ^ I32((bits >> 31) & MAGNITUDE))
            best = max(best, MAGNITUDE if I32(bits & MAGNITUDE) > INFINITY else ordered)
        largest[r] = I32(best ^ I32((best >> 31) & MAGNITUDE)).view(F32)


@compiled
def sum_of(x, lanes):
    """The sum of at most 512 numbers in the order of torch's own on a CPU: four vectors of 8 lanes in turn, then the lanes.

    Vectors beyond a multiple of four go to the first, numbers beyond a multiple of 8 come before the lanes.
    """
    if x.size < 8:
        return short_sum(x)
    vectors = x.size // 8
    quads = vectors // 4
    lanes[:] = F32(0)
    for i in range(quads):
        part = x[32 * i : 32 * (i + 1)]
        for j in range(part.size):
            lanes[j] += part[j]
    for i in range(4 * quads, vectors):
        part = x[8 * i : 8 * (i + 1)]
        for j in range(part.size):
            lanes[j] += part[j]
    for k in range(1, 4 if quads else 1):
        for j in range(8):
            lanes[j] += lanes[8 * k + j]
    total = F32(0)
    for i in range(8 * vectors, x.size):
        total += x[i]
    for j in range(8):
        total += lanes[j]
    return total


@compiled
def short_sum(x):
    """The same of fewer than 8 numbers: four in turn, those beyond go to the first."""
    together = 4 if x.size >= 4 else 1
    total = x[0]
    for i in range(together, x.size):
        total += x[i]
    for i in range(1, together):
        total += x[i]
    return total
